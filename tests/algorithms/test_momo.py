"""MoMo and MoMo-Adam, whose update takes the loss: the properties of the table of cases.

Where they go is in `test_authors`.
"""

from __future__ import annotations

import pytest
import torch
from helpers import (
    as_parameters,
    assert_close,
    assert_finite,
    assert_same,
    clone,
    copy_of,
    make_grads,
    make_params,
    through_file,
)

import functional_optim as fo
from functional_optim import adapters, schedules

CASES = {
    "momo": (fo.momo, {"lr": 0.3, "weight_decay": 0.1, "beta": 0.8, "lb": 0.2}),
    "momo-corrected": (fo.momo, {"lr": 0.3, "beta": 0.8, "bias_correction": True}),
    "momo-fstar": (fo.momo, {"lr": 0.3, "weight_decay": 0.1, "use_fstar": True}),
    "momo_adam": (
        fo.momo_adam,
        {"lr": 0.2, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "lb": 0.2},
    ),
    "momo_adam-fstar": (fo.momo_adam, {"lr": 0.2, "eps": 1e-3, "use_fstar": True}),
}
CLASSES = {fo.momo: adapters.Momo, fo.momo_adam: adapters.MomoAdam}
cases = pytest.mark.parametrize("name", CASES)


def losses(steps):
    """They fall from 6 to 2, with jumps."""
    return [2 + 4 * 0.8**t + (t % 3) for t in range(steps)]


def run(tx, params, grads, values, state=None):
    state = tx.init(params) if state is None else state
    for g, value in zip(grads, values, strict=True):
        updates, state = tx.update(g, state, params, value=value)
        params = fo.apply_updates(params, updates)
    return params, state


def stepped(opt, params, grads, values):
    for tree, value in zip(grads, values, strict=True):
        for p, g in zip(params, tree.values(), strict=True):
            p.grad = g.clone()
        opt.step(lambda value=value: torch.tensor(value, dtype=torch.float64))


@cases
def test_an_object_goes_the_same_way_and_resumes(name):
    recipe, hyper = CASES[name]
    params = make_params()
    grads, values = make_grads(params, 6), losses(6)
    moved, state = run(recipe(**hyper), params, grads, values)
    through = as_parameters(params)
    a = CLASSES[recipe](through, compile=False, **hyper)
    stepped(a, through, grads[:3], values[:3])
    saved = through_file({"params": copy_of(through), "opt": a.state_dict()})
    stepped(a, through, grads[3:], values[3:])
    assert_close(copy_of(through), list(moved.values()), 1e-12)
    for key, tree in state.slots.items():
        assert_close([a.state[p][key] for p in through], list(tree.values()), 1e-12)
    second = [torch.nn.Parameter(p) for p in saved["params"]]
    b = CLASSES[recipe](second, compile=False, **hyper)
    b.load_state_dict(saved["opt"])
    stepped(b, second, grads[3:], values[3:])
    assert_same(copy_of(second), copy_of(through))
    assert_same([b.state[p] for p in second], [a.state[p] for p in through])


@cases
def test_tensors_schedules_and_batches_of_numbers(name):
    recipe, hyper = CASES[name]
    params, values = make_params(), losses(4)
    grads = make_grads(params, 4)
    wanted = run(recipe(**hyper), params, grads, values)[0]
    for turn in (lambda x: torch.tensor(x, dtype=torch.float64), schedules.constant):
        other = {**hyper, "lr": turn(hyper["lr"]), "lb": turn(hyper.get("lb", 0.0))}
        assert_close(run(recipe(**other), params, grads, values)[0], wanted, 1e-12)
    rates = torch.tensor([0.1, hyper["lr"]], dtype=torch.float64)
    many = torch.vmap(lambda lr: run(recipe(**{**hyper, "lr": lr}), params, grads, values)[0])
    assert_close({key: x[1] for key, x in many(rates).items()}, wanted, 1e-12)


@cases
def test_the_meta_gradient_is_the_finite_difference(name):
    recipe, hyper = CASES[name]
    params, values = make_params(), losses(3)
    grads = make_grads(params)

    def loss(lr, value):
        moved, _ = run(recipe(**{**hyper, "lr": lr}), params, grads, [value, *values[1:]])
        return sum(p.square().sum() for p in moved.values())

    at = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.05, 3.0)]
    assert torch.autograd.gradcheck(loss, at, eps=1e-6, atol=1e-6, rtol=1e-6)


@cases
def test_nothing_is_touched_and_zeros_move_nothing(name):
    recipe, hyper = CASES[name]
    tx, params = recipe(**{**hyper, "weight_decay": 0.0}), make_params()
    (grads,) = make_grads(params, 1)
    state = tx.init(params)
    before = clone((grads, state, params))
    tx.update(grads, state, params, value=1.0)
    assert_same((grads, state, params), before)
    zeros = {key: torch.zeros_like(p) for key, p in params.items()}
    moved, state = run(tx, params, [zeros] * 3, [1.0] * 3)
    assert_same(moved, params)
    assert_finite(state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64], ids=str)
@cases
def test_half_types_and_complex_numbers(name, dtype):
    recipe, hyper = CASES[name]
    params = make_params(dtype)
    moved, state = run(recipe(**hyper), params, make_grads(params), losses(3))
    assert all(p.dtype is dtype for p in moved.values())
    assert_finite((moved, state))


def test_kernels_step_as_the_rules_do():
    for recipe in CLASSES:
        for dtype in (torch.float64, torch.float32):
            params = make_params(dtype)
            grads, tx = make_grads(params), recipe(lr=0.2, weight_decay=0.1)
            wanted = run(tx, params, grads, losses(3))[0]
            step, state = fo.compile(tx, strict=True, donate=False), tx.init(params)
            for g, value in zip(grads, losses(3), strict=True):
                params, state = step(g, state, params, value=value)
            assert_close(params, wanted, 1e-12 if dtype is torch.float64 else 1e-5)
