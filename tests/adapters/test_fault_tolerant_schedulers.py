"""torch's LR schedulers over a fault-tolerant optimizer: frozen where a step is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from helpers import assert_same
from torch.optim import lr_scheduler as lrs
from voting import INSIDE, SCHEDULERS, Plain, everything, loss_of, model, one_step

from functional_optim.adapters import FaultTolerantOptimizer
from functional_optim.replicas import Local, Scripted

SCRIPT = [True, False, True, True, False, False, True, True]


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("tensor", [False, True])
def test_t20_t21_t22_frozen_on_refused_steps(name, inside, tensor):
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


def counted(script, per_epoch=1):
    net = model()
    opt = FaultTolerantOptimizer(Scripted(script), INSIDE["sgd"](net.parameters(), 1.0))
    scheduler = opt.follow(lrs.StepLR(opt, 1, 0.5))
    seen = []
    for i in range(len(script)):
        opt.zero_grad()
        loss_of(net, i).backward()
        opt.step()
        if i % per_epoch == per_epoch - 1:
            scheduler.step()
            seen.append(scheduler.last_epoch)
    return seen


def test_t22_an_epoch_counts_though_its_last_batch_was_refused():
    assert counted([True, False, False, False, False, True], per_epoch=2) == [1, 1, 2]


def test_t22_each_call_counts_once():
    assert counted([True, False, True]) == [1, 1, 2]
    net = model()
    opt = FaultTolerantOptimizer(Local(), INSIDE["sgd"](net.parameters(), 1.0))
    scheduler = opt.follow(lrs.StepLR(opt, 1, 0.5))
    assert scheduler.last_epoch == 0
    one_step(net, opt, scheduler, 0)
    scheduler.step()
    assert scheduler.last_epoch == 1
    later = opt.follow(lrs.ExponentialLR(opt, 0.5))
    later.step()
    assert later.last_epoch == 0


def test_a_scheduler_within_another_counts_with_it():
    net = model()
    opt = FaultTolerantOptimizer(Local(), INSIDE["sgd"](net.parameters(), 1.0))
    inner = opt.follow(lrs.ExponentialLR(opt, 0.5))
    outer = opt.follow(lrs.ChainedScheduler([inner]))
    opt.zero_grad()
    opt.step()
    inner.step()
    outer.step()
    assert inner.last_epoch == 2
    outer.step()
    assert inner.last_epoch == 2


def test_schedulers_are_what_torch_makes_of_them():
    net = model()
    opt = FaultTolerantOptimizer(Local(), INSIDE["sgd"](net.parameters(), 1.0))
    scheduler = opt.follow(lrs.StepLR(opt, 1, 0.5))
    assert issubclass(type(scheduler), lrs.StepLR)  # no class is forged
    other = lrs.StepLR(INSIDE["sgd"](model().parameters(), 1.0), 1, 0.5)
    assert scheduler.state_dict() == other.state_dict()
    assert repr(scheduler) == repr(scheduler.__wrapped__)
    assert type(scheduler.__wrapped__) is lrs.StepLR
    scheduler.gamma = 0.25
    assert scheduler.__wrapped__.gamma == scheduler.gamma == 0.25


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_copies_are_plain_until_they_follow(protocol):
    net = model()
    opt = FaultTolerantOptimizer(Local(), INSIDE["sgd"](net.parameters(), 1.0))
    scheduler = opt.follow(lrs.StepLR(opt, 1, 0.5))
    one_step(net, opt, scheduler, 0)
    for made in (
        copy.deepcopy((opt, scheduler)),
        pickle.loads(pickle.dumps((opt, scheduler), protocol)),
        pickle.loads(pickle.dumps((scheduler, opt), protocol))[::-1],
    ):
        other_opt, other = made
        assert type(other) is lrs.StepLR
        assert other.optimizer is other_opt
        assert str(other.state_dict()) == str(scheduler.state_dict())
        other_opt.coordinator = Scripted([False, True])
        other = other_opt.follow(other)
        for epoch in (1, 2):
            other_opt.zero_grad()
            other_opt.step()
            other.step()
            assert other.last_epoch == epoch


def test_a_shallow_copy_is_a_scheduler_of_its_own():
    opt = FaultTolerantOptimizer(Local(), INSIDE["sgd"](model().parameters(), 1.0))
    scheduler = opt.follow(lrs.StepLR(opt, 1, 0.5))
    other = copy.copy(scheduler)
    other.last_epoch = 7
    assert type(other) is lrs.StepLR
    assert scheduler.last_epoch == 0


def test_a_call_that_raises_an_error_does_not_count():
    net = model()
    opt = FaultTolerantOptimizer(Scripted([True]), INSIDE["sgd"](net.parameters(), 1.0))
    scheduler = opt.follow(lrs.ReduceLROnPlateau(opt))
    opt.zero_grad()
    loss_of(net).backward()
    opt.step()
    with pytest.raises(TypeError):
        scheduler.step()
    scheduler.step(3.0)
    assert (scheduler.last_epoch, scheduler.best) == (1, 3.0)


def test_a_scheduler_of_ones_own_follows_too():
    class Halving(lrs.LRScheduler):
        def get_lr(self):
            return [lr * 0.5**self.last_epoch for lr in self.base_lrs]

    net = model()
    opt = FaultTolerantOptimizer(Scripted([True, False]), INSIDE["sgd"](net.parameters(), 1.0))
    scheduler = opt.follow(Halving(opt))
    for i in range(2):
        one_step(net, opt, scheduler, i)
        assert opt.param_groups[0]["lr"] == 0.5


def test_a_scheduler_that_does_not_follow_is_refused_before_the_vote():
    net = model()
    opt = FaultTolerantOptimizer(Local(), INSIDE["sgd"](net.parameters(), 1.0))
    scheduler = lrs.StepLR(opt, 1, 0.5)
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
    assert opt.param_groups[0]["lr"] == 0.5


def test_follow_takes_what_is_no_scheduler_of_torch():
    net = model()
    opt = FaultTolerantOptimizer(Scripted([True, False]), INSIDE["sgd"](net.parameters(), 1.0))
    plain = Plain()
    scheduler = opt.follow(plain)
    assert opt.follow(scheduler) is opt.follow(plain) is scheduler
    for i in range(2):
        opt.zero_grad()
        loss_of(net, i).backward()
        opt.step()
        scheduler.step(by=3)
    assert scheduler.steps == 3
    with pytest.raises(TypeError, match="no step and no state_dict and no load_state_dict"):
        opt.follow(object())


def test_a_step_that_somebody_has_put_into_a_scheduler_follows():
    opt = FaultTolerantOptimizer(Scripted([True, False]), INSIDE["sgd"](model().parameters(), 1.0))
    plain, seen = Plain(), []
    plain.step = lambda: seen.append("before")
    scheduler = opt.follow(plain)
    for _ in range(2):
        opt.zero_grad()
        opt.step()
        scheduler.step()
    assert seen == ["before"]
    scheduler.step = lambda: seen.append("after")
    scheduler.step()
    plain.step()
    assert seen == ["before", "after"]


def test_a_scheduler_can_be_given_to_another_optimizer():
    one, other = (
        FaultTolerantOptimizer(Local(), INSIDE["sgd"](model().parameters(), 1.0)) for _ in range(2)
    )
    scheduler = other.follow(one.follow(Plain()))
    one.zero_grad()
    one.step()
    scheduler.step()
    assert scheduler.steps == 0
    for opt, followers in ((one, 0), (other, 1)):
        saved = opt.coordinator.saved()["optimizer"]["schedule"]["schedulers"]
        assert len(saved) == followers


def test_a_scheduler_over_a_wrapper_of_the_optimizer_follows():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

        @property
        def param_groups(self):
            return self.optimizer.param_groups

        def step(self, closure=None):
            return self.optimizer.step(closure)

    net = model()
    opt = FaultTolerantOptimizer(Scripted([True, False]), INSIDE["sgd"](net.parameters(), 1.0))
    scheduler = opt.follow(lrs.StepLR(Wrapper(opt), 1, 0.5))
    for i in range(2):
        opt.zero_grad()
        loss_of(net, i).backward()
        scheduler.optimizer.step()
        scheduler.step()
    assert scheduler.last_epoch == 1


def test_a_scheduler_that_is_thrown_away_is_forgotten():
    opt = FaultTolerantOptimizer(Local(), INSIDE["sgd"](model().parameters(), 1.0))
    gone = weakref.ref(opt.follow(lrs.StepLR(opt, 1)))
    kept = opt.follow(lrs.ExponentialLR(opt, 0.5))
    gc.collect()
    assert gone() is None
    (saved,) = opt.coordinator.saved()["optimizer"]["schedule"]["schedulers"]
    assert saved["class"] == type(kept.__wrapped__).__name__


@pytest.mark.filterwarnings("ignore:.*between the optimizer's zero_grad:UserWarning")
@pytest.mark.parametrize("how", ["a hook", "an open step"])
def test_an_optimizer_that_leads_to_its_scheduler_is_not_kept_alive(how):
    def used():
        net = model()
        opt = FaultTolerantOptimizer(Local(), INSIDE["sgd"](net.parameters(), 1.0))
        scheduler = opt.follow(lrs.StepLR(opt, 1, 0.5))
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
    opt = FaultTolerantOptimizer(Local(), INSIDE["sgd"](model().parameters(), 1.0))
    scheduler = opt.follow(Plain())
    del opt
    gc.collect()
    scheduler.step()
    assert scheduler.steps == 1
    other = FaultTolerantOptimizer(Scripted([False]), INSIDE["sgd"](model().parameters(), 1.0))
    other.follow(scheduler)
    other.zero_grad()
    other.step()
    scheduler.step()
    assert scheduler.steps == 1
