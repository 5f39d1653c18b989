"""Wrong calls of factories, and what to do instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def check_first(make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raise TypeError where parameters stand in the place of a factory's first number."""
    if args and _are_parameters(args[0]):
        first = next(iter(inspect.signature(make).parameters.values()), None)
        kind = "" if first is None else str(first.annotation)
        if first is not None and any(x in kind for x in ("Hyper", "Number", "float")):
            raise TypeError(
                f"{make.__name__} makes a transformation, whose first argument is {first.name}, "
                f"not the parameters; for an optimizer object use {_object_of(make)}; a "
                "transformation gets them from init(params) and update(grads, state, params)."
            )


def _are_parameters(x: Any) -> bool:
    if isinstance(x, torch.nn.Module):
        return True
    if isinstance(x, Tensor):
        return x.requires_grad and x.dim() > 0
    if isinstance(x, dict):
        return "params" in x or any(isinstance(y, Tensor) for y in x.values())
    if isinstance(x, (list, tuple)):
        tensors = [y for y in x if isinstance(y, Tensor) and y.dim() > 0]  # others are numbers
        return bool(tensors) or any(map(_are_parameters, x))
    return False


def _object_of(make: Callable[..., Any]) -> str:
    from functional_optim.core.importing import optimizer_objects

    found = optimizer_objects(make.__name__)
    if found:
        return f"functional_optim.adapters.{found[0]}(params, ...)"
    return (
        f"functional_optim.adapters.Optimizer(params, recipe), with {make.__name__} in the recipe"
    )


def check_flags(annotations: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Raise TypeError for anything but True and False where a flag is asked for."""
    for name, x in kwargs.items():
        known = type(x).__name__ in ("bool", "bool_", "Tensor") or (type(x) is int and x in (0, 1))
        if annotations.get(name) == "bool" and not known:
            raise TypeError(f"{name} must be True or False, but got {x!r}.")


def explained(error: TypeError, make: Callable[..., Any]) -> TypeError:
    """The error of a call, which says what stands here in the place of an unknown argument."""
    from functional_optim.core.other_names import hint_for_argument

    text = str(error)
    call, unexpected, name = text.partition("() got an unexpected keyword argument ")
    if not unexpected or call not in (make.__name__, make.__qualname__):
        return error
    here = hint_for_argument(name.partition(".")[0].strip("'"))
    advice = f"pass {here}" if here else f"it takes {', '.join(inspect.signature(make).parameters)}"
    return TypeError(f"{text}; {advice}.")


def not_called(make: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for `init` and `update` of a factory that has not been called."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        name = make.__name__
        raise TypeError(
            f"{name} is a factory; call it first, e.g. tx = {name}(), then tx.init(params) and "
            "tx.update(grads, state, params)."
        )

    return refused
