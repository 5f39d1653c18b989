"""What a replica gets from its peer: parameters, state, groups and schedulers."""

import pickle

import pytest
import torch
from helpers import assert_same
from torch.optim import lr_scheduler as lrs
from voting import (
    HEALS,
    KINDS,
    SCHEDULERS,
    Plain,
    everything,
    followed,
    halving,
    loss_of,
    made,
    model,
    one_step,
    train,
)

import functional_optim as fo
from functional_optim.adapters import FaultTolerantOptimizer, Optimizer
from functional_optim.replicas import Local, Scripted, Simulation

kinds = pytest.mark.parametrize("kind", KINDS)
at_start = pytest.mark.parametrize("at_start", [False, True])
tensors = pytest.mark.parametrize("tensor", [False, True])


def through_a_file(values):
    """As it would come from another process."""
    return pickle.loads(pickle.dumps(values))


def storages(opt):
    return [p.data_ptr() for group in opt.param_groups for p in group["params"]]


def same_gradients(opt, net, peer, peer_net, i):
    """A batch of the peer, whose gradients are those of both: their mean."""
    for each in (peer, opt):
        each.zero_grad()
    loss_of(peer_net, i).backward()
    for p, q in zip(net.parameters(), peer_net.parameters(), strict=True):
        p.grad = q.grad.clone()


@kinds
@at_start
def test_a_replica_heals_bit_for_bit(kind, at_start):
    """It starts from another seed, and has taken steps of its own."""
    peer_net, peer = made(kind, Local(), seed=1)
    train(peer, peer_net, 3)
    saved = through_a_file(peer.coordinator.saved())
    script = [True, HEALS, True, True, True]
    net, opt = made(kind, Scripted(script, lambda: saved, heals_at_start=at_start), seed=2)
    train(opt, net, 1, first=7)
    places = storages(opt)
    same_gradients(opt, net, peer, peer_net, 3)
    assert (net.weight == peer_net.weight).all() == at_start
    opt.step()
    peer.step()
    assert opt.decision.healed
    assert_same(everything(opt), everything(peer))
    assert storages(opt) == places
    train(opt, net, 3)
    train(peer, peer_net, 3)
    assert_same(everything(opt), everything(peer))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_keeps_its_dtype(dtype):
    """torch's load_state_dict casts: ASGD's float32 numbers, an optimizer's float32 moments."""

    def build(group, seed):
        net = model(seed).to(dtype)
        return net, FaultTolerantOptimizer(group, torch.optim.ASGD(net.parameters(), lr=0.1))

    peer_net, peer = build(Local(), 1)
    for _ in range(2):
        peer.zero_grad()
        peer_net(torch.ones(1, 3, dtype=dtype)).sum().backward()
        peer.step()
    for state in peer.state.values():
        state["ax"] = state["ax"].float() + 1e-4
    net, opt = build(Scripted([HEALS], peer.coordinator.saved), 2)
    opt.zero_grad()
    opt.step()
    assert opt.state[net.weight]["ax"].dtype == torch.float32
    assert_same(everything(opt), everything(peer))


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


def of(net):
    return FaultTolerantOptimizer(Local(), torch.optim.AdamW(net.parameters()))


STRANGE = {
    "a peer's schedulers are": lambda opt: (opt, opt.follow(halving(opt))),
    "2 parameter groups": lambda opt: (opt, opt.add_param_group({"params": torch.ones(1)})),
    "pass the same to all replicas": lambda _: (made("adamw", Local(), heal="schedules")[1], None),
    "parameter 0 is a torch.float32 of shape": lambda _: (of(torch.nn.Linear(3, 3)), None),
    "it has 1 of them": lambda _: (of(torch.nn.Linear(3, 2, bias=False)), None),
}


@pytest.mark.parametrize("says", STRANGE)
def test_a_peer_of_another_program_is_refused_whole(says):
    peer, _kept = STRANGE[says](made("adamw", Local(), seed=1)[1])
    net, opt = made("adamw", Scripted([HEALS], peer.coordinator.saved), seed=2)
    before = everything(opt)
    with pytest.raises(ValueError, match=says):
        train(opt, net, 1)
    assert_same(everything(opt), before)


def test_groups_that_divide_the_parameters_in_another_way_are_refused():
    def divided(cut, group):
        params = [torch.nn.Parameter(torch.full((2,), float(i))) for i in range(3)]
        groups = [{"params": params[:cut], "lr": 0.1}, {"params": params[cut:], "lr": 0.5}]
        return params, FaultTolerantOptimizer(group, torch.optim.SGD(groups))

    _, peer = divided(1, Local())
    params, opt = divided(2, Scripted([HEALS], peer.coordinator.saved))
    opt.zero_grad()
    for p in params:
        p.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"have \[1, 2\] parameters, but those of .* \[2, 1\]"):
        opt.step()
    assert [p[0].item() for p in params] == [0.0, 1.0, 2.0]


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


def test_packed_slots_heal_as_they_are_where_checkpoints_have_them_decoded():
    def replica(group, seed):
        w = torch.nn.Parameter(torch.full((64, 64), float(seed)))
        inside = fo.adapters.AdamW([w], lr=0.1, stored="int8", compile=False)
        opt = FaultTolerantOptimizer(group, inside)
        opt.register_state_dict_post_hook(fo.adapters.decode_slots)
        return w, opt

    w, peer = replica(Local(), 1)
    _, opt = replica(Scripted([HEALS], lambda: through_a_file(peer.coordinator.saved())), 2)
    peer.zero_grad()
    w.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    peer.step()
    opt.zero_grad()
    opt.step()
    assert_same(everything(opt), everything(peer))
    assert sorted(opt.state_dict()["state"][0]) == ["exp_avg", "exp_avg_sq", "step"]
    peer.load_state_dict(opt.state_dict())
    assert "exp_avg.int8" in peer.state[w]


# ---------------------------------------------------------------- schedulers
@pytest.mark.parametrize("name", SCHEDULERS)
@tensors
@at_start
def test_every_scheduler_of_torch_heals(name, tensor, at_start):
    def replica(group, seed):
        return followed(group, SCHEDULERS[name], seed, torch.tensor(0.1) if tensor else 0.1)

    peer_net, peer, theirs = replica(Local(), 1)
    for i in range(3):
        one_step(peer_net, peer, theirs, i)
    saved = through_a_file(peer.coordinator.saved())
    script = [True, HEALS, True, True]
    net, opt, mine = replica(Scripted(script, lambda: saved, heals_at_start=at_start), 2)
    one_step(net, opt, mine, 0)
    for i in range(3, 6):
        same_gradients(opt, net, peer, peer_net, i)
        for each, scheduler in ((peer, theirs), (opt, mine)):
            each.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        assert str(mine.state_dict()) == str(theirs.state_dict())
        assert_same(everything(opt), everything(peer))


def test_a_scheduler_called_after_zero_grad_is_called_again_after_the_heal():
    """zero_grad() at the end of a loop: the peer saves while its scheduler steps."""
    _, peer, theirs = followed(Local(), seed=1)
    saved = []
    _, opt, mine = followed(Scripted([True, HEALS, True], saved.pop), seed=2)

    def loop(each, scheduler, steps):
        for _ in range(steps):
            each.step()
            each.zero_grad()
            scheduler.step()

    for each, scheduler, steps in ((peer, theirs, 3), (opt, mine, 1)):
        each.zero_grad()
        with pytest.warns(UserWarning, match="between the optimizer's zero_grad") as warned:
            loop(each, scheduler, steps)
        assert [x.filename for x in warned] == [__file__]
    assert (theirs.last_epoch, mine.last_epoch) == (3, 1)
    saved.append(peer.coordinator.saved())  # as late as may be
    assert saved[0]["optimizer"]["schedule"]["schedulers"][0]["state"]["last_epoch"] == 2
    loop(peer, theirs, 1)
    loop(opt, mine, 1)
    assert opt.coordinator.next == 2
    assert str(mine.state_dict()) == str(theirs.state_dict())
    assert mine.last_epoch == 4
    assert_same(everything(opt), everything(peer))


def test_a_refused_step_may_heal_and_an_epoch_that_was_missed_counts():
    peer_net, peer, theirs = followed(Local(), seed=1)
    train(peer, peer_net, 2)
    refused = HEALS._replace(committed=False)
    net, opt, mine = followed(Scripted([refused], peer.coordinator.saved), seed=2)
    train(opt, net, 1)
    assert opt.decision.healed
    assert_same(everything(opt), everything(peer))
    for scheduler in (theirs, mine):
        scheduler.step()
        assert scheduler.last_epoch == 1


def test_a_scheduler_that_is_none_of_torchs_heals():
    _, peer, theirs = followed(Local(), lambda opt: Plain())
    theirs.steps = 7
    _, opt, mine = followed(Scripted([HEALS], peer.coordinator.saved), lambda opt: Plain())
    opt.zero_grad()
    opt.step()
    assert mine.steps == 7


@tensors
def test_heal_schedules_only(tensor):
    def replica(group, seed):
        lr = torch.tensor(0.1) if tensor else 0.1
        return followed(group, lambda opt: lrs.ExponentialLR(opt, 0.5), seed, lr, heal="schedules")

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


# ---------------------------------------------------------------- gradients that are 0 or missing
def of_two(loss, **kwargs):
    """A weight and its number of steps, in each of two replicas after three common steps.

    loss: of two weights, the rank and the number of finished steps.
    """

    def worker(group):
        a, b = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
        inner = Optimizer([a, b], lambda: fo.adamw(0.1, weight_decay=0.5))
        opt = FaultTolerantOptimizer(group, inner, average_gradients=True)
        while group.step < 3:
            opt.zero_grad()
            loss(a, b, group.rank, group.step).sum().backward()
            opt.step()
        return [(p.item(), opt.state[p].get("step")) for p in (a, b)]

    found = Simulation(2, seed=0, **kwargs).run(worker).returned
    assert found[0] == found[1]
    return found[0]


def test_a_first_step_with_gradients_of_zero_is_voted_on():
    """It is not the step by which torch.distributed.checkpoint creates a state."""
    found = of_two(lambda a, b, rank, k: (a + b) * (rank == 0 or k > 0), init_sync=False)
    assert [steps for _, steps in found] == [3, 3]


def test_a_gradient_that_only_a_healing_replica_has_is_dropped():
    found = of_two(lambda a, b, rank, k: a + b if rank == 1 and k == 0 else a)
    assert found[1] == (1.0, None)
