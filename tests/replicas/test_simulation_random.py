"""10,000 random schedules of faults, and the loops that must not get through them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from sampling import some
from simulated_training import END, Training, bits, check, lr, simulate

import functional_optim as fo
from functional_optim.replicas import (
    CutOff,
    Delay,
    Kill,
    Replica,
    ReplicaState,
    Simulation,
    Slow,
    random_faults,
)
from functional_optim.replicas.simulation.faults import POINTS

CHUNK = 250


def schedule(seed):
    """Faults and group of a seed; mostly three replicas, both kinds of healing."""
    replicas = (3, 3, 2, 3, 4)[seed % 5]
    faults = random_faults(seed, replicas, END, most=2 + seed % 4)
    return faults, {"replicas": replicas, "seed": seed, "heals_at_start": bool(seed // 5 % 2)}


def failing(seeds, replica=Replica):
    """The schedules that a loop does not get through, written so that they can be run again."""
    found = []
    for seed in seeds:
        faults, group = schedule(seed)
        try:
            _, wrong = simulate(faults, replica, **group)
        except (RuntimeError, TimeoutError) as error:
            wrong = [str(error)]
        if wrong:
            found.append(f"Simulation({faults=}, {group=}): {'; '.join(wrong)}")
    return found


@pytest.mark.parametrize("first", some(range(0, 10_000, CHUNK), 3))
def test_no_schedule_loses_a_step_parts_replicas_or_blocks(first):
    found = failing(range(first, first + CHUNK))
    assert not found, f"{len(found)} of {CHUNK}, e.g.\n" + "\n".join(found[:3])


def test_the_schedules_do_all_that_can_be_done():
    seen = Counter()
    for seed in range(CHUNK):
        faults, group = schedule(seed)
        result, _ = simulate(faults, **group)
        words = ("restarted", "healed", "finished", "spared", "refused", "cut off", "delayed")
        seen.update(w for e in result.log for w in (*words, "slow", "killed") if w in e.what)
        seen.update(point for e in result.log for point in POINTS if e.what == f"killed {point}")
        seen["dead at the end"] += group["replicas"] - len(result.returned)
    assert len(seen) == 9 + len(POINTS) + 1
    assert min(seen.values()) >= 3


def test_where_history_may_be_lost_the_run_says_so_and_goes_on():
    lost = 0
    for seed in range(200):
        faults = random_faults(seed, 3, END, most=8, keep_history=False)
        training = Training()
        result = Simulation(3, seed=seed, faults=faults).run(training)
        wrong = check(training, result)
        lost += bool(result.lost)
        assert bool(result.lost) >= bool(wrong), f"{faults}: {wrong}"
        assert not any("neither ends nor dies" in what for what in wrong)
    assert lost > 10


def test_a_group_that_needs_two_waits_for_those_who_restart():
    for seed in range(200):
        faults = random_faults(seed, 3, END, restarts=1.0)
        _, wrong = simulate(faults, seed=seed, min_replicas=2)
        assert wrong == [], faults


class FailsNowAndThen(Replica):
    """Replica 1 cannot take one step in three; its worker goes on."""

    def __init__(self, coordinator, tx):
        super().__init__(coordinator, tx)
        self.failed = set()

    def _updated(self, grads, now, extra):
        count = now.state.step
        if self.coordinator.rank == 1 and count % 3 == 1 and count not in self.failed:
            self.failed.add(count)
            raise MemoryError
        return super()._updated(grads, now, extra)


def test_steps_that_are_taken_back_lose_nothing_that_another_has():
    taken_back = lost = 0
    for seed in range(300):
        faults, group = schedule(seed)
        result, wrong = simulate(faults, FailsNowAndThen, errors="crash", **group)
        assert bool(result.lost) >= bool(wrong), f"{faults}: {wrong}"
        taken_back += any(e.what == "took the step back" for e in result.log)
        lost += bool(result.lost)
    assert taken_back > 200
    assert lost < 30


@pytest.mark.parametrize("compiled", [False, True])
def test_the_librarys_own_sgd_with_a_schedule(compiled):
    class Run(Replica):
        def __init__(self, coordinator, tx):
            super().__init__(coordinator, tx, compile=compiled)

    tx = fo.sgd(lambda count: lr(int(count)), momentum=0.9)
    for seed in (10, 13, 15) if compiled else range(30):
        faults, group = schedule(seed)
        _, wrong = simulate(faults, Run, tx, exact=not compiled, **group)
        assert wrong == [], faults


# ---------------------------------------------------------------- determinism


@pytest.mark.parametrize("seed", range(10))
def test_the_same_seed_and_faults_give_the_same_run(seed):
    faults, group = schedule(seed)
    first, again = [Simulation(faults=faults, **group).run(Training()) for _ in range(2)]
    assert first.log == again.log
    assert first.commits == again.commits
    assert first.time == again.time
    assert bits(first.returned) == bits(again.returned)


def test_one_simulation_can_run_twice():
    simulation = Simulation(faults=[Kill(1, 2, restart=0.1)])
    first, again = simulation.run(Training()), simulation.run(Training())
    assert first.log == again.log


def test_another_seed_gives_another_order():
    runs = [Simulation(seed=seed).run(Training()).log for seed in range(2)]
    assert [e.rank for e in runs[0]] != [e.rank for e in runs[1]]


def test_random_faults_are_those_of_their_seed_and_can_be_written_down():
    assert random_faults(7) == random_faults(7)
    assert random_faults(7) != random_faults(8)
    names = {"Kill": Kill, "Delay": Delay, "CutOff": CutOff, "Slow": Slow}
    drawn = [fault for seed in range(200) for fault in random_faults(seed, 2, 5, most=3)]
    assert {type(fault) for fault in drawn} == set(names.values())
    for fault in drawn:
        assert eval(repr(fault), names) == fault
        assert fault.rank < 2
        assert fault.step < 5


# ---------------------------------------------------------------- loops with a fault


class StaleCandidate(Replica):
    """Computes the update before the vote, and takes it after: torchft's order."""

    def step(self, grads, now, **extra):
        mean, _ = self.coordinator.allreduce((grads, {})).wait()
        candidate = self._updated(mean, now, {})
        self._tree = now
        decision = self.coordinator.decide()
        if decision.committed:
            self._tree = candidate
        return self._tree, decision


class IgnoresRefusals(Replica):
    """Takes every step."""

    def step(self, grads, now, **extra):
        mean, _ = self.coordinator.allreduce((grads, {})).wait()
        self._tree = now
        decision = self.coordinator.decide()
        self._tree = self._updated(mean, self._tree, {})
        return self._tree, decision


class KeepsItsSchedule(Replica):
    """Heals parameters and momentum, but not the count that the learning rate comes from."""

    def _load(self, saved):
        state = saved.state._replace(step=self._tree.state.step)
        super()._load(ReplicaState(saved.params, state, saved.extra))


class KeepsItsMomentum(Replica):
    """Heals parameters and schedule, but not the momentum."""

    def _load(self, saved):
        state = saved.state._replace(buffer=self._tree.state.buffer)
        super()._load(ReplicaState(saved.params, state, saved.extra))


FAULTY = [StaleCandidate, IgnoresRefusals, KeepsItsSchedule, KeepsItsMomentum]
RESTART = [Kill(1, 2, "in allreduce", restart=0.05)]


@pytest.mark.parametrize("replica", FAULTY)
def test_a_faulty_loop_is_caught_by_one_restart(replica):
    assert simulate(RESTART)[1] == []
    _, wrong = simulate(RESTART, replica)
    assert any("has another step" in what for what in wrong)


@pytest.mark.parametrize("replica", FAULTY)
def test_a_faulty_loop_is_caught_by_random_schedules(replica):
    seeds = range(1000, 1040)
    assert failing(seeds) == []
    assert len(failing(seeds, replica)) > 5


def test_a_stale_candidate_is_only_stale_where_the_vote_heals():
    _, wrong = simulate(RESTART, StaleCandidate, heals_at_start=True)
    assert wrong == []


def test_the_mean_that_a_healed_replica_takes_is_that_of_the_others():
    class Mean(Replica):
        def _updated(self, grads, now, extra):
            means.setdefault(int(now.state.step), []).append(grads)
            return super()._updated(grads, now, extra)

    means = {}
    assert simulate(RESTART, Mean)[1] == []
    for got in means.values():
        assert len(got) >= 2
        assert all(torch.equal(got[0], other) for other in got[1:])
