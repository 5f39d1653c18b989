"""A fault-tolerant optimizer under torch's LR schedulers, which are frozen where a step is refused.

And under Lightning, Accelerate, distributed checkpoint and torchft's LocalSGD.
"""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from helpers import assert_same
from torch.distributed.checkpoint import state_dict as sd
from torch.optim import lr_scheduler as lrs
from voting import (
    INSIDE,
    KINDS,
    SCHEDULERS,
    Counting,
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

from functional_optim.adapters import MARS, FaultTolerantOptimizer
from functional_optim.replicas import Local, Scripted

SCRIPT = [True, False, True, True, False, False, True, True]


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("tensor", [False, True])
def test_refused_steps_freeze_every_scheduler_of_torch(name, inside, tensor):
    def lr():
        return torch.tensor(0.1) if tensor else 0.1

    net, bare = model(), model()
    opt = FaultTolerantOptimizer(Scripted(SCRIPT), INSIDE[inside](net.parameters(), lr()))
    alone = INSIDE[inside](bare.parameters(), lr())
    mine, theirs = opt.follow(SCHEDULERS[name](opt)), SCHEDULERS[name](alone)
    assert isinstance(opt.param_groups[0]["lr"], torch.Tensor) is tensor
    seen = set()
    for i, committed in enumerate(SCRIPT):
        if committed:
            one_step(bare, alone, theirs, i)
        one_step(net, opt, mine, i)
        seen.add(float(mine.get_last_lr()[0]))
        assert mine.get_last_lr() == theirs.get_last_lr()
        assert str(mine.state_dict()) == str(theirs.state_dict())
    assert_same(everything(opt), everything(alone))
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("script", "per_epoch", "epochs"),
    [
        ([True, False, True], 1, [1, 1, 2]),
        # an epoch counts though its last batch was refused
        ([True, False, False, False, False, True], 2, [1, 1, 2]),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_an_epoch_with_a_commit_counts_once(script, per_epoch, epochs, own):
    net, opt, scheduler = followed(Scripted(script), lambda opt: Plain() if own else halving(opt))
    seen = []
    for i in range(len(script)):
        train(opt, net, 1, first=i)
        if i % per_epoch == per_epoch - 1:
            scheduler.step()
            scheduler.step()
            seen.append(scheduler.steps if own else scheduler.last_epoch)
    assert seen == epochs
    later = opt.follow(lrs.ExponentialLR(opt, 0.5))
    later.step()
    assert later.last_epoch == 0


def test_a_scheduler_within_another_counts_with_it():
    _, opt, inner = followed(Local(), lambda opt: lrs.ExponentialLR(opt, 0.5))
    outer = opt.follow(lrs.ChainedScheduler([inner]))
    opt.zero_grad()
    opt.step()
    for scheduler in (inner, outer, outer):
        scheduler.step()
    assert inner.last_epoch == 2


def test_schedulers_are_what_torch_makes_of_them():
    scheduler = followed(Local())[2]
    other = halving(INSIDE["sgd"](model().parameters(), 1.0))
    assert issubclass(type(scheduler), lrs.StepLR)  # no class is forged
    assert scheduler.state_dict() == other.state_dict()
    assert repr(scheduler) == repr(scheduler.__wrapped__)
    scheduler.gamma = 0.25
    assert scheduler.__wrapped__.gamma == scheduler.gamma == 0.25
    shallow = copy.copy(scheduler)
    shallow.last_epoch = 7
    assert type(shallow) is type(scheduler.__wrapped__) is lrs.StepLR
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_copies_are_plain_until_they_follow(protocol):
    net, opt, scheduler = followed(Local())
    one_step(net, opt, scheduler, 0)
    for other_opt, other in (
        copy.deepcopy((opt, scheduler)),
        pickle.loads(pickle.dumps((opt, scheduler), protocol)),
        pickle.loads(pickle.dumps((scheduler, opt), protocol))[::-1],
    ):
        assert type(other) is lrs.StepLR
        assert other.optimizer is other_opt
        assert str(other.state_dict()) == str(scheduler.state_dict())
        other_opt.coordinator = Scripted([False, True])
        following = other_opt.follow(other)
        for epoch in (1, 2):
            other_opt.zero_grad()
            other_opt.step()
            following.step()
            assert following.last_epoch == epoch


def test_a_call_that_raises_an_error_does_not_count():
    net, opt, scheduler = followed(Scripted([True]), lrs.ReduceLROnPlateau)
    train(opt, net, 1)
    with pytest.raises(TypeError):
        scheduler.step()
    scheduler.step(3.0)
    assert (scheduler.last_epoch, scheduler.best) == (1, 3.0)


@pytest.mark.parametrize("of_inner", [False, True])
def test_a_scheduler_that_does_not_follow_is_refused_before_the_vote(of_inner):
    net, opt = made("sgd", Local())
    scheduler = halving(opt.optim if of_inner else opt)
    opt.zero_grad()
    loss_of(net).backward()
    before = everything(opt)
    with pytest.raises(RuntimeError, match=r"write scheduler = opt.follow\(scheduler\)"):
        opt.step()
    assert_same(everything(opt), before)
    assert opt.decision is None
    scheduler = opt.follow(scheduler)
    opt.step()
    scheduler.step()
    assert opt.param_groups[0]["lr"] == 0.05


def test_follow_takes_a_scheduler_once_and_from_another_optimizer():
    (_, one), (_, other) = made("sgd", Local()), made("sgd", Local())
    plain = Plain()
    first = one.follow(plain)
    assert one.follow(first) is one.follow(plain) is first
    scheduler = other.follow(first)
    one.zero_grad()
    one.step()
    scheduler.step(by=3)
    assert scheduler.steps == 0
    other.zero_grad()
    other.step()
    scheduler.step(by=3)
    assert scheduler.steps == 3
    for opt, followers in ((one, 0), (other, 1)):
        saved = opt.coordinator.saved()["optimizer"]["schedule"]["schedulers"]
        assert len(saved) == followers
    with pytest.raises(TypeError, match="no step and no state_dict and no load_state_dict"):
        one.follow(object())


def test_a_step_that_somebody_has_put_into_a_scheduler_follows():
    plain, seen = Plain(), []
    plain.step = lambda: seen.append("before")
    _, opt, scheduler = followed(Scripted([True, False]), lambda opt: plain)
    for _ in range(2):
        opt.zero_grad()
        opt.step()
        scheduler.step()
    assert seen == ["before"]
    scheduler.step = lambda: seen.append("after")
    scheduler.step()
    plain.step()
    assert seen == ["before", "after"]


def test_a_scheduler_over_a_wrapper_of_the_optimizer_follows():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

        @property
        def param_groups(self):
            return self.optimizer.param_groups

        def step(self, closure=None):
            return self.optimizer.step(closure)

    net, opt, scheduler = followed(Scripted([True, False]), lambda opt: halving(Wrapper(opt)))
    for i in range(2):
        opt.zero_grad()
        loss_of(net, i).backward()
        scheduler.optimizer.step()
        scheduler.step()
    assert scheduler.last_epoch == 1


# ---------------------------------------------------------------- who keeps whom alive
def test_a_scheduler_that_is_thrown_away_is_forgotten():
    _, opt, kept = followed(Local(), lambda opt: lrs.ExponentialLR(opt, 0.5))
    gone = weakref.ref(opt.follow(halving(opt)))
    gc.collect()
    assert gone() is None
    (saved,) = opt.coordinator.saved()["optimizer"]["schedule"]["schedulers"]
    assert saved["class"] == type(kept.__wrapped__).__name__


@pytest.mark.filterwarnings("ignore:.*between the optimizer's zero_grad:UserWarning")
@pytest.mark.parametrize("how", ["a hook", "an open step"])
def test_an_optimizer_that_leads_to_its_scheduler_is_not_kept_alive(how):
    def used():
        net, opt, scheduler = followed(Local())
        if how == "a hook":
            opt.optim.register_step_post_hook(lambda *_: scheduler)
        one_step(net, opt, scheduler, 0)
        if how == "an open step":
            opt.zero_grad()
            scheduler.step()
        return [weakref.ref(x) for x in (scheduler, opt, net.weight)]

    gone = used()
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_a_scheduler_whose_optimizer_is_gone_steps_as_it_would():
    _, opt, scheduler = followed(Local(), lambda opt: Plain())
    del opt
    gc.collect()
    scheduler.step()
    assert scheduler.steps == 1
    _, other = made("sgd", Scripted([False]))
    other.follow(scheduler)
    other.zero_grad()
    other.step()
    scheduler.step()
    assert scheduler.steps == 1


# ---------------------------------------------------------------- trainers and checkpoints
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("tensor", [False, True])
def test_a_distributed_checkpoint_is_loaded_without_a_vote(kind, flat, tensor):
    """It makes the state of a fresh optimizer by an empty step: no vote, and none left open."""
    options = sd.StateDictOptions(flatten_optimizer_state_dict=flat)
    net, opt = made(kind, Counting())
    if tensor:
        opt.param_groups[0]["lr"] = torch.tensor(0.1)
    train(opt, net, 2)
    saved = copy.deepcopy(sd.get_optimizer_state_dict(net, opt, options=options))
    other_net, other = made(kind, Counting(), seed=1)
    if tensor:
        other.param_groups[0]["lr"] = torch.tensor(0.1)
    before = other_net.weight.detach().clone()
    sd.set_optimizer_state_dict(other_net, other, saved, options=options)
    assert_same(other_net.weight.detach(), before)
    assert other.coordinator.starts == 0
    assert not other.coordinator.is_open
    other_net.load_state_dict(net.state_dict())
    train(opt, net, 2)
    train(other, other_net, 2)
    assert_same(everything(other), everything(opt))
    assert other.coordinator.starts == 2


def test_a_second_rate_moves_nothing_when_torch_asks_for_the_state():
    net = torch.nn.Linear(2, 3)
    inside = MARS(net.parameters(), lr=0.1, lr_1d=0.1, weight_decay_1d=0.1, compile=False)
    before = copy.deepcopy(net.state_dict())
    saved = sd.get_optimizer_state_dict(net, FaultTolerantOptimizer(Local(), inside))
    assert_same(net.state_dict(), before)
    assert saved["state"]["bias"]["exp_avg"].shape == (3,)


def test_steps_that_look_empty_are_steps():
    """With gradients of 0, or a learning rate of 0, or a checkpoint that is asked for meanwhile."""
    net, opt = made("adamw", Counting())
    before = net.weight.detach().clone()
    opt.zero_grad()
    (loss_of(net) * 0.0).backward()
    opt.step()
    assert opt.coordinator.step == 1
    assert (net.weight != before).all()  # weight decay
    net, opt = made("sgd", Counting())
    opt.param_groups[0]["lr"] = 0.0
    train(opt, net, 2)
    opt.zero_grad()
    sd.get_optimizer_state_dict(net, opt)
    loss_of(net).backward()
    opt.step()
    assert (opt.coordinator.starts, opt.coordinator.step) == (3, 3)


class Manager:
    """The part of a torchft Manager that its LocalSGD asks; the group's mean is half of ours."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: self.calls.append(name)

    def allreduce(self, tensor):
        tensor.mul_(0.5)
        return self

    def should_commit(self):
        return True


def test_torchfts_local_sgd_over_it():
    torchft = pytest.importorskip("torchft.local_sgd")
    net, opt = made("adamw", Scripted([True, False, True]))
    bare, alone = made("adamw", Local())
    manager = Manager()
    with torchft.LocalSGD(manager, net, opt, sync_every=2):
        train(opt, net, 3)
    sync = ["disallow_state_dict_read", "allow_state_dict_read"]
    assert manager.calls == [*sync, *sync, "start_quorum", "wait", "wait", *sync]
    train(alone, bare, 1)
    with torch.no_grad():
        for p in bare.parameters():
            p.mul_(0.5)
    train(alone, bare, 1, first=2)
    assert_same(everything(opt), everything(alone))


BATCHES = 6


def module(pl, group, manual=False):
    """A LightningModule over a linear layer, with a scheduler that steps after each batch."""

    class Module(pl.lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model()
            self.automatic_optimization = not manual

        def training_step(self, batch, i):
            if not manual:
                return loss_of(self.net, i)
            opt = self.optimizers()
            opt.zero_grad()
            self.manual_backward(loss_of(self.net, i))
            opt.step()
            self.lr_schedulers().step()
            return None

        def configure_optimizers(self):
            inside = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
            opt = FaultTolerantOptimizer(group, inside)
            return [opt], [{"scheduler": opt.follow(halving(opt)), "interval": "step"}]

    return Module()


def fit(pl, module, batches=BATCHES, **kwargs):
    return pl.fit(module, torch.utils.data.DataLoader(torch.zeros(batches, 1)), **kwargs)


@pytest.mark.parametrize("manual", [False, True])
def test_lightning_steps_where_the_group_commits(pl, manual):
    script = [True, False, True, False, False, True]
    mine = module(pl, Scripted(script), manual)
    trainer = fit(pl, mine)
    (opt,) = trainer.optimizers
    assert opt.coordinator.next == BATCHES
    assert opt.coordinator.step == 3
    assert opt.param_groups[0]["lr"] == 0.1 * 0.5**3
    net, alone = made("sgd", Local())
    scheduler = alone.follow(halving(alone))
    for i in (0, 2, 5):
        train(alone, net, 1, first=i)
        scheduler.step()
    assert_same(everything(opt), everything(alone))


@pytest.fixture
def accelerator():
    import accelerate

    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)


def test_accelerate_accumulates_and_schedules(accelerator):
    net, opt = made("adamw", Scripted([True, False, True, True]))  # one is open at the end
    scheduler = opt.follow(halving(opt))
    prepared, optimizer, steps = accelerator.prepare(net, opt, scheduler)
    optimizer.zero_grad()
    for i in range(6):
        with accelerator.accumulate(prepared):
            accelerator.backward(loss_of(prepared, i))
            optimizer.step()
            steps.step()
            optimizer.zero_grad()
    assert opt.coordinator.step == 2
    assert scheduler.last_epoch == 2
    lone, alone = made("adamw", Local())
    slower = alone.follow(halving(alone))
    for i in (0, 4):
        alone.zero_grad()
        for j in (i, i + 1):
            (loss_of(lone, j) / 2).backward()
        alone.step()
        slower.step()
    assert_same(everything(opt), everything(alone))
