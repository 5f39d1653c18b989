"""Simulated groups: errors, random schedules of faults, and loops that are wrong."""

import re
from collections import Counter

import pytest
import torch
from sampling import some
from test_simulation import BOTH, END, Training, bits, check, said, simulate

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


# ---------------------------------------------------------------- errors
class FailsOnce(Replica):
    """Its third update raises half-way."""

    def _updated(self, grads, now, extra):
        if now.state.step == 2 and self.coordinator.rank in (1, *self.also) and not self.failed:
            self.failed = True
            raise MemoryError("too much")
        return super()._updated(grads, now, extra)

    failed = False
    also = ()


@BOTH
def test_a_step_that_could_not_be_taken_here_is_taken_back_and_healed(heals_at_start):
    result, wrong = simulate(replica=FailsOnce, heals_at_start=heals_at_start)
    assert wrong == []
    assert said(result, "took the step back", rank=1)[0].decision.reason == "MemoryError: too much"
    assert said(result, "healed to step 3 by replica 0", rank=1)
    assert [c.step for c in result.commits] == list(range(1, END + 1))


class AllFail(FailsOnce):
    also = (0, 2)


def one_step(act, replicas=2, **options):
    """A run in which every replica does something between the start of a step and the vote."""

    def worker(group):
        group.start()
        return act(group) or (group.decide().reason, group.time)

    return Simulation(replicas, **options).run(worker)


def test_an_error_of_one_refuses_the_step_for_all_at_once():
    def fails(group):
        if group.rank == 1:
            group.report_error(ValueError("no data."))
        else:
            group.allreduce(torch.ones(1)).wait()

    for reason, time in one_step(fails, 3).returned.values():
        assert reason == "replica 1: ValueError: no data"
        assert time < 0.5


def test_tensors_of_different_sizes_refuse_the_step():
    def averages(group):
        group.allreduce(torch.ones(1 + group.rank)).wait()

    (reason, _) = one_step(averages).returned[0]
    assert "replica 0 1 of torch.float32, replica 1 2 of torch.float32" in reason


def test_who_leaves_with_a_step_open_refuses_it():
    assert one_step(lambda group: group.rank == 0).returned[1][0] == "replica 0 left"


def raises(group):
    if group.rank == 1:
        raise ValueError("no data")


def for_ever(group):
    while True:
        group.sleep(1.0)


def unsaved(group):
    group.register("x", lambda saved: None, lambda: 1 / 0)


def refuses(group):
    while True:
        group.start()
        group.report_error(ValueError("no data"))
        group.decide()


STOPPED = {
    "an exception names its replica": (
        lambda: one_step(raises),
        r"replica 1 \(life 0\) failed at .*ValueError: no data",
    ),
    "a state that cannot be saved names its replica": (
        lambda: Simulation(2).run(lambda group: (unsaved(group), group.start())),
        r"replica 0 \(life 0\) could not be saved .*ZeroDiv",
    ),
    "who waits for what": (
        lambda: simulate([Kill(0, 1)], replicas=2, min_replicas=2),
        r"stuck at .* replica 1 \(life 0\) waits for a quorum \(1 of min_replicas=2 have",
    ),
    "a run without end": (
        lambda: Simulation(1, limit=10.0).run(for_ever),
        r"the limit is 10 s: replica 0 .* waits for 1 s",
    ),
    "too many refused steps": (
        lambda: Simulation(1, max_retries=2).run(refuses),
        "3 steps in a row were refused",
    ),
    "back in time": (
        lambda: Simulation(1).run(lambda group: group.sleep(-0.5)),
        r"ValueError: sleep\(seconds\) needs 0 s or more",
    ),
    "no replica could take the step": (
        lambda: simulate(replica=AllFail),
        r"replica \d \(life 0\) failed .* no replica has a whole state",
    ),
}


@pytest.mark.parametrize("what", STOPPED)
def test_a_run_that_cannot_go_on_says_why(what):
    run, says = STOPPED[what]
    with pytest.raises(TimeoutError if "without end" in what else RuntimeError, match=says):
        run()


def test_an_exception_may_be_the_death_of_its_replica():
    result = one_step(raises, errors="crash")
    assert result.returned[0][0] == "replica 1 died"
    assert said(result, "crashed: ValueError: no data", rank=1)


# ---------------------------------------------------------------- random schedules of faults
CHUNK = 250


def schedule(seed):
    """Faults and group of a seed; mostly three replicas, both kinds of healing."""
    replicas = (3, 3, 2, 3, 4)[seed % 5]
    faults = random_faults(seed, replicas, END, most=2 + seed % 4)
    return faults, {"replicas": replicas, "seed": seed, "heals_at_start": bool(seed // 5 % 2)}


WORDS = re.compile("restarted|healed|finished|spared|refused|cut off|delayed|slow|killed")


@pytest.mark.parametrize("first", some(range(0, 10_000, CHUNK), 3))
def test_no_schedule_loses_a_step_parts_replicas_or_blocks(first):
    """And the first of them do all that can be done."""
    failing, seen = [], Counter()
    for seed in range(first, first + CHUNK):
        faults, group = schedule(seed)
        try:
            result, wrong = simulate(faults, **group)
        except (RuntimeError, TimeoutError) as error:
            wrong = [str(error)]
        else:
            events = [e.what for e in result.log]
            seen.update(word for what in events for word in WORDS.findall(what))
            seen.update(point for point in POINTS for what in events if what == f"killed {point}")
            seen["dead at the end"] += group["replicas"] - len(result.returned)
        if wrong:
            failing.append(f"Simulation({faults=}, {group=}): {'; '.join(wrong)}")
    assert not failing, f"{len(failing)} of {CHUNK}, e.g.\n" + "\n".join(failing[:3])
    if first == 0:
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


# ---------------------------------------------------------------- determinism
@pytest.mark.parametrize("seed", range(10))
def test_the_same_seed_and_faults_give_the_same_run(seed):
    faults, group = schedule(seed)
    simulation = Simulation(faults=faults, **group)
    first, again = simulation.run(Training()), simulation.run(Training())
    assert first.log == again.log
    assert first.commits == again.commits
    assert first.time == again.time
    assert bits(first.returned) == bits(again.returned)


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
