"""A peer's tree is never lost: whenever it comes, the next tree that a replica returns is it."""

from __future__ import annotations

import pytest
import torch

import functional_optim as fo
from functional_optim.replicas import Decision, Local, Replica, Scripted

SGD = fo.sgd(1.0)


def ones(value=1.0):
    return torch.full((1,), value)


def saved_at(value, tx=SGD, key="replica"):
    """What a peer at that value saves."""
    peer = Replica(Local(), tx, key=key)
    peer.start(peer.init(ones(value)))
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
    replica = Replica(group, SGD)
    now = replica.start(replica.init(ones(0.0)))
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
    replica = Replica(group, SGD)
    now = replica.start(replica.init(ones(0.0)))
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
    replica = Replica(group, tx)
    now = replica.start(replica.init(torch.zeros(1, device="meta")))
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
    with pytest.raises(
        RuntimeError, match=r"a heal failed half-way .* no peer has healed it since"
    ):
        group.decide()


def test_extra_arguments_are_numbers_or_tensors_and_go_where_the_gradients_are():
    replica = Replica(Local(), fo.polyak_sgd())
    now = replica.start(replica.init(ones()))
    with pytest.raises(TypeError, match="value must be a number or a tensor, but is a function"):
        replica.step(ones(), now, value=lambda: 1.0)
    seen = []

    class Watched(Local):
        def allreduce(self, values):
            seen.append(values)
            return super().allreduce(values)

    tx = fo.chain(fo.GradientTransformation(SGD.init, lambda g, s, p=None, *, value=0: (g, s)))
    replica = Replica(Watched(), tx)
    now = replica.init(torch.ones(1, device="meta"))
    replica.step(torch.ones(1, device="meta"), replica.start(now), value=2.0)
    assert [x.device.type for x in fo.tree.leaves(seen)] == ["meta", "meta"]


def test_a_sparse_gradient_is_an_error():
    group = Scripted([True])
    group.start()
    rows = torch.sparse_coo_tensor([[0]], ones()[None], (2, 1), check_invariants=True)
    with pytest.raises(TypeError, match="averages dense tensors, but 'w' is sparse"):
        group.allreduce({"w": rows})
