"""local_sgd and diloco under random faults: after a synchronization all have the same bits."""

from __future__ import annotations

import pytest
import torch

import functional_optim as fo
from functional_optim.replicas import LocalSGDState, Replica, Simulation, random_faults

SCHEDULES = 60
END = 5
"""Synchronizations until a replica is through; one that is then healed by those takes one more."""

OUTER = fo.sgd(0.7, momentum=0.9, nesterov=True)
INNER = fo.sgd(0.1, momentum=0.9)
RECIPES = {
    "local_sgd": (fo.local_sgd(INNER, 2), False),
    "local_sgd at start": (fo.local_sgd(INNER, 2), True),
    "diloco": (fo.diloco(INNER, OUTER, 2, alpha=0.25), False),
    "in turns": (fo.diloco(INNER, OUTER, 4, fragments=2, delay=1, alpha=0.25), True),
}
PARAMS = {"a": torch.arange(3.0), "b": torch.ones(2)}


def bits(values):
    return tuple([x.numpy().tobytes() for x in fo.tree.leaves(values)])


def common(now):
    state = now.state
    if isinstance(state, LocalSGDState):
        return bits((now.params, state.anchor))
    return bits((state.anchor, state.outer, state.turn))


class Training:
    """A worker; ends: what each replica had after its synchronizations, by their number."""

    def __init__(self, tx):
        self.tx = tx
        self.ends = {}
        self.changed = 0

    def __call__(self, group):
        replica = Replica(group, self.tx)
        now = replica.init(fo.tree.map(lambda x: x + group.rank, PARAMS), extra={"taken": 0})
        t, last = 0, None
        while now.extra["taken"] < END:
            now = replica.start(now)
            t += 1
            grads = fo.tree.map(lambda p, t=t: p * (1 + 0.1 * group.rank) - 0.01 * t, now.params)
            now, said = replica.step(grads, now)
            if said is None:
                continue
            if said.committed:
                now = now._replace(extra={"taken": said.step})
            if said.committed or not said.healed:
                self.ends.setdefault(now.extra["taken"], []).append(common(now))
            if not said.committed and not said.healed and last is not None:
                self.changed += common(now) != last
            last = common(now)
        replica.finish(now)
        return now.extra["taken"]


def wrong(recipe, seed):
    """What does not hold of a run."""
    tx, heals_at_start = recipe
    training = Training(tx)
    faults = random_faults(seed, until=END)
    run = Simulation(3, seed=seed, faults=faults, heals_at_start=heals_at_start).run(training)
    found = [
        f"several trees after {n}" for n, ends in training.ends.items() if n and len({*ends}) > 1
    ]
    found += ["changed in a refused one"] * training.changed
    found += ["too early"] * any(taken < END for taken in run.returned.values())
    found += ["lost"] * bool(run.lost)
    steps = [commit.step for commit in run.commits]
    return found + ["out of order"] * (steps != [*range(1, len(steps) + 1)])


@pytest.mark.parametrize("name", RECIPES)
def test_replicas_have_the_same_bits_whatever_happens(name):
    bad = {seed: found for seed in range(SCHEDULES) if (found := wrong(RECIPES[name], seed))}
    assert not bad, next(iter(bad.items()))
