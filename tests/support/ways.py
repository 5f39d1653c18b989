"""Ways to step a transformation, which all end where the pure update does.

The first of them give the parameters, and the slots by key and by the names of the parameters.
"""

from typing import Any

import torch
from helpers import run

import functional_optim as fo
from functional_optim.adapters import Optimizer


def by_update(tx: Any, params: Any, grads: Any) -> tuple[Any, Any]:
    """By `tx.update` and `fo.apply_updates`."""
    params, state = run(tx, params, grads)
    return params, state.slots


def by_function(tx: Any, params: Any, grads: Any, **options: Any) -> tuple[Any, Any]:
    """By `fo.compile`."""
    step, state = fo.compile(tx, **options), tx.init(params)
    for g in grads:
        params, state = step(g, state, params)
    return params, state.slots


def by_object(tx: Any, params: Any, grads: Any, compile: Any = True) -> tuple[Any, Any]:
    """By an optimizer object."""
    named = {name: torch.nn.Parameter(p) for name, p in params.items()}
    opt = Optimizer(named.items(), lambda: tx, compile=compile)
    for own in grads:
        for name, p in named.items():
            p.grad = own[name]
        opt.step()
    return {name: p.detach() for name, p in named.items()}, slots_of(opt, named)


def slots_of(opt: Any, named: Any) -> dict[str, Any]:
    """The state of an optimizer object, by key and by the names of its parameters."""
    slots: dict[str, Any] = {}
    for name, p in named.items():
        for key, x in opt.state[p].items():
            slots.setdefault(key, {})[name] = x
    return slots


def by_eager_object(tx: Any, params: Any, grads: Any) -> tuple[Any, Any]:
    """By an optimizer object that does not compile."""
    return by_object(tx, params, grads, compile=False)


def random_tree(seed: int, dtype: torch.dtype, shapes: Any) -> Any:
    """Tensors of these shapes, by name; of every dtype the same but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for key, shape in shapes.items()
    }


WAYS = ("update", "compile", "object", "eager object")


def step_in(way: str, recipe: Any, params: Any, grads: Any, state: Any = None) -> None:
    """One step of a recipe in one of the ways: an object's parameters are the tensors given."""
    tx = recipe()
    if way in ("update", "compile"):
        step = tx.update if way == "update" else fo.compile(tx)
        step(grads, tx.init(params) if state is None else state, params)
        return
    mine = {key: torch.nn.Parameter(p) for key, p in params.items()}
    opt = Optimizer(mine.items(), recipe, compile=way == "object")
    for key, p in mine.items():
        p.grad = grads[key]
        if state is not None:
            slots = {name: x[key] for name, x in state.slots.items() if x[key] is not None}
            opt.state[p].update({"step": torch.tensor(1.0), **state.carry, **slots})
    opt.step()
