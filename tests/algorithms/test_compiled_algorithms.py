"""Kernels of algorithms that measure their tensors do what their rules do."""

from __future__ import annotations

import pytest
import torch
from three_ways import check_compiled, purely

import functional_optim as fo

SHAPES = {"a": (70, 80), "b": (80,), "c": (3, 5, 7), "d": (), "e": (1, 6)}
RECIPES = {
    "cocob": lambda: fo.cocob(weight_decay=0.01),
    "fromage": lambda: fo.fromage(0.03, p_bound=1.0),
    "lars": lambda: fo.lars(1.0, momentum=0.9, weight_decay=0.1),
    "novograd": lambda: fo.novograd(0.02, weight_decay=0.1),
    "psgd_kron": lambda: fo.psgd_kron(0.02, weight_decay=0.1),
    "shampoo": lambda: fo.shampoo(0.1, (0.8, 0.95), 1e-3, 0.1, grafting="adam", momentum=0.5),
    "sm3": lambda: fo.sm3(0.3),
    "stable_adamw": lambda: fo.stable_adamw(0.02),
}


@pytest.mark.parametrize("name", RECIPES)
def test_kernels_do_what_the_rule_does(name):
    recipe = RECIPES[name]
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        if dtype is torch.float64 or name in ("psgd_kron", "sm3", "stable_adamw"):
            expected = purely(recipe(), 4, dtype, SHAPES)
            check_compiled(recipe(), 4, dtype, SHAPES, expected, tolerance)
