"""SAM and ASAM: the function against the papers' loop, and the object against the function."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from helpers import (
    as_parameters,
    assert_close,
    assert_same,
    clone,
    copy_of,
    make_params,
    through_file,
)

import functional_optim as fo
from functional_optim import adapters, schedules

KINDS = {"sam": (fo.sam, adapters.SAM), "asam": (fo.asam, adapters.ASAM)}
kinds = pytest.mark.parametrize("name", KINDS)


def height(params):
    """It is no quadratic, and its gradient differs uphill."""
    return sum((0.5 * p * p + (2 * p).cos()).abs().sum() for p in params.values())


def slopes(params):
    return torch.func.grad(height)(params)


def recipe(lr, weight_decay=0.1):
    return fo.adamw(lr, weight_decay=weight_decay)


def run(tx, params, steps, state=None):
    state = tx.init(params) if state is None else state
    for _ in range(steps):
        updates, state = tx.update(slopes(params), state, params, grad_fn=slopes)
        params = fo.apply_updates(params, updates)
    return params, state


@kinds
def test_the_gradients_are_those_uphill(name):
    """By hand, with SGD."""
    params = moved = make_params()
    for _ in range(5):
        g = slopes(moved)
        w = {k: p.abs() if name == "asam" else torch.ones_like(p) for k, p in moved.items()}
        norm = sum((w[k] * g[k]).square().sum() for k in g).sqrt()
        there = {k: p + 0.3 * w[k] ** 2 * g[k] / norm for k, p in moved.items()}
        moved = {k: p - 0.1 * slopes(there)[k] for k, p in moved.items()}
    assert_close(run(KINDS[name][0](fo.sgd(0.1), 0.3), params, 5)[0], moved, 1e-10)
    assert (run(fo.sgd(0.1), params, 0)[0]["matrix"] - moved["matrix"]).abs().max() > 1e-2


def closure_of(opt, params):
    def closure():
        opt.zero_grad()
        loss = height(dict(enumerate(params)))
        loss.backward()
        return loss

    return closure


@kinds
def test_the_object_equals_the_function_and_resumes(name):
    combinator, cls = KINDS[name]
    params = make_params()
    moved, _ = run(combinator(recipe(0.05), 0.3), params, 4)
    mine = as_parameters(params)
    groups = [{"params": mine[:3]}, {"params": mine[3:]}]
    opt = cls(groups, recipe, 0.3, lr=0.05, compile=False)
    for _ in range(2):
        first = height(dict(enumerate(mine))).item()
        assert opt.step(closure_of(opt, mine)).item() == first
    saved = through_file({"params": copy_of(mine), "opt": opt.state_dict()})
    other = [torch.nn.Parameter(p) for p in saved["params"]]
    again = cls([{"params": other[:3]}, {"params": other[3:]}], recipe, lr=0.05, compile=False)
    again.load_state_dict(saved["opt"])
    assert [group["rho"] for group in again.param_groups] == [0.3, 0.3]
    for o, p in ((opt, mine), (again, other)):
        for _ in range(2):
            o.step(closure_of(o, p))
    assert_close(copy_of(mine), list(moved.values()), 1e-12)
    assert_same(copy_of(other), copy_of(mine))


@kinds
def test_a_closure_that_raises_uphill_leaves_the_parameters(name):
    mine = as_parameters(make_params())
    opt = KINDS[name][1](mine, recipe, lr=0.05, compile=False)
    calls = []

    def closure():
        calls.append(copy_of(mine))
        if len(calls) == 2:
            raise KeyError("uphill")
        return closure_of(opt, mine)()

    before = copy_of(mine)
    with pytest.raises(KeyError, match="uphill"):
        opt.step(closure)
    assert_same(copy_of(mine), before)
    assert not torch.equal(calls[1][2], before[2])
    assert not opt.state


@kinds
def test_the_meta_gradient_is_the_finite_difference(name):
    params = make_params()

    def loss(lr, rho):
        moved, _ = run(KINDS[name][0](fo.sgd(lr), rho), params, 2)
        return sum(p.square().sum() for p in moved.values())

    at = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.05, 0.3)]
    assert torch.autograd.gradcheck(loss, at, eps=1e-6, atol=1e-6, rtol=1e-6)


@kinds
def test_numbers_may_be_schedules_tensors_and_batches(name):
    combinator, params = KINDS[name][0], make_params()
    wanted = run(combinator(fo.sgd(0.1), 0.3), params, 3)[0]
    for rho in (schedules.constant(0.3), torch.tensor(0.3, dtype=torch.float64)):
        assert_close(run(combinator(fo.sgd(0.1), rho), params, 3)[0], wanted, 1e-12)
    many = torch.vmap(lambda rho: run(combinator(fo.sgd(0.1), rho), params, 3)[0])
    found = many(torch.tensor([0.1, 0.3], dtype=torch.float64))
    assert_close({key: x[1] for key, x in found.items()}, wanted, 1e-12)


@kinds
def test_missing_and_zero_gradients_and_untouched_arguments(name):
    tx, params = KINDS[name][0](fo.sgd(0.1)), make_params()
    grads = {**slopes(params), "cube": None}
    state = tx.init(params)
    before = clone((grads, state, params))
    updates, _ = tx.update(grads, state, params, grad_fn=slopes)
    assert updates["cube"] is None
    assert_same((grads, state, params), before)
    none = {key: torch.zeros_like(p) for key, p in params.items()}
    updates, _ = tx.update(none, state, params, grad_fn=lambda p: none)
    assert_same(fo.apply_updates(params, updates), params)
    updates, _ = tx.update(dict.fromkeys(params), state, params, grad_fn=slopes)
    assert set(updates.values()) == {None}


@kinds
def test_what_is_wrong_is_said(name):
    combinator, cls = KINDS[name]
    w = torch.ones(2)
    with pytest.raises(TypeError, match="grad_fn"):
        combinator(fo.sgd(0.1)).update(w, combinator(fo.sgd(0.1)).init(w), w)
    with pytest.raises(ValueError, match="rho of 0 or more"):
        combinator(fo.sgd(0.1), -1.0)
    with pytest.raises(ValueError, match="rho of 0 or more"):
        cls([torch.nn.Parameter(w)], recipe, -1.0, lr=0.1)
    opt = cls([torch.nn.Parameter(w)], recipe, lr=0.1, compile=False)
    with pytest.raises(TypeError, match="step needs a closure"):
        opt.step()
    with pytest.raises(TypeError, match="grad_fn"):
        adapters.Optimizer([torch.nn.Parameter(w)], lambda: combinator(fo.sgd(0.1)))


def test_a_copy_has_its_distance():
    opt = adapters.SAM([torch.nn.Parameter(torch.ones(2))], recipe, 0.2, lr=0.1)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    twin = copy.deepcopy(opt)
    twin.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert [group["rho"] for group in twin.param_groups] == [0.2, 0.2]
