"""Coordinators, and the loop that votes before it updates.

A peer's tree is never lost: whenever it comes, the next tree that a replica returns is it.
"""

import pickle

import pytest
import torch
from helpers import assert_close, assert_same, make_grads, make_params, run

import functional_optim as fo
from functional_optim.replicas import Decision, Local, Replica, Scripted

REFUSED = Decision(False, False, 0, 1, "too few")


def recipe():
    return fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(fo.schedules.linear(0.1, 0.01, 5)))


def train(replica, now, grads, *, given=None):
    """The functional loop; given: receives every decision."""
    for g in grads:
        now = replica.start(now)
        now, decision = replica.step(g, now)
        if given is not None:
            given.append(decision)
    return now


def started(group, tx, params, **options):
    """A replica, and its tree after the start of a step."""
    replica = Replica(group, tx, **options)
    return replica, replica.start(replica.init(params))


def healing(script, peer, **options):
    return Scripted(script, peer=lambda: peer.coordinator.saved(), **options)


# ---------------------------------------------------------------- coordinators
def test_alone_every_step_is_committed():
    group = Local()
    for step in (1, 2):
        group.start()
        values = {"a": torch.ones(2), "n": None}
        assert group.allreduce(values).wait() is values
        assert group.decide() == Decision(True, False, step, 1, "")
    assert (group.step, group.decision.step) == (2, 2)


def test_a_reported_error_refuses_the_step_and_no_other():
    group = Local()
    group.start()
    group.report_error(ValueError("a cable is loose."))
    group.report_error(RuntimeError("and then this"))
    assert group.decide() == Decision(False, False, 0, 1, "ValueError: a cable is loose")
    group.start()
    assert group.decide().committed


def test_a_script_is_followed_to_its_end():
    group = Scripted([True, False, Decision(True, False, 7, 3)])
    seen = []
    for _ in range(3):
        group.start()
        seen.append(group.decide())
    assert [d.committed for d in seen] == [True, False, True]
    assert (seen[1].reason, seen[2].step, group.step) == ("the script says so", 7, 7)
    with pytest.raises(RuntimeError, match="the script is over: it has 3 steps"):
        group.start()


@pytest.mark.parametrize("group", [Local(max_retries=1), Scripted([False] * 5, max_retries=1)])
def test_one_refusal_too_many_raises_and_a_committed_step_forgives(group):
    for _ in range(2):
        group.start()
        if isinstance(group, Local):
            group.report_error(ValueError("no"))
        if _ == 0:
            assert not group.decide().committed
    with pytest.raises(RuntimeError, match="2 steps in a row were refused, more than max_retries"):
        group.decide()
    forgiving = Scripted([False, True, False, True], max_retries=1)
    for _ in range(4):
        forgiving.start()
        forgiving.decide()


def test_calls_out_of_order_are_errors():
    group = Local()
    for call in (group.decide, lambda: group.allreduce(torch.ones(1))):
        with pytest.raises(RuntimeError, match=r"needs an open step; call start\(\) first"):
            call()
    with pytest.raises(RuntimeError, match="no step to report an error of"):
        group.report_error(ValueError("x"))
    group.start()
    with pytest.raises(RuntimeError, match="a step is open already"):
        group.start()
    group.decide()
    with pytest.raises(RuntimeError, match="needs an open step"):
        group.allreduce(torch.ones(1))  # would come after the vote
    with group:
        pass
    group.close()
    for call in (group.start, group.decide):
        with pytest.raises(RuntimeError, match="is closed"):
            call()


def test_what_is_registered_is_saved_as_a_copy_and_healed_as_a_whole():
    mine, theirs = {"x": torch.zeros(2)}, {"x": torch.ones(2)}
    a, b = Local(), Local()
    for group, box in ((a, mine), (b, theirs)):
        group.register("box", box.update, lambda box=box: box)
    saved = b.saved()
    theirs["x"].add_(1)
    a.heal(saved)
    assert mine["x"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="'box' is registered with this coordinator already"):
        a.register("box", print, dict)
    b.register("more", print, dict)
    with pytest.raises(ValueError, match=r"saved \['box', 'more'\], but this replica has"):
        a.heal(b.saved())


# ---------------------------------------------------------------- the loop
@pytest.mark.parametrize("compiled", [False, True])
def test_alone_the_loop_is_the_plain_one(compiled):
    params = make_params(torch.float32)
    grads = make_grads(params, 5)
    want, state = run(recipe(), params, grads)
    replica = Replica(Local(), recipe(), compile=compiled)
    now = train(replica, replica.init(fo.tree.map(torch.clone, params)), grads)
    assert_close((now.params, now.state), (want, state), 1e-5 if compiled else 0.0)


@pytest.mark.parametrize("compiled", [False, True])
def test_refused_steps_leave_no_trace(compiled):
    params = make_params(torch.float32)
    grads = make_grads(params, 3)
    bad = fo.tree.map(lambda g: g * float("nan"), grads[0])
    replica = Replica(Scripted([True, False, True, True]), recipe(), compile=compiled)
    now = replica.init(params, extra={"seed": 3})
    given = []
    now = train(replica, now, [grads[0], bad, *grads[1:]], given=given)
    other = Replica(Local(), recipe(), compile=compiled)
    want = train(other, other.init(make_params(torch.float32), extra={"seed": 3}), grads)
    assert_same(now, want)
    assert [d.step for d in given] == [1, 1, 2, 3]


@pytest.mark.parametrize("at_start", [True, False])
def test_a_healed_replica_is_its_peer_bit_for_bit_schedule_included(at_start):
    """The peer's state arrives before the update, so that the update starts from it."""
    grads = make_grads(make_params(), 5)
    peer = Replica(Local(), recipe())
    theirs = train(peer, peer.init(make_params(seed=1), extra={"seed": torch.tensor(1)}), grads[:3])
    theirs = peer.start(theirs)
    script = [Decision(True, True, 4, 1), True]
    mine = Replica(healing(script, peer, heals_at_start=at_start), recipe())
    now = mine.init(make_params(seed=2), extra={"seed": torch.tensor(2)})
    now = mine.start(now)
    assert (now.extra["seed"] == 1) == at_start
    now, decision = mine.step(grads[3], now)
    assert decision.healed
    theirs, _ = peer.step(grads[3], theirs)
    assert_same(now, theirs)
    assert_same(train(mine, now, grads[4:]), train(peer, theirs, grads[4:]))
    assert now.state.step == 4


def test_healed_but_refused_is_the_peers_state():
    grads = make_grads(make_params(), 2)
    peer = Replica(Local(), recipe())
    theirs = peer.start(train(peer, peer.init(make_params(seed=1)), grads[:1]))
    mine = Replica(healing([Decision(False, True, 1, 1, "no")], peer), recipe())
    now, _ = mine.step(grads[1], mine.start(mine.init(make_params(seed=2))))
    assert_same(now, theirs)


def test_a_peer_of_another_model_cannot_heal():
    peer, _ = started(Local(), fo.sgd(0.1), {"w": torch.ones(3)})
    group = healing([Decision(True, True, 1, 1)], peer)
    mine, now = started(group, fo.sgd(0.1), {"w": torch.ones(2)})
    with pytest.raises(ValueError, match=r"this replica and its peer differ at '0\.w'"):
        mine.step({"w": torch.ones(2)}, now)


def test_nonfinite_gradients_are_refused_where_asked():
    w = torch.ones(2)
    bad = {"w": torch.tensor([1.0, float("inf")])}
    for nonfinite, committed in (("commit", True), ("refuse", False)):
        replica = Replica(Local(), fo.sgd(0.1), nonfinite=nonfinite)
        now, decision = replica.step(bad, replica.start(replica.init({"w": w})))
        assert decision.committed == committed
        assert now.params["w"].isfinite().all() == (not committed)
    assert decision.reason == "ValueError: the mean of 'w' has an infinite or NaN element"


def test_extra_arguments_are_averaged_with_the_gradients():
    class Halved(Local):
        """A group in which the other replica gives zeros."""

        def allreduce(self, values):
            self._check_open("allreduce()")
            return fo.replicas.Reduction(lambda: fo.tree.map(lambda x: x / 2, values))

    w = torch.ones(2, dtype=torch.float64)
    replica = Replica(Halved(), fo.polyak_sgd())
    now, _ = replica.step(2 * w, replica.start(replica.init(w)), value=4.0)
    tx = fo.polyak_sgd()
    u, _ = tx.update(w, tx.init(w), w, value=torch.tensor(2.0))
    assert_close(now.params, fo.apply_updates(w, u), 1e-12)


def test_an_update_that_raises_is_taken_back_and_the_replica_must_be_healed():
    def update(grads, state, params=None):
        if (grads > 1).any():
            raise ArithmeticError("too much")
        return grads, state

    tx = fo.GradientTransformation(lambda params: fo.EmptyState(), update)
    peer = Replica(Local(), tx)
    theirs = peer.start(train(peer, peer.init(torch.zeros(1)), [torch.ones(1)] * 2))
    script = [True, True, Decision(True, True, 3, 1)]
    mine = Replica(healing(script, peer), tx)
    now = train(mine, mine.init(torch.zeros(1)), [torch.ones(1)])
    now = mine.start(now)
    with pytest.raises(ArithmeticError):
        mine.step(torch.full((1,), 2.0), now)
    assert mine.coordinator.step == 1
    assert mine.coordinator.decision.reason == "ArithmeticError: too much"
    healed = train(mine, now, [torch.ones(1)])
    assert_same(healed, peer.step(torch.ones(1), theirs)[0])

    alone, now = started(Local(), tx, torch.zeros(1))
    with pytest.raises(ArithmeticError):
        alone.step(torch.full((1,), 2.0), now)
    alone.start(now)
    with pytest.raises(RuntimeError, match="no peer has healed it since"):
        alone.step(torch.ones(1), now)


def test_an_error_of_the_program_costs_no_step():
    replica, now = started(Local(), fo.polyak_sgd(), {"w": torch.ones(2)})
    for grads, extra in (
        ({"w": torch.ones(3)}, {"value": 1.0}),
        ({"w": torch.ones(2)}, {"val": 1}),
    ):
        with pytest.raises((ValueError, TypeError)):
            replica.step(grads, now, **extra)
    now, decision = replica.step({"w": torch.ones(2)}, now, value=1.0)
    assert decision == Decision(True, False, 1, 1)


def test_a_replica_is_registered_once_and_started_first():
    group = Local()
    replica = Replica(group, fo.sgd(0.1))
    now = replica.init(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"call tree = replica\.start\(tree\)"):
        replica.step(torch.ones(1), now)
    with pytest.raises(ValueError, match="'replica' is registered"):
        Replica(group, fo.sgd(0.1))
    Replica(group, fo.sgd(0.1), key="another")


def test_the_tree_and_a_decision_can_be_sent():
    replica = Replica(Local(), recipe())
    now = train(replica, replica.init(make_params()), make_grads(make_params(), 1))
    assert_same(pickle.loads(pickle.dumps(now)), now)
    assert pickle.loads(pickle.dumps(REFUSED)) == REFUSED


# ---------------------------------------------------------------- a peer's tree is never lost
SGD = fo.sgd(1.0)


def ones(value=1.0):
    return torch.full((1,), value)


def saved_at(value, tx=SGD, key="replica"):
    """What a peer at that value saves."""
    peer, _ = started(Local(), tx, ones(value), key=key)
    return peer.coordinator.saved()


class Failing(Scripted):
    """A group whose first reductions raise."""

    def __init__(self, *args, failures=1, **options):
        super().__init__(*args, **options)
        self.failures = failures

    def _mean(self, vector):
        self.failures -= 1
        if self.failures >= 0:
            raise OSError("a cable is loose")
        return lambda: vector


def test_a_step_that_is_given_up_may_heal():
    script = [Decision(False, True, 1, 1, "given up"), True]
    group = Scripted(script, peer=lambda: saved_at(10.0))
    replica, now = started(group, SGD, ones(0.0))
    group.report_error(OSError("the batch cannot be read"))
    assert group.decide().healed
    now = replica.start(now)
    assert now.params == 10
    assert replica.step(ones(), now)[0].params == 9


def test_a_vote_that_raises_may_have_healed():
    class Interrupted(Scripted):
        def _decide(self):
            decision = super()._decide()
            if decision.healed:
                raise TimeoutError("no answer")
            return decision

    group = Interrupted([Decision(True, True, 1, 1), True], peer=lambda: saved_at(10.0))
    replica, now = started(group, SGD, ones(0.0))
    with pytest.raises(TimeoutError):
        replica.step(ones(), now)
    assert replica.start(now).params == 10


@pytest.mark.parametrize("at_start", [True, False])
def test_replicas_of_one_coordinator_are_healed_together(at_start):
    saved = {**saved_at(10.0, key="a"), **saved_at(20.0, key="b")}
    script = [Decision(True, True, 2, 1), True, True, True]
    group = Scripted(script, peer=lambda: saved, heals_at_start=at_start)
    a, b = Replica(group, SGD, key="a"), Replica(group, SGD, key="b")
    x, y = a.init(ones(0.0)), b.init(ones(0.0))
    for _ in range(2):
        x, _ = a.step(ones(), a.start(x))
        y, _ = b.step(ones(), b.start(y))
    assert (x.params, y.params) == (8, 18)


@pytest.mark.parametrize("delay", [0, 1])
def test_a_synchronization_can_be_given_up(delay):
    tx = fo.diloco(SGD, SGD, 2, delay=delay)
    group = Failing([False] + [True] * 7)
    replica = Replica(group, tx)
    now, decisions = replica.init(ones(0.0)), []
    for _ in range(8):
        try:
            now, decision = replica.step(-ones(), replica.start(now))
        except OSError as error:
            group.report_error(error)
            decision = group.decide()
        decisions.append(decision)
    assert [d.committed for d in decisions if d is not None][:3] == [False, True, True]


def test_a_pending_synchronization_that_was_closed_is_offered_anew():
    group = Scripted([False, True])
    replica = Replica(group, fo.diloco(SGD, SGD, 2, delay=1))
    now, _ = replica.step(-ones(), replica.start(replica.init(ones(0.0))))
    assert group.is_open
    group.report_error(OSError("given up"))
    group.decide()
    now, decision = replica.step(-ones(), replica.start(now))
    assert decision.committed


def test_a_peers_tensors_come_to_where_ours_are():
    tx = fo.adam(0.1)
    script = [Decision(True, True, 1, 1)]
    group = Scripted(script, peer=lambda: saved_at(10.0, tx), heals_at_start=True)
    _, now = started(group, tx, torch.zeros(1, device="meta"))
    assert {x.device.type for x in (now.params, now.state.slots["exp_avg"])} == {"meta"}


@pytest.mark.parametrize("first", [False, True])
def test_a_heal_that_fails_in_the_middle_is_not_trained_on(first):
    def fails(values):
        raise ValueError("of another version")

    group = Scripted([Decision(True, True, 1, 1), True, True], peer=lambda: {"x": 1, "y": 2})
    got = []
    group.register("x", fails if first else got.append, dict)
    group.register("y", got.append if first else fails, dict)
    group.start()
    with pytest.raises(ValueError, match="of another version"):
        group.decide()
    group.next += 1
    group.start()
    with pytest.raises(RuntimeError, match=r"a heal failed half-way .* no peer has healed it "):
        group.decide()


def test_extra_arguments_are_numbers_or_tensors_and_go_where_the_gradients_are():
    replica, now = started(Local(), fo.polyak_sgd(), ones())
    with pytest.raises(TypeError, match="value must be a number or a tensor, but is a function"):
        replica.step(ones(), now, value=lambda: 1.0)
    seen = []

    class Watched(Local):
        def allreduce(self, values):
            seen.append(values)
            return super().allreduce(values)

    tx = fo.chain(fo.GradientTransformation(SGD.init, lambda g, s, p=None, *, value=0: (g, s)))
    replica, now = started(Watched(), tx, torch.ones(1, device="meta"))
    replica.step(torch.ones(1, device="meta"), now, value=2.0)
    assert [x.device.type for x in fo.tree.leaves(seen)] == ["meta", "meta"]


def test_a_sparse_gradient_is_an_error():
    group = Scripted([True])
    group.start()
    rows = torch.sparse_coo_tensor([[0]], ones()[None], (2, 1), check_invariants=True)
    with pytest.raises(TypeError, match="averages dense tensors, but 'w' is sparse"):
        group.allreduce({"w": rows})
