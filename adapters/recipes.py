"""Recipes, their hyperparameters, and what of these is data to be saved."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import torch

from functional_optim import base

Recipe = Callable[..., base.GradientTransformation]
"""Any function from hyperparameters to a transformation."""


class ByReference:
    """A recipe that pickle stores by its name, and deepcopy shares.

    names: its hyperparameters. groups: where functions may be among these, which pickle stores by
    name, too.
    """

    def __init__(self, recipe: Recipe, names: tuple[str, ...], *groups: dict[str, Any]) -> None:
        self.call = recipe
        self.names = names
        self.groups = groups

    def beside(self, *groups: dict[str, Any]) -> ByReference:
        """The recipe, to be pickled with these groups."""
        return ByReference(self.call, self.names, *groups)

    def __call__(self, group: dict[str, Any]) -> Any:
        return self.call(**{name: group[name] for name in self.names})

    def __deepcopy__(self, memo: dict[int, Any]) -> ByReference:
        return ByReference(self.call, self.names)

    def __reduce__(self) -> tuple[Any, ...]:
        _check_pickled("recipe", self.call)
        for group in self.groups:
            for name in self.names:
                for x in group[name] if isinstance(group[name], (list, tuple)) else [group[name]]:
                    if is_code(x):
                        _check_pickled(name, x)
        return ByReference, (self.call, self.names)


def _check_pickled(what: str, function: Any) -> None:
    """Raise PicklingError for a function that pickle cannot find by its name."""
    try:
        pickle.dumps(function)
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise pickle.PicklingError(
            f"the optimizer's {what} {name} cannot be pickled ({error}); define it with def at "
            "the top level of a module, or save opt.state_dict() instead of the optimizer."
        ) from None


def is_code(x: Any) -> bool:
    """Is a hyperparameter a function, such as a schedule? A module is data: it has parameters."""
    return callable(x) and not isinstance(x, torch.nn.Module)


def as_data(x: Any) -> Any:
    """A hyperparameter as it is saved: None in the place of a function."""
    if type(x) is tuple:
        return tuple([as_data(part) for part in x])
    return None if is_code(x) else x


def has_none(saved: Any) -> bool:
    """May a function have been where a hyperparameter was saved?"""
    return any(x is None for x in (saved if isinstance(saved, (list, tuple)) else [saved]))


def with_code(saved: Any, own: Any) -> Any:
    """A saved hyperparameter, with the functions that the optimizer has of its own."""
    if type(own) is tuple and isinstance(saved, (list, tuple)) and len(saved) == len(own):
        return type(saved)([with_code(x, y) for x, y in zip(saved, own, strict=True)])
    return own if is_code(own) else saved


def recipe_defaults(recipe: Recipe, given: dict[str, Any]) -> dict[str, Any]:
    """A recipe's hyperparameters: those given, and the recipe's own defaults for the others."""
    parameters = inspect.signature(recipe).parameters.values()
    if any(p.kind is p.POSITIONAL_ONLY or p.kind is p.VAR_POSITIONAL for p in parameters):
        raise TypeError("a recipe takes its hyperparameters by name; it has positional-only ones.")
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    if len(named) == len(list(parameters)):
        unknown = sorted(set(given) - {p.name for p in named})
        if unknown:
            takes = ", ".join(p.name for p in named) or "none"
            raise TypeError(
                f"the recipe does not take the hyperparameter {', '.join(unknown)} (it takes: "
                f"{takes}). Check the spelling, or leave it out."
            )
    missing = [p.name for p in named if p.default is p.empty and p.name not in given]
    if missing:
        raise TypeError(
            f"the recipe needs the hyperparameter {', '.join(missing)}; pass "
            f"{', '.join(f'{name}=…' for name in missing)} to the optimizer."
        )
    own = {p.name: copy.copy(p.default) for p in named if p.default is not p.empty}
    return {**own, **given}
