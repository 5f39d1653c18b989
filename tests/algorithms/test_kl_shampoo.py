"""KL-Shampoo and KL-SOAP against their loops, and at their limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_close, assert_finite, run
from reference.loops import LOOPS
from three_ways import random_tree

import functional_optim as fo

COMMON: dict[str, Any] = {"lr": 0.05, "shampoo_beta": 0.9, "eps": 1e-3, "weight_decay": 0.1}
RECIPES = {
    "kl_soap": (fo.kl_soap, {**COMMON, "betas": (0.8, 0.95)}),
    "kl_shampoo": (fo.kl_shampoo, {**COMMON, "momentum": 0.8}),
}


@pytest.mark.parametrize(
    ("shape", "frequency", "hyper"),
    [
        ((4, 4), 1, {}),
        ((3, 4), 4, {"init_factor": 2.0}),
        ((5, 4), 3, {}),
        ((13, 12), 3, {"max_clamp_value": 11}),
    ],
)
@pytest.mark.parametrize("name", RECIPES)
def test_fifty_steps_are_those_of_the_loop(name, shape, frequency, hyper):
    recipe, known = RECIPES[name]
    every = {**known, **hyper, "precondition_frequency": frequency}
    p = random_tree(0, torch.float64, {"w": shape})["w"]
    small = 1e-2 if "max_clamp_value" in hyper else 1.0  # so that the bound is reached
    grads = [small * random_tree(k + 1, torch.float64, {"w": shape})["w"] for k in range(50)]
    moved, _ = run(recipe(**every), p, grads)
    theirs = LOOPS[name](p.numpy(), [g.numpy() for g in grads], **every)
    assert_close(moved, torch.as_tensor(theirs), 1e-9)
    if small < 1.0:
        free, _ = run(recipe(**{**every, "max_clamp_value": None}), p, grads)
        assert (free - moved).abs().max() > 1e-5


@pytest.mark.parametrize("name", RECIPES)
def test_normalized_steps_have_the_length_of_the_learning_rate(name):
    recipe, hyper = RECIPES[name]
    tx = recipe(**{**hyper, "weight_decay": 0.0}, normalize_grads=True)
    w = torch.zeros(3, 2)
    g = random_tree(1, torch.float32, {"w": (3, 2)})["w"]
    _, state = tx.update(g, tx.init(w), w)
    u, _ = tx.update(g, state, w)
    assert u.square().mean().sqrt().item() == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize("name", RECIPES)
def test_zeros_half_types_and_empty_matrices_stay_finite(name):
    recipe, hyper = RECIPES[name]
    shapes = {"w": (3, 2), "empty": (0, 3), "row": (1, 4)}
    params = random_tree(0, torch.bfloat16, shapes)
    grads = [random_tree(k, torch.bfloat16, shapes) for k in range(4)]
    zeros = {key: torch.zeros_like(p) for key, p in params.items()}
    tx = recipe(**hyper, precondition_frequency=1)
    assert_finite(run(tx, params, [zeros, zeros, *grads, zeros]))
