"""Steps with the trees of the last step, and with others that only look like them."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_close, clone, run

import functional_optim as fo
from functional_optim import adapters, tree
from functional_optim.engine.plan import filling


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
    """A step of a tree, and what it goes on with."""
    tx = fo.adam(0.1)
    params = make(torch.ones)
    state, step = tx.init(params), fo.compile(tx)
    grads = tree.map(torch.ones_like, params)
    for _ in range(steps):
        params, state = step(grads, state, params)
    return tx, step, grads, state, params


@pytest.mark.parametrize("kind", TREES)
def test_steps_of_the_same_trees(kind):
    tx, _, grads, state, params = stepped(TREES[kind])
    start = TREES[kind](torch.ones)
    assert_close((params, state), run(tx, start, [grads] * 3), 1e-6)


OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "one leaf more": lambda g, p: ({**g, "more": torch.ones(1)}, p),
    "one leaf less": lambda g, p: ({name: g[name] for name in list(g)[:-1]}, p),
    "another mapping": lambda g, p: (OrderedDict(g), p),
    "deeper": lambda g, p: ({**g, "a": [g["a"]]}, p),
    "no gradient": lambda g, p: ({**g, "a": None}, p),
    "another parameter": lambda g, p: (g, {**p, "a": 2 * p["a"]}),
    "another layout": lambda g, p: ({**g, "a": g["a"].t().contiguous().t()}, p),
    "another dtype": lambda g, p: ({**g, "a": g["a"].double()}, p),
    "another shape": lambda g, p: ({**g, "a": g["a"].t()}, p),
    "another order of keys": lambda g, p: (dict(reversed(g.items())), dict(reversed(p.items()))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_smallest_difference_is_seen(name):
    """Trees that are not those of the last step end where the pure update does, or are refused."""
    tx, step, grads, state, params = stepped(TREES["dict"])
    grads, params = OTHERS[name](grads, params)
    before = clone((params, state))
    try:
        wanted = run(tx, clone(params), [grads], clone(state))
    except ValueError:
        with pytest.raises(ValueError, match="params and grads"):
            step(grads, state, params)
        wanted = before
    else:
        step(grads, state, params)
    assert_close((params, state), wanted, 1e-6)


OBJECTS = {
    "adamw": adapters.AdamW,
    "nadam": adapters.NAdam,
    "clipped": lambda params: adapters.Optimizer(
        params, lambda: fo.chain(fo.clip_by_global_norm(1.0), fo.adam(0.1))
    ),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_an_optimizer_is_freed_when_the_last_name_is_deleted(kind):
    """Its plan does not hold it: its slots would stay until the next garbage collection. Each of
    its steps raises the versions of what it writes."""
    params = [torch.nn.Parameter(torch.ones(n)) for n in (3, 5)]
    opt = OBJECTS[kind](params)
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(3):
        before = [p._version for p in params]
        opt.step()
        assert all(p._version > x for p, x in zip(params, before, strict=True))
    there = weakref.ref(opt)
    gc.collect()
    gc.disable()
    try:
        del opt
        assert there() is None
    finally:
        gc.enable()


def test_a_write_of_a_number_is_in_c_where_no_subclass_sees_it():
    """For `commit`, which makes such writes without letting a signal handler between."""
    plain = filling(torch.zeros(2), 1.0)
    assert isinstance(plain, functools.partial)
    assert isinstance(plain.func, types.BuiltinFunctionType)
    other = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    write = filling(other, 1.0)
    assert not isinstance(write, functools.partial)
    write()
    assert other.tolist() == [1.0, 1.0]
