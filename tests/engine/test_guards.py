"""What the usual step does without: flattening of trees, Python's comparisons, a signal handler."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from helpers import assert_same, clone

import functional_optim as fo
from functional_optim import adapters, tree
from functional_optim.core import memory
from functional_optim.kernels import interrupts, private


class Pair(NamedTuple):
    first: torch.Tensor
    second: list[torch.Tensor]


TREES = {
    "list": lambda x: [x(3), x(2, 3)],
    "dict": lambda x: {"b": x(3), "a": x(2, 3)},
    "nested": lambda x: {
        "b": Pair(x(3), [x(2), x(4)]),
        "a": (x(2, 3), OrderedDict(z=x(1), y=x(2))),
    },
    "none": lambda x: {"a": None, "b": [x(3)], "c": ()},
}


def stepped(make, steps=3):
    tx = fo.adam(0.1)
    params = make(torch.ones)
    state, step = tx.init(params), fo.compile(tx)
    grads = tree.map(torch.ones_like, params)
    for _ in range(steps):
        params, state = step(grads, state, params)
    return step, grads, state, params


@pytest.mark.parametrize("kind", TREES)
def test_trees_of_the_last_step_are_not_flattened(kind, monkeypatch):
    step, grads, state, params = stepped(TREES[kind])
    plan = step.plan
    *_, wanted_state, wanted = stepped(TREES[kind], 4)
    monkeypatch.setattr(tree, "places", None)
    step(grads, state, params)
    assert step.plan is plan
    assert_same((wanted_state, wanted), (state, params))


def other(grads, params):
    """Trees that are not those of the last step, though they have its leaves."""
    yield {**grads, "more": torch.ones(1)}, params
    yield {name: grads[name] for name in list(grads)[:-1]}, params
    yield OrderedDict(grads), params
    yield {**grads, "a": [grads["a"]]}, params
    yield {**grads, "a": None}, params
    yield grads, {**params, "a": params["a"].clone()}
    yield {**grads, "a": grads["a"].t().contiguous().t()}, params
    yield {**grads, "a": grads["a"].double()}, params


def test_the_smallest_difference_is_seen():
    _, grads, _, params = stepped(TREES["dict"])
    for k in range(len(list(other(grads, params)))):
        step, grads, state, params = stepped(TREES["dict"])
        assert step.plan.gradients(grads, state, params) is not None
        changed = list(other(grads, params))[k]
        assert step.plan.gradients(changed[0], state, changed[1]) is None


def test_another_order_of_keys_is_the_same_tree():
    step, grads, state, params = stepped(TREES["dict"])
    turned = dict(reversed(params.items()))
    assert list(turned) != list(params)
    assert step.plan.gradients(dict(reversed(grads.items())), state, turned) is not None


def test_a_container_of_another_type_has_no_outline():
    assert tree.outline(torch.ones(1)) is None
    assert tree.outline({"a": [1], "b": torch.nn.ParameterDict()}) is not None  # a leaf
    assert tree.outline([1, (2, {"a": None})]) == (
        list, None, (None, (tuple, None, (None, (dict, ("a",), ((type(None), None, ()),))))),
    )  # fmt: skip


def test_without_torchs_own_guards(monkeypatch):
    """As where another torch has none: compared in Python, with the same results."""
    *_, wanted_state, wanted = stepped(TREES["dict"], 4)
    monkeypatch.setattr(private, "TensorGuards", None)
    step, grads, state, params = stepped(TREES["dict"])
    plan = step.plan
    assert plan.guard.native is None
    step(grads, state, params)
    assert step.plan is plan
    assert_same((wanted_state, wanted), (state, params))
    assert plan.gradients({**grads, "a": grads["a"].double()}, state, params) is None


def test_what_looks_the_same():
    check = memory.same_looks([torch.ones(2, 3), torch.eye(3).to_sparse()])
    assert check(torch.zeros(2, 3), torch.zeros(3, 3).to_sparse())
    assert not check(torch.zeros(3, 2).t(), torch.eye(3).to_sparse())
    assert not check(torch.zeros(2, 3), torch.eye(3))


class Signals:
    """Python's own module, and how often a handler was set."""

    def __init__(self):
        self.set = 0

    def __getattr__(self, name):
        return getattr(interrupts.importlib.import_module("_signal"), name)

    def signal(self, *args):
        self.set += 1
        return self.__getattr__("signal")(*args)


def optimizer(kind):
    params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 5)]
    for p in params:
        p.grad = torch.ones_like(p)
    make = {
        "adamw": lambda: adapters.AdamW(params),
        "sgd": lambda: adapters.SGD(params, lr=0.1, momentum=0.9),
        "nadam": lambda: adapters.NAdam(params),
        "groups": lambda: adapters.Adam([{"params": [p]} for p in params]),
        "clipped": lambda: adapters.Optimizer(
            params, lambda lr: fo.chain(fo.clip_by_global_norm(1.0), fo.adam(lr)), lr=0.1
        ),
    }
    return make[kind]()


@pytest.mark.usefixtures("pythons_own_handler")
@pytest.mark.parametrize("kind", ["adamw", "sgd", "nadam", "groups", "clipped"])
def test_a_usual_step_swaps_no_signal_handler(kind, monkeypatch):
    opt = optimizer(kind)
    for _ in range(2):
        opt.step()
    signals = Signals()
    monkeypatch.setattr(interrupts, "_signal", signals)
    opt.step()
    assert signals.set == 0
    with torch.device("cpu"):  # a mode that runs Python in torch's functions
        opt.step()
    assert signals.set == 2


def test_versions_are_raised_by_every_step():
    opt = optimizer("adamw")
    params = opt.param_groups[0]["params"]
    for _ in range(3):
        before = clone(params), [p._version for p in params]
        opt.step()
        assert all(p._version > version for p, version in zip(params, before[1], strict=True))


@pytest.mark.parametrize("kind", ["adamw", "nadam", "clipped"])
def test_an_optimizer_is_freed_when_the_last_name_is_deleted(kind):
    """Its plan does not hold it: its slots would stay until the next garbage collection."""
    opt = optimizer(kind)
    for _ in range(3):
        opt.step()
    there = weakref.ref(opt)
    gc.collect()
    gc.disable()
    try:
        del opt
        assert there() is None
    finally:
        gc.enable()
