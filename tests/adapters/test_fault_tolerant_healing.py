"""What a replica gets from its peer: parameters, state, groups and schedulers."""

from __future__ import annotations

import pickle

import pytest
import torch
from helpers import assert_same
from torch.optim import lr_scheduler as lrs
from voting import (
    HEALS,
    INSIDE,
    KINDS,
    SCHEDULERS,
    Plain,
    everything,
    loss_of,
    made,
    model,
    one_step,
    train,
)

from functional_optim.adapters import FaultTolerantOptimizer
from functional_optim.replicas import Local, Scripted

kinds = pytest.mark.parametrize("kind", KINDS)
at_start = pytest.mark.parametrize("at_start", [False, True])


def through_a_file(values):
    """As it would come from another process."""
    return pickle.loads(pickle.dumps(values))


def storages(opt):
    return [p.data_ptr() for group in opt.param_groups for p in group["params"]]


@kinds
@at_start
def test_t09_t37_a_replica_heals_bit_for_bit(kind, at_start):
    """It starts from another seed, and has taken steps of its own."""
    peer_net, peer = made(kind, Local(), seed=1)
    train(peer, peer_net, 3)
    saved = through_a_file(peer.coordinator.saved())
    net, opt = made(kind, Scripted([True, HEALS], lambda: saved, heals_at_start=at_start), seed=2)
    train(opt, net, 1, first=7)
    places = storages(opt)
    opt.zero_grad()
    assert (net.weight == peer_net.weight).all() == at_start
    peer.zero_grad()
    loss_of(peer_net, 3).backward()
    for p, q in zip(net.parameters(), peer_net.parameters(), strict=True):
        p.grad = q.grad.clone()  # their mean
    opt.step()
    peer.step()
    assert opt.decision.healed
    assert_same(everything(opt), everything(peer))
    assert storages(opt) == places
    opt.coordinator.script += [True] * 3
    train(opt, net, 3)
    train(peer, peer_net, 3)
    assert_same(everything(opt), everything(peer))


def test_a_refused_step_may_heal():
    peer_net, peer = made("adamw", Local(), seed=1)
    train(peer, peer_net, 2)
    refused = HEALS._replace(committed=False)
    net, opt = made("adamw", Scripted([refused], peer.coordinator.saved), seed=2)
    train(opt, net, 1)
    assert opt.decision.healed
    assert_same(everything(opt), everything(peer))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_keeps_its_dtype(dtype):
    """torch's load_state_dict casts: ASGD's float32 numbers, an optimizer's float32 moments."""

    def build(group, seed):
        net = model(seed).to(dtype)
        return net, FaultTolerantOptimizer(group, torch.optim.ASGD(net.parameters(), lr=0.1))

    peer_net, peer = build(Local(), 1)
    train_in(dtype, peer, peer_net)
    for state in peer.state.values():
        state["ax"] = state["ax"].float() + 1e-4
    net, opt = build(Scripted([HEALS], peer.coordinator.saved), 2)
    opt.zero_grad()
    opt.step()
    assert opt.state[net.weight]["ax"].dtype == torch.float32
    assert_same(everything(opt), everything(peer))


def train_in(dtype, opt, net):
    for _ in range(2):
        opt.zero_grad()
        net(torch.ones(1, 3, dtype=dtype)).sum().backward()
        opt.step()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("tensor", [False, True])
@at_start
def test_t23_schedulers_heal(name, tensor, at_start):
    def replica(group, seed):
        net = model(seed)
        lr = torch.tensor(0.1) if tensor else 0.1
        opt = FaultTolerantOptimizer(group, INSIDE["sgd"](net.parameters(), lr))
        return net, opt, opt.follow(SCHEDULERS[name](opt))

    peer_net, peer, theirs = replica(Local(), 1)
    for i in range(3):
        one_step(peer_net, peer, theirs, i)
    saved = through_a_file(peer.coordinator.saved())
    net, opt, mine = replica(
        Scripted([True, HEALS, True, True], lambda: saved, heals_at_start=at_start), 2
    )
    one_step(net, opt, mine, 0)
    for i in range(3, 6):
        peer.zero_grad()
        opt.zero_grad()
        loss_of(peer_net, i).backward()
        for p, q in zip(net.parameters(), peer_net.parameters(), strict=True):
            p.grad = q.grad.clone()
        for each, scheduler in ((peer, theirs), (opt, mine)):
            each.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        assert str(mine.state_dict()) == str(theirs.state_dict())
        assert_same(everything(opt), everything(peer))


def test_t23_a_scheduler_called_after_zero_grad_is_called_again_after_the_heal():
    """zero_grad() at the end of a loop: the peer saves while its scheduler steps."""
    peer_net = model(1)
    peer = FaultTolerantOptimizer(Local(), INSIDE["sgd"](peer_net.parameters(), 1.0))
    theirs = peer.follow(lrs.StepLR(peer, 1, 0.5))
    net = model(2)
    saved = []
    opt = FaultTolerantOptimizer(
        Scripted([True, HEALS, True], saved.pop), INSIDE["sgd"](net.parameters(), 1.0)
    )
    mine = opt.follow(lrs.StepLR(opt, 1, 0.5))

    def loop(each, scheduler, steps):
        for _ in range(steps):
            each.step()
            each.zero_grad()
            scheduler.step()

    for each, scheduler, steps in ((peer, theirs, 3), (opt, mine, 1)):
        each.zero_grad()
        with pytest.warns(UserWarning, match="between the optimizer's zero_grad") as warned:
            loop(each, scheduler, steps)
        assert len(warned) == 1
        assert warned[0].filename == __file__
    assert (theirs.last_epoch, mine.last_epoch) == (3, 1)
    saved.append(peer.coordinator.saved())  # as late as may be
    assert saved[0]["optimizer"]["schedule"]["schedulers"][0]["state"]["last_epoch"] == 2
    loop(peer, theirs, 1)
    loop(opt, mine, 1)
    assert opt.coordinator.next == 2
    assert str(mine.state_dict()) == str(theirs.state_dict())
    assert mine.last_epoch == 4
    assert_same(everything(opt), everything(peer))


def test_t23_an_epoch_that_a_replica_has_missed_counts():
    peer_net = model(1)
    peer = FaultTolerantOptimizer(Local(), INSIDE["sgd"](peer_net.parameters(), 1.0))
    theirs = peer.follow(lrs.StepLR(peer, 1, 0.5))
    train(peer, peer_net, 2)
    refused = HEALS._replace(committed=False)
    net = model(2)
    opt = FaultTolerantOptimizer(
        Scripted([refused], peer.coordinator.saved), INSIDE["sgd"](net.parameters(), 1.0)
    )
    mine = opt.follow(lrs.StepLR(opt, 1, 0.5))
    train(opt, net, 1)
    for scheduler in (theirs, mine):
        scheduler.step()
        assert scheduler.last_epoch == 1


def test_a_scheduler_given_to_follow_heals():
    _, peer = made("sgd", Local())
    theirs = peer.follow(Plain())
    theirs.steps = 7
    _, opt = made("sgd", Scripted([HEALS], peer.coordinator.saved))
    mine = opt.follow(Plain())
    opt.zero_grad()
    opt.step()
    assert mine.steps == 7


@pytest.mark.parametrize("tensor", [False, True])
def test_heal_schedules_only(tensor):
    def replica(group, seed):
        net = model(seed)
        lr = torch.tensor(0.1) if tensor else 0.1
        opt = FaultTolerantOptimizer(group, INSIDE["sgd"](net.parameters(), lr), heal="schedules")
        return net, opt, opt.follow(lrs.ExponentialLR(opt, 0.5))

    peer_net, peer, theirs = replica(Local(), 1)
    one_step(peer_net, peer, theirs, 0)
    net, opt, mine = replica(Scripted([HEALS], peer.coordinator.saved), 2)
    lr = opt.param_groups[0]["lr"]
    before = net.weight.detach().clone()
    opt.zero_grad()
    opt.step()
    assert_same(net.weight.detach(), before)
    assert opt.param_groups[0]["lr"] == 0.05
    assert (opt.param_groups[0]["lr"] is lr) is tensor
    assert str(mine.state_dict()) == str(theirs.state_dict())


def test_two_optimizers_and_buffers_heal_together():
    def replica(group, seed):
        (net_a, a), (net_b, b) = made("adamw", group, seed), made("sgd", group, seed + 1)
        buffer = torch.full((2,), float(seed))
        group.register("buffers", buffer.copy_, lambda: buffer)
        return net_a, a, net_b, b, buffer

    net_a, a, net_b, b, buffer = replica(Local(), 1)
    train(a, net_a, 1)
    train(b, net_b, 1)
    _, c, _, d, mine = replica(Scripted([HEALS], lambda: through_a_file(a.coordinator.saved())), 5)
    c.zero_grad()
    d.zero_grad()
    c.step()
    d.step()
    assert_same((everything(c), everything(d), mine), (everything(a), everything(b), buffer))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda opt: opt.follow(lrs.StepLR(opt, 1)), "a peer's schedulers are"),
        (lambda opt: opt.add_param_group({"params": torch.ones(1)}), "2 parameter groups"),
        (lambda opt: setattr(opt, "_heal", "schedules"), "pass the same everywhere"),
    ],
)
def test_a_peer_of_another_program_is_refused_whole(change, says):
    _, peer = made("adamw", Local(), seed=1)
    kept = change(peer)
    if says.startswith("pass"):
        _, peer = made("adamw", Local(), seed=1, heal="schedules")
    net, opt = made("adamw", Scripted([HEALS], peer.coordinator.saved), seed=2)
    before = everything(opt)
    with pytest.raises(ValueError, match=says):
        train(opt, net, 1)
    assert_same(everything(opt), before)
    del kept


def test_named_parameters_and_hooks_that_change_the_state():
    def replica(group, seed):
        net = model(seed)
        inside = torch.optim.AdamW(net.named_parameters(), lr=0.1)
        inside.register_state_dict_post_hook(lambda self, d: {**d, "state": half(d["state"])})
        inside.register_load_state_dict_pre_hook(lambda self, d: None)
        return net, FaultTolerantOptimizer(group, inside)

    def half(state):
        return {
            i: {k: v.bfloat16() if v.dim() else v for k, v in mine.items()}
            for i, mine in state.items()
        }

    peer_net, peer = replica(Local(), 1)
    train(peer, peer_net, 2)
    net, opt = replica(Scripted([HEALS], peer.coordinator.saved), 2)
    opt.zero_grad()
    opt.step()
    assert opt.state[net.weight]["exp_avg"].dtype == torch.float32
    assert opt.param_groups[0]["param_names"] == ["weight", "bias"]
    assert_same(net.weight.detach(), peer_net.weight.detach())
