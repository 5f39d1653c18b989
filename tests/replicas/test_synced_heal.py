"""A replica that comes back in the middle: from its first synchronization on it is one of them."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_same, clone
from lockstep import Group
from test_synced import random

import functional_optim as fo
from functional_optim.replicas import Decision, Replica, Scripted

OUTER = fo.sgd(0.7, momentum=0.9, nesterov=True)
ADAMW = fo.adamw(fo.schedules.cosine_decay(0.1, 40))
RECIPES = {
    "local_sgd": fo.local_sgd(ADAMW, 3),
    "diloco": fo.diloco(ADAMW, OUTER, 3, alpha=0.25),
    "in turns": fo.diloco(ADAMW, OUTER, 6, fragments=2),
    "delayed": fo.diloco(ADAMW, OUTER, 8, fragments=2, delay=2, alpha=0.25),
}
VOTES = 9
KILLED = 1
"""The replica that loses all that it has."""


def common(now):
    """What must be the same bits everywhere after a synchronization."""
    state = now.state
    if isinstance(state, fo.replicas.LocalSGDState):
        return now.params, state.anchor
    return state.anchor, state.outer, state.turn


def train(tx, rank, member, killed_at, **how):
    """The trees after each vote, and the decisions. Every replica starts from its own weights."""
    replica = Replica(member, tx, **how)
    member.fresh = rank > 0
    now = replica.init(random(rank), extra={"seed": torch.tensor(rank)})
    ends, t, alive = [], 0, 0
    while len(ends) < VOTES:
        if rank == KILLED and (len(ends), alive) == killed_at:
            now = replica.init(random(99))._replace(extra={"seed": torch.tensor(99)})
            member.fresh, killed_at = True, None
        now = replica.start(now)
        t, alive = t + 1, alive + 1
        grads = fo.tree.map(torch.sub, now.params, random(100 + 3 * t + rank))
        now, decision = replica.step(grads, now)
        if decision is not None:
            ends.append((clone(now), decision))
            alive = 0
    return ends


def trained(name, late, killed_at=(3, 1), refused=(5, 6), **how):
    group = Group(3, refused, late)
    return group.run(lambda rank, member: train(RECIPES[name], rank, member, killed_at, **how))


def may_heal_late(name):
    return not RECIPES[name].heals_first


HEALS = [(name, late) for name in RECIPES for late in (False, True)[: 1 + may_heal_late(name)]]


@pytest.mark.parametrize("killed_at", [(3, 0), (4, 1), (6, 1)])
@pytest.mark.parametrize(("name", "late"), HEALS)
def test_a_healed_replica_has_the_bits_of_the_others(name, late, killed_at):
    results = trained(name, late, killed_at)
    for ends in zip(*results, strict=True):
        (first, said), *others = ends
        for now, decision in others:
            assert_same(common(now), common(first))
            assert decision.step == said.step
    healed = [[decision.healed for _, decision in ends] for ends in results]
    assert [sum(x) for x in healed] == [0, 2, 1]
    assert healed[KILLED][0]
    assert [decision.committed for _, decision in results[0]].count(False) == 2


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_a_healed_replica_goes_on_with_its_peers_momenta(name):
    """Of all other replicas, momenta and counts are their own."""
    results = trained(name, late=False, killed_at=(3, 0), refused=())
    (peer, _), (healed, decision), (other, _) = [ends[3] for ends in results]
    assert decision.healed
    assert_same(healed.state, peer.state)
    assert_same(healed.extra, peer.extra)
    slots = [x.state.inner.slots["exp_avg"]["a"] for x in (peer, other)]
    assert not torch.equal(*slots)


@pytest.mark.parametrize("name", ["local_sgd", "delayed"])
def test_a_peer_that_stands_elsewhere_does_not_move_this_replicas_synchronization(name):
    """One that is through, for instance, and has no local steps behind it."""
    tx = RECIPES[name]
    peer = Replica(Scripted([]), tx)
    saved = {"replica": peer.init(random(7))}
    replica = Replica(
        Scripted([Decision(True, True, 4, 1)], peer=lambda: saved, heals_at_start=True), tx
    )
    now = replica.init(random(1))
    turns = 3 if name == "local_sgd" else 4
    for t in range(turns):
        now, decision = replica.step(fo.tree.map(torch.neg, now.params), replica.start(now))
        assert (decision is None) is (t + 1 < turns)
    assert decision.healed
    assert int(now.state.since) == 0


@pytest.mark.parametrize("name", ["local_sgd", "delayed"])
def test_replicas_that_step_in_place_are_healed_too(name):
    for ends in zip(*trained(name, late=False, compile=True), strict=True):
        (first, _), *others = ends
        for now, _ in others:
            assert_same(common(now), common(first))


def test_training_gets_somewhere_in_spite_of_it():
    """Or equal bits would say little: far from the start, near to where all are pulled."""
    ends = trained("diloco", late=False)[0]
    begin, end = ends[0][0].params["b"], ends[-1][0].params["b"]
    assert (end - begin).norm() > 0.2
