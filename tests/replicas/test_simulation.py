"""Replicas in a simulation: what each fault does at each point, and what the group answers."""

from __future__ import annotations

import pytest
import torch
from simulated_training import END, Training, bits, check, first_params, momentum_by_hand, simulate

import functional_optim as fo
from functional_optim.replicas import CutOff, Delay, Kill, Replica, Simulation, Slow
from functional_optim.replicas.simulation.faults import POINTS

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
def test_replicas_from_different_starts_train_as_one(heals_at_start):
    result, wrong = simulate(replicas=3, heals_at_start=heals_at_start)
    assert wrong == []
    assert len({bits(tree) for tree in result.returned.values()}) == 1
    everybody = (0, 1, 2)
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


def test_a_group_of_one_is_a_loop_alone():
    result, wrong = simulate(replicas=1)
    assert wrong == []
    assert len(result.commits) == END


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


def test_who_must_heal_tries_again_after_a_refused_step():
    result, wrong = simulate([Kill(2, 3, "in allreduce")], FailsOnce)
    assert wrong == []
    assert result.decisions(1)[3] == fo.replicas.Decision(False, False, 2, 2, "replica 2 died")
    assert said(result, "healed to step 3 by replica 0", rank=1)


def test_if_nobody_could_take_the_step_the_run_says_that_there_is_no_state():
    class AllFail(FailsOnce):
        also = (0, 2)

    with pytest.raises(
        RuntimeError, match=r"replica \d \(life 0\) failed .* no replica has a whole state"
    ):
        simulate(replica=AllFail)


def test_an_error_of_one_refuses_the_step_for_all_at_once():
    def worker(group):
        group.start()
        if group.rank == 1:
            group.report_error(ValueError("no data."))
        else:
            group.allreduce(torch.ones(1)).wait()
        return group.decide(), group.time

    result = Simulation(3).run(worker)
    for decision, time in result.returned.values():
        assert decision.reason == "replica 1: ValueError: no data"
        assert time < 0.5


def test_a_reduction_that_fails_is_an_error_of_the_step():
    def worker(group):
        group.start()
        mean = group.allreduce(torch.ones(1)).wait()
        return mean.item(), group.error, group.decide().committed

    result = Simulation(2, faults=[Kill(1, point="in allreduce")]).run(worker)
    _, error, committed = result.returned[0]
    assert isinstance(error, ConnectionError)
    assert str(error) == "replica 1 died"
    assert not committed


def test_tensors_of_different_sizes_refuse_the_step():
    def worker(group):
        group.start()
        group.allreduce(torch.ones(1 + group.rank)).wait()
        return group.decide().reason

    (reason, _) = Simulation(2).run(worker).returned.values()
    assert "replica 0 1 of torch.float32, replica 1 2 of torch.float32" in reason


def test_nan_gradients_can_be_voted_against_by_all():
    def worker(group):
        replica = Replica(group, momentum_by_hand(), nonfinite="refuse")
        now = replica.start(replica.init(first_params(group.rank, 0)))
        bad = torch.tensor([1.0, float("nan")])
        return replica.step(bad, now)[1].committed

    assert Simulation(2).run(worker).returned == {0: False, 1: False}


def test_who_leaves_with_a_step_open_refuses_it():
    def worker(group):
        group.start()
        if group.rank == 0:
            return None
        return group.decide().reason

    assert Simulation(2).run(worker).returned[1] == "replica 0 left"


def test_an_exception_names_its_replica():
    def worker(group):
        group.start()
        if group.rank == 1:
            raise ValueError("no data")
        group.decide()

    with pytest.raises(RuntimeError, match=r"replica 1 \(life 0\) failed at .*ValueError: no data"):
        Simulation(2).run(worker)
    result = Simulation(2, errors="crash").run(worker)
    assert result.decisions(0)[0].reason == "replica 1 died"
    assert said(result, "crashed: ValueError: no data", rank=1)


def test_a_state_that_cannot_be_saved_names_its_replica():
    def worker(group):
        group.register("x", lambda saved: None, lambda: 1 / 0)
        group.start()

    with pytest.raises(RuntimeError, match=r"replica 0 \(life 0\) could not be saved .*ZeroDiv"):
        Simulation(2).run(worker)


def test_a_group_that_cannot_go_on_says_who_waits_for_what():
    message = r"stuck at .* replica 1 \(life 0\) waits for a quorum \(1 of min_replicas=2 have"
    with pytest.raises(RuntimeError, match=message):
        simulate([Kill(0, 1)], replicas=2, min_replicas=2)


def test_a_run_without_end_is_given_up():
    def worker(group):
        while True:
            group.sleep(1.0)

    with pytest.raises(TimeoutError, match=r"the limit is 10 s: replica 0 .* waits for 1 s"):
        Simulation(1, limit=10.0).run(worker)


def test_max_retries_is_the_coordinators():
    def worker(group):
        while True:
            group.start()
            group.report_error(ValueError("no data"))
            group.decide()

    with pytest.raises(RuntimeError, match="3 steps in a row were refused"):
        Simulation(1, max_retries=2).run(worker)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "min_replicas=1 cannot form out of 0"),
        ({"replicas": 2, "min_replicas": 3}, "min_replicas=3 cannot form out of 2"),
        ({"timeout": 0.0}, "timeout must be more than 0 s"),
        ({"errors": "ignore"}, 'errors must be "raise" or "crash"'),
        ({"faults": [Kill(3)]}, "ranks 0 to 2"),
        ({"faults": [Kill(0, 0, "somewhere")]}, "a point is one of before start"),
        ({"faults": [Delay(0, seconds=-1.0)]}, "seconds must be 0 or more"),
    ],
)
def test_bad_numbers_raise(options, message):
    with pytest.raises(ValueError, match=message):
        Simulation(**options)


def test_what_is_no_fault_raises():
    with pytest.raises(TypeError, match="a fault is a Kill, Delay, CutOff or Slow, but got a str"):
        Simulation(faults=["kill"])


def test_nobody_sleeps_back_in_time():
    with pytest.raises(RuntimeError, match=r"ValueError: sleep\(seconds\) needs 0 s or more"):
        Simulation(1).run(lambda group: group.sleep(-0.5))
