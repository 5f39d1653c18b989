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
from voting import (
    INSIDE,
    SCHEDULERS,
    Plain,
    everything,
    followed,
    halving,
    loss_of,
    made,
    model,
    one_step,
)

from functional_optim.adapters import FaultTolerantOptimizer
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
        opt.zero_grad()
        loss_of(net, i).backward()
        opt.step()
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
    opt.zero_grad()
    loss_of(net).backward()
    opt.step()
    with pytest.raises(TypeError):
        scheduler.step()
    scheduler.step(3.0)
    assert (scheduler.last_epoch, scheduler.best) == (1, 3.0)


def test_a_scheduler_that_does_not_follow_is_refused_before_the_vote():
    net, opt = made("sgd", Local())
    scheduler = halving(opt)
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
