"""MoMo and MoMo-Adam, whose update takes the loss: what `test_links` does not do with its rows.

Where they go is in `test_authors`.
"""

import pytest
import torch
from helpers import assert_close, assert_finite, assert_same, make_grads, make_params

import functional_optim as fo
from functional_optim import schedules

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


@cases
def test_numbers_may_be_tensors_and_schedules(name):
    recipe, hyper = CASES[name]
    params, values = make_params(), losses(4)
    grads = make_grads(params, 4)
    wanted = run(recipe(**hyper), params, grads, values)[0]
    for turn in (lambda x: torch.tensor(x, dtype=torch.float64), schedules.constant):
        other = {**hyper, "lr": turn(hyper["lr"]), "lb": turn(hyper.get("lb", 0.0))}
        assert_close(run(recipe(**other), params, grads, values)[0], wanted, 1e-12)


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
def test_zeros_move_nothing(name):
    recipe, hyper = CASES[name]
    tx, params = recipe(**{**hyper, "weight_decay": 0.0}), make_params()
    zeros = {key: torch.zeros_like(p) for key, p in params.items()}
    moved, state = run(tx, params, [zeros] * 3, [1.0] * 3)
    assert_same(moved, params)
    assert_finite(state)
