"""Random trees, stepped by the pure transform, by a compiled one, and by optimizer objects."""

from typing import Any

import torch
from helpers import assert_close, run

import functional_optim as fo
from functional_optim import adapters


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


WAYS = ("update", "compile", "object", "eager object")


def step_in(way: str, recipe: Any, params: Any, grads: Any, state: Any = None) -> None:
    """One step of a recipe in one of the ways: an object's parameters are the tensors given."""
    tx = recipe()
    if way in ("update", "compile"):
        step = tx.update if way == "update" else fo.compile(tx)
        step(grads, tx.init(params) if state is None else state, params)
        return
    mine = {key: torch.nn.Parameter(p) for key, p in params.items()}
    opt = adapters.Optimizer(mine.items(), recipe, compile=way == "object")
    for key, p in mine.items():
        p.grad = grads[key]
        if state is not None:
            slots = {name: x[key] for name, x in state.slots.items() if x[key] is not None}
            opt.state[p].update({"step": torch.tensor(1.0), **state.carry, **slots})
    opt.step()
