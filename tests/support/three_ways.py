"""Random trees, stepped by the pure transform and by a strictly compiled one."""

from __future__ import annotations

from typing import Any

import torch
from helpers import assert_close, run

import functional_optim as fo


def random_tree(seed: int, dtype: torch.dtype, shapes: Any) -> Any:
    """Tensors of these shapes, by name; of every dtype the same but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for key, shape in shapes.items()
    }


def purely(tx: Any, steps: int, dtype: torch.dtype, shapes: Any) -> Any:
    """Parameters and state after some steps of `update`."""
    grads = [random_tree(k + 1, dtype, shapes) for k in range(steps)]
    return run(tx, random_tree(0, dtype, shapes), grads)


def check_compiled(
    tx: Any, steps: int, dtype: torch.dtype, shapes: Any, expected: Any, tolerance: float
) -> None:
    """`fo.compile`'s steps end where the pure ones have: parameters and slots."""
    params = random_tree(0, dtype, shapes)
    step, state = fo.compile(tx, strict=True), tx.init(params)
    for k in range(steps):
        params, state = step(random_tree(k + 1, dtype, shapes), state, params)
    end, last = expected
    assert_close((params, state.slots), (end, last.slots), tolerance)
