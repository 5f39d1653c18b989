"""Ways to step a transformation, which all end where the pure update does.

Each gives the parameters, and the slots by key and by the names of the parameters.
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
    slots: dict[str, Any] = {}
    for name, p in named.items():
        for key, x in opt.state[p].items():
            slots.setdefault(key, {})[name] = x
    return {name: p.detach() for name, p in named.items()}, slots


def by_eager_object(tx: Any, params: Any, grads: Any) -> tuple[Any, Any]:
    """By an optimizer object that does not compile."""
    return by_object(tx, params, grads, compile=False)
