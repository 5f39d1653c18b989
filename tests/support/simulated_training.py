"""A tiny training in a simulation, and what must hold of it whatever befalls it."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

import functional_optim as fo
from functional_optim.replicas import Replica, Simulation

END = 6


class Momentum(NamedTuple):
    step: int
    buffer: Tensor


def lr(step: int) -> float:
    return 0.5 / (1 + step)


def momentum_by_hand() -> fo.GradientTransformation:
    """SGD with momentum and a schedule, in as few operations as can be."""

    def init(params: Tensor) -> Momentum:
        return Momentum(0, torch.zeros_like(params))

    def update(grads: Tensor, state: Momentum, params: Any = None) -> tuple[Tensor, Momentum]:
        buffer = state.buffer * 0.9 + grads
        return buffer * -lr(state.step), Momentum(state.step + 1, buffer)

    return fo.GradientTransformation(init, update)


def first_params(rank: int, life: int) -> Tensor:
    return torch.tensor([1.0 + rank, 2.0 + life])


def grad(params: Tensor, rank: int, seen: int) -> Tensor:
    """Of a problem of its own for every replica and every place in the data."""
    return params * (1.0 + 0.1 * rank) - 0.01 * seen


def bits(tree: Any) -> tuple[Any, ...]:
    """The content of a tree, to be compared bit for bit."""
    return tuple(
        [x.numpy().tobytes() if isinstance(x, Tensor) else x for x in optree.tree_leaves(tree)]
    )


class Training:
    """A worker, and what each of its replicas had after each of its steps."""

    def __init__(self, tx: fo.GradientTransformation | None = None, replica: Any = Replica) -> None:
        self.tx = momentum_by_hand() if tx is None else tx
        self.replica = replica
        self.trees: list[tuple[int, int, int, int, Any]] = []
        """(rank, life, steps that the group has committed, steps in the tree, bits of the tree)"""
        self.changed: list[str] = []
        self.began: dict[tuple[int, int], Tensor] = {}
        """by (rank, life): the parameters of its first step, the last time it tried"""

    def __call__(self, group: Any) -> Any:
        replica = self.replica(group, self.tx)
        now = replica.init(first_params(group.rank, group.life), extra={"seen": 0})
        while group.step < END:
            now = replica.start(now)
            if now.state.step >= END:
                break
            if now.state.step == 0:
                self.began[group.rank, group.life] = now.params.clone()
            before = bits(now)
            try:
                now, decision = replica.step(grad(now.params, group.rank, now.extra["seen"]), now)
            except MemoryError:
                continue  # the step is taken back, and a peer heals this replica in the next
            if decision.committed:
                now = now._replace(extra={"seen": now.extra["seen"] + decision.participants})
            elif not decision.healed and before != bits(now):
                self.changed.append(f"replica {group.rank} changed in a step refused")
            count = int(now.state.step)
            self.trees.append((group.rank, group.life, decision.step, count, bits(now)))
        replica.finish(now)
        return now


def check(training: Training, result: Any, exact: bool = True) -> list[str]:
    """What is wrong with a run; nothing, if all is as it must be.

    exact: compare with a plain loop, too, and not only replicas with each other.
    """
    wrong = list(training.changed)
    if result.lost:
        wrong.append(f"history was lost: {result.lost}")
    steps = [commit.step for commit in result.commits]
    if steps != list(range(1, len(steps) + 1)):
        wrong.append(f"steps were committed as {steps}")
    expected = replay(training, result) if exact else {}
    for rank, life, step, count, tree in training.trees:
        if step and expected.setdefault(step, tree) != tree:
            wrong.append(f"replica {rank} (life {life}) has another step {step}")
        if count != step:
            wrong.append(f"replica {rank} counts {count} steps, its group {step}")
    for rank in sorted({e.rank for e in result.log} - {None}):
        if rank in result.returned:
            if bits(result.returned[rank]) != expected.get(END):
                wrong.append(f"replica {rank} ends with another tree")
        elif not [e for e in result.log if e.rank == rank][-1].what.startswith(
            ("killed", "crashed")
        ):
            wrong.append(f"replica {rank} neither ends nor dies")
    return wrong


def last_words(result: Any, rank: int) -> str:
    return [event.what for event in result.log if event.rank == rank][-1]


def replay(training: Training, result: Any) -> dict[int, tuple[Any, ...]]:
    """The same steps in a plain loop, of the participants that the group says there were."""
    if not result.commits:
        return {}
    found = {}
    first = result.commits[0].participants[0]
    life = [e.life for e in result.log if (e.rank, e.what) == (first, "started step 1")]
    params, seen = training.began[first, life[-1]], 0
    state = training.tx.init(params)
    for commit in result.commits:
        total = sum(
            [grad(params, rank, seen) for rank in commit.participants[1:]],
            start=grad(params, commit.participants[0], seen),
        )
        updates, state = training.tx.update(total / len(commit.participants), state, params)
        params, seen = params + updates, seen + len(commit.participants)
        found[commit.step] = bits((params, state, {"seen": seen}))
    return found


def simulate(
    faults: Any = (), replica: Any = Replica, tx: Any = None, exact: bool = True, **options: Any
) -> tuple[Any, list[str]]:
    """The result of a run, and what is wrong with it."""
    training = Training(tx, replica)
    result = Simulation(faults=faults, **options).run(training)
    return result, check(training, result, exact)
