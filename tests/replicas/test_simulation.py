"""Replicas in a simulation: what each fault does at each point, and what the group answers.

Then 10,000 random schedules of faults, and the loops that must not get through them.
"""

from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch import Tensor

import functional_optim as fo
from functional_optim.replicas import CutOff, Delay, Kill, Replica, Simulation, Slow
from functional_optim.replicas.simulation.faults import POINTS

END = 6


class Momentum(NamedTuple):
    step: int
    buffer: Tensor


def momentum_by_hand() -> fo.GradientTransformation:
    """SGD with momentum and a schedule, in as few operations as can be."""

    def update(grads: Tensor, state: Momentum, params: Any = None) -> tuple[Tensor, Momentum]:
        buffer = state.buffer * 0.9 + grads
        return buffer * (-0.5 / (1 + state.step)), Momentum(state.step + 1, buffer)

    return fo.GradientTransformation(lambda params: Momentum(0, torch.zeros_like(params)), update)


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
        first = torch.tensor([1.0 + group.rank, 2.0 + group.life])
        now = replica.init(first, extra={"seen": 0})
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


# ---------------------------------------------------------------- what to run, and what is told
BOTH = pytest.mark.parametrize("heals_at_start", [False, True], ids=["async", "sync"])
EVERYWHERE = pytest.mark.parametrize("point", POINTS)


def refusals(result):
    """Of the steps of the training. Who is late may still be healed after its end."""
    after = f"refused step {END + 1}"
    return [e.what for e in result.log if e.what.startswith("refused") and after not in e.what]


def said(result, what, rank=None):
    return [e for e in result.log if what in e.what and rank in (None, e.rank)]


# ---------------------------------------------------------------- no faults
@BOTH
@pytest.mark.parametrize("replicas", [1, 3])
def test_replicas_from_different_starts_train_as_one(replicas, heals_at_start):
    result, wrong = simulate(replicas=replicas, heals_at_start=heals_at_start)
    assert wrong == []
    assert len({bits(tree) for tree in result.returned.values()}) == 1
    everybody = tuple(range(replicas))
    first = everybody if heals_at_start else (0,)
    assert [c.participants for c in result.commits] == [first] + [everybody] * (END - 1)
    assert not refusals(result)


def test_equal_replicas_may_begin_together():
    def worker(group):
        group.start()
        mean = group.allreduce(torch.tensor([1.0 + group.rank])).wait()
        return mean.item(), group.decide()

    result = Simulation(3, init_sync=False).run(worker)
    assert {mean for mean, _ in result.returned.values()} == {2.0}
    assert result.returned[1][1] == fo.replicas.Decision(True, False, 1, 3)


def test_a_group_goes_on_from_the_step_of_a_checkpoint():
    def worker(group):
        group.step = 5 if group.rank else 4
        group.start()
        return group.decide(), group.step

    for decision, step in Simulation(2, init_sync=False).run(worker).returned.values():
        assert decision.committed
        assert decision.step == step == 6


def test_a_mean_is_summed_in_the_order_of_ranks_and_half_types_in_float32():
    x = torch.tensor([[1e8, 0.1], [1.0, 0.2], [-1e8, 0.3]])

    def worker(group):
        group.start()
        row = x[group.rank]
        return group.allreduce({"wide": row, "half": row.bfloat16()}).wait()

    found = Simulation(3, init_sync=False).run(worker).returned
    half = [row.bfloat16().float() for row in x]
    for got in found.values():
        assert torch.equal(got["wide"], (x[0] + x[1] + x[2]) / 3)
        assert torch.equal(got["half"], ((half[0] + half[1] + half[2]) / 3).bfloat16())


def test_time_is_virtual():
    def worker(group):
        group.sleep(3600.0)
        return group.time

    assert Simulation(2).run(worker).returned == {0: 3600.0, 1: 3600.0}


# ---------------------------------------------------------------- one fault at each point
IN_THE_STEP = ("after start", "in allreduce", "after allreduce")
SILENT = "refused step 3: nothing heard of 1 for 1 s"
FAULTS = {
    "killed": (lambda at: Kill(1, 2, at), {}, "refused step 3: replica 1 died", IN_THE_STEP),
    "restarted": (
        *(lambda at: Kill(1, 2, at, restart=0.05), {}),
        *("refused step 3: replica 1 died", IN_THE_STEP),
    ),
    "late": (lambda at: Delay(1, 2, at, seconds=0.4), {"join_timeout": 0.5}, "", ()),
    "too late": (lambda at: Delay(1, 2, at, seconds=1.2), {}, SILENT, ("in start", *IN_THE_STEP)),
    "cut off": (lambda at: CutOff(1, 2, at, seconds=1.5), {}, SILENT, IN_THE_STEP),
    "slow": (lambda at: Slow(1, 2, at, seconds=5.0, each=0.2), {"join_timeout": 0.9}, "", ()),
}
"""The fault, options of the simulation, and where the fault refuses its step, with what words."""


@BOTH
@EVERYWHERE
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_no_more_than_its_step(name, point, heals_at_start):
    make, options, words, refusing = FAULTS[name]
    result, wrong = simulate([make(point)], heals_at_start=heals_at_start, **options)
    assert wrong == []
    assert refusals(result) == [words] * (point in refusing)
    assert sorted(result.returned) == ([0, 2] if name == "killed" else [0, 1, 2])
    others = {c.participants for c in result.commits[1:]}
    if not words:
        assert others == {(0, 1, 2)}  # it was waited for
        return
    assert name == "restarted" or (0, 2) in others
    healed = said(result, "healed", rank=1)
    if name == "killed":
        assert said(result, f"killed {point}", rank=1)
        counted = point in ("in decide", "after decide")
        assert result.commits[2].participants == ((0, 1, 2) if counted else (0, 2))
        assert result.commits[3].participants == (0, 2)
    elif name == "restarted":
        told = next(d for d in result.decisions(1, life=1) if d.healed)
        assert told.participants == (3 if heals_at_start else 2)
        assert result.commits[-1].participants == (0, 1, 2)
        assert healed[-1].time > said(result, "restarted")[0].time
    else:
        assert healed[-1].time > 1.2


@BOTH
def test_whoever_comes_after_the_end_is_healed_to_the_end(heals_at_start):
    result, wrong = simulate([Kill(1, 2, restart=100.0)], heals_at_start=heals_at_start)
    assert wrong == []
    assert said(result, f"healed to step {END}", rank=1)
    assert result.returned[1].extra == result.returned[0].extra
    assert len(result.commits) == END


@BOTH
def test_a_slow_peer_beyond_the_timeout_is_gone_for_that_step(heals_at_start):
    slow = Slow(1, 2, "after start", seconds=1.0, each=1.5)
    result, wrong = simulate([slow], heals_at_start=heals_at_start)
    assert wrong == []
    assert refusals(result) == [SILENT]
    (late,) = [d for d in result.decisions(1) if d.reason]
    assert late == fo.replicas.Decision(False, False, 2, 3, "nothing heard of 1 for 1 s")
    assert said(result, "healed", rank=1)


# ---------------------------------------------------------------- deaths and partitions
def test_the_dead_run_their_finally_and_no_more():
    seen = []

    def worker(group):
        try:
            group.start()
            group.decide()
        except Exception:
            seen.append("except")
        finally:
            seen.append("finally")
            group.start()
            seen.append("alive")

    Simulation(1, faults=[Kill(0, point="in decide")]).run(worker)
    assert seen == ["finally"]


def test_a_worker_that_swallows_its_death_is_dead():
    def worker(group):
        try:
            group.start()
        except BaseException:
            return "alive"

    result = Simulation(2, faults=[Kill(0, point="in start")]).run(worker)
    assert result.returned == {1: None}


def test_two_that_are_healed_at_once_share_no_memory():
    def worker(group):
        x = torch.zeros(2)
        group.register("x", lambda saved: x.set_(saved), lambda: x)
        group.start()
        group.decide()
        return x

    found = Simulation(3).run(worker).returned
    assert len({x.data_ptr() for x in found.values()}) == 3


def test_who_is_cut_off_during_the_vote_is_told_the_outcome_when_it_is_back():
    result, wrong = simulate([CutOff(1, 2, "in decide", seconds=3.0)])
    assert wrong == []
    told = [e for e in result.log if e.rank == 1 and e.decision and e.decision.step == 3]
    assert told[0].decision == fo.replicas.Decision(True, False, 3, 3)
    assert told[0].time > 3.0


def test_a_quorum_waits_for_the_last_who_has_the_last_step():
    faults = [CutOff(0, 2, "in decide", seconds=3.0), Kill(1, 2, "in decide", restart=0.1)]
    result, wrong = simulate(faults, replicas=2)
    assert wrong == []
    assert result.commits[2].participants == (0, 1)
    assert said(result, "restarted", rank=1)[0].time < 1.0
    assert said(result, "started step 4", rank=1)[0].time > 3.0


# ---------------------------------------------------------------- history
def test_a_step_whose_holders_all_die_is_lost_and_the_run_says_so():
    faults = [Kill(rank, 2, "after decide", restart=0.1) for rank in range(2)]
    training = Training()
    result = Simulation(2, faults=faults).run(training)
    assert [e.what for e in result.lost] == ["lost: the steps after 0, up to 3"]
    assert "history was lost" in check(training, result)[0]
    assert [c.step for c in result.commits] == [1, 2, 3, *range(1, END + 1)]


def test_a_kill_may_spare_the_last_holder():
    faults = [Kill(rank, 2, "after decide", unless_last=True) for rank in range(3)]
    result, wrong = simulate(faults)
    assert wrong == []
    assert len(result.returned) == 1
    assert len(said(result, "spared")) == 1


def test_what_is_behind_can_go_on_when_the_steps_after_it_are_lost():
    faults = [CutOff(1, 2, seconds=1.0), Kill(0, 3, "after decide")]
    training = Training()
    result = Simulation(2, faults=faults).run(training)
    assert [e.what for e in result.lost] == ["lost: the steps after 2, up to 4"]
    assert result.returned[1].state.step == END
