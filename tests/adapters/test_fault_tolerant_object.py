"""The fault-tolerant optimizer as an object: groups, state, hooks, pickle, profiles."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict

import pytest
import torch
from helpers import assert_close, assert_same
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from voting import KINDS, everything, inputs, loss_of, made, model, train

from functional_optim.adapters import FaultTolerantOptimizer
from functional_optim.replicas import Local, Scripted

kinds = pytest.mark.parametrize("kind", KINDS)


def test_t09_state_dicts_are_those_of_the_optimizer_inside():
    net, opt = made("adamw", Local())
    train(opt, net, 2)
    assert_same(opt.state_dict(), opt.optim.state_dict())
    other_net, other = made("adamw", Local(), seed=1)
    other.load_state_dict(state_dict=copy.deepcopy(opt.state_dict()))
    assert_same(other.state_dict(), opt.state_dict())
    other_net.load_state_dict(net.state_dict())
    train(opt, net, 2)
    train(other, other_net, 2)
    assert_same(everything(opt), everything(other))
    with pytest.raises(ValueError, match="parameter group"):
        other.load_state_dict({"state": {}, "param_groups": []})


@kinds
def test_t11_groups_state_and_defaults_are_read_through(kind):
    net, opt = made(kind, Local())
    for name in ("param_groups", "state", "defaults"):
        assert getattr(opt, name) is getattr(opt.optim, name)
    train(opt, net, 1)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    for name in ("param_groups", "state"):
        assert getattr(opt, name) is getattr(opt.optim, name)


def test_t12_t13_they_can_be_assigned():
    _, opt = made("adamw", Local())
    values = {
        "param_groups": [dict(opt.param_groups[0], lr=0.7)],
        "state": defaultdict(dict),
        "defaults": {"lr": 0.7},
    }
    for name, value in values.items():
        setattr(opt, name, value)
        assert getattr(opt, name) is value
        assert getattr(opt.optim, name) is value


def test_t12_parameters_can_be_swapped_in():
    """As torch.func's users do, and FSDP."""
    _, opt = made("sgd", Local())
    other = model(seed=5)
    opt.param_groups[0]["params"] = list(other.parameters())
    train(opt, other, 1)
    assert (other.weight != model(seed=5).weight).all()


def test_t14_t16_hooks_of_all_kinds():
    log = []

    def noted(name):
        return lambda *args: log.append((name, type(args[0]).__name__))

    net, opt = made("sgd", Scripted([True, False]))
    handles = [
        opt.register_step_pre_hook(noted("own before")),
        opt.register_step_post_hook(noted("own after")),
        opt.optim.register_step_pre_hook(noted("inner before")),
        opt.optim.register_step_post_hook(noted("inner after")),
        register_optimizer_step_pre_hook(noted("global before")),
        register_optimizer_step_post_hook(noted("global after")),
    ]
    try:
        train(opt, net, 1)
        mine = "FaultTolerantOptimizer"
        assert log == [
            ("own before", mine),
            ("global before", "SGD"),
            ("inner before", "SGD"),
            ("inner after", "SGD"),
            ("global after", "SGD"),
            ("own after", mine),
        ]
        log.clear()
        train(opt, net, 1)
        assert log == [("own before", mine), ("own after", mine)]
    finally:
        for handle in handles:
            handle.remove()
    opt.coordinator.script += [True]
    log.clear()
    train(opt, net, 1)
    assert log == []


def test_t14_a_step_hook_may_change_the_arguments():
    net, opt = made("sgd", Local())

    def closure():
        opt.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    opt.register_step_pre_hook(lambda self, args, kwargs: ((self, closure), {}))
    assert opt.step() == loss_of(model())
    opt.register_step_pre_hook(lambda *_: 3)
    with pytest.raises(RuntimeError, match="pre-hook must return None or a tuple"):
        opt.step()


def test_t15_state_dict_hooks_of_both():
    log = []
    _, opt = made("sgd", Local())

    def hooks(of, name):
        of.register_state_dict_pre_hook(lambda self: log.append(f"{name} saves"))
        of.register_state_dict_post_hook(lambda self, d: (log.append(f"{name} saved"), d)[1])
        of.register_load_state_dict_pre_hook(lambda self, d: log.append(f"{name} loads"))
        of.register_load_state_dict_post_hook(lambda self: log.append(f"{name} loaded"))

    hooks(opt, "own")
    hooks(opt.optim, "inner")
    opt.register_state_dict_post_hook(lambda self, d: {**d, "more": 1})
    opt.register_load_state_dict_pre_hook(lambda self, d: {k: d[k] for k in d if k != "more"})
    saved = opt.state_dict()
    assert saved["more"] == 1
    opt.load_state_dict(saved)
    assert log == [
        "own saves",
        "inner saves",
        "inner saved",
        "own saved",
        "own loads",
        "inner loads",
        "inner loaded",
        "own loaded",
    ]
    assert saved["more"] == 1
    _, other = made("sgd", Local())
    other.register_load_state_dict_pre_hook(lambda self, d: d.pop("more") and None)
    other.load_state_dict(saved)
    assert saved["more"] == 1  # a hook works on a copy, as torch's do


def test_t16_torch_does_not_wrap_the_step_again():
    step = FaultTolerantOptimizer.step
    made("sgd", Local())
    assert FaultTolerantOptimizer.step is step
    assert made("sgd", Local())[1].step.__func__ is step


def test_t17_a_record_in_profiles():
    net, opt = made("adamw", Scripted([True, False]))
    with torch.profiler.profile(acc_events=True) as profile:
        train(opt, net, 2)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["Optimizer.step#FaultTolerantOptimizer.step"] == 2
    assert counts["Optimizer.step#AdamW.step"] == 1
    assert counts["Optimizer.zero_grad#AdamW.zero_grad"] == 2


@kinds
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_t18_copies_have_no_coordinator(kind, how):
    net, opt = made(kind, Local(), nonfinite="refuse", average_gradients=True, heal="schedules")
    train(opt, net, 2)
    both = (net, opt)
    other_net, other = pickle.loads(pickle.dumps(both)) if how == "pickle" else copy.deepcopy(both)
    assert_same(everything(other), everything(opt))
    assert other.coordinator is None
    for call in (other.zero_grad, other.step):
        with pytest.raises(RuntimeError, match="no coordinator; assign"):
            call()
    assert pickle.loads(pickle.dumps(other)).coordinator is None
    other.coordinator = Local()
    train(opt, net, 2)
    train(other, other_net, 2)
    assert_same(everything(opt), everything(other))
    other.zero_grad()
    other_net.weight.sum().mul(float("nan")).backward()
    other.step()
    assert not other.decision.committed
    assert list(other.coordinator.saved()["optimizer"]) == ["schedule"]


def test_t18_assigning_a_coordinator():
    _, opt = made("sgd", Local())
    mine = opt.coordinator
    opt.coordinator = mine
    assert list(mine.saved()) == ["optimizer"]
    _, second = made("sgd", mine)
    assert list(mine.saved()) == ["optimizer", "optimizer.1"]
    opt.zero_grad()
    with pytest.raises(RuntimeError, match="has begun with another coordinator"):
        opt.coordinator = Local()
    with pytest.raises(TypeError, match="coordinator"):
        second.coordinator = 3


def test_t19_repr():
    _, opt = made("sgd", Local())
    assert repr(opt) == f"FaultTolerantOptimizer over {opt.optim!r}"
    assert "lr: 0.1" in repr(opt)


def test_t34_within_torch_compile_a_step_breaks_the_graph_and_is_the_same(fresh_dynamo):
    net, opt = made("adamw", Scripted([True, False, True]))
    for i in range(3):
        opt.zero_grad()
        loss = torch.compile(lambda x: net(x).square().sum(), backend="eager")
        loss(inputs(i)).backward()
        torch.compile(opt.step, backend="eager")()
    bare, alone = made("adamw", Local())
    train(alone, bare, 1)
    train(alone, bare, 1, first=2)
    assert_close(everything(opt), everything(alone), 1e-5)  # torch's is another one there


def test_it_can_be_hashed_and_referred_to_weakly():
    import weakref

    _, opt = made("sgd", Local())
    assert weakref.ref(opt)() is opt
    assert {opt: 1}[opt] == 1


def test_a_class_derived_from_it():
    class Mine(FaultTolerantOptimizer):
        def step(self, closure=None):
            self.steps = getattr(self, "steps", 0) + 1
            return super().step(closure)

    net = model()
    opt = Mine(Local(), torch.optim.SGD(net.parameters(), lr=0.1))
    log = []
    opt.register_step_pre_hook(lambda *_: log.append(1))
    train(opt, net, 2)
    assert opt.steps == 2
    assert log == [1, 1]
