"""Wrong calls of factories, and what to do instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from numbers import Complex, Real
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from functional_optim import numeric


def check_first(make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raise TypeError for parameters instead of a factory's first number."""
    if args and _are_parameters(args[0]):
        first = next(iter(inspect.signature(make).parameters.values()), None)
        kind = "" if first is None else str(first.annotation)
        number = kind == "int" or any(x in kind for x in ("Hyper", "Number", "float"))
        if kind.startswith("Mapping") and isinstance(args[0], dict):  # of numbers, or 0-dim tensors
            number = number and _are_parameters([*args[0].values()])
        if first is not None and number:
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


def takes(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Can a function be called with these arguments? True for a builtin without a signature, and
    under torch.compile, which cannot trace the question."""
    if torch.compiler.is_compiling():
        return True
    if type(fn) is not FunctionType or vars(fn):
        return _binds(fn, args, kwargs)
    optional = len(fn.__defaults__ or ()), tuple(fn.__kwdefaults__ or ())
    key = (fn.__code__, *optional, len(args), *kwargs)
    if key not in _bound:  # a recipe makes the same functions again in many steps
        _bound[key] = _binds(fn, args, kwargs)
    return _bound[key]


_bound: dict[Any, bool] = {}


def _binds(fn: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:
        pass
    return True


NUMBERS = {
    "int": "a whole number",
    "float": "a number",
    "float | Tensor": "a number or a 0-dim tensor",
    "Number": "a number or a 0-dim tensor",
    "Hyper": "a number, a 0-dim tensor or a schedule",
}
"""The values that arguments accept, by their annotations."""

NO_NUMBER = (str, bytes, list, tuple, dict, set, type(None), type, torch.nn.Module)

SIMPLE = frozenset((float, int, bool, Tensor))


def check_numbers(
    make: Callable[..., Any], names: tuple[str, ...], args: Any, kwargs: dict[str, Any]
) -> None:
    """Raise TypeError for an argument that should be a number and cannot be one. names: of the
    args."""
    annotations = getattr(make, "__annotations__", {})
    for name, x in (*zip(names, args, strict=False), *kwargs.items()):
        what = _unfit(x)
        if type(x) in SIMPLE and not what:
            continue
        kind, _, other = (
            str(annotations.get(name, "")).removeprefix("numeric.").partition(" | None")
        )
        if kind not in NUMBERS or other or (x is None and "None" in annotations[name]):
            continue
        function = callable(x) and not isinstance(x, NO_NUMBER)
        if function and kind == "Hyper":
            check_step_function(make.__name__, name, cast(Any, x))
        scheduler = isinstance(x, torch.optim.lr_scheduler.LRScheduler)
        number = callable(x) or hasattr(x, "__float__") or type(x) is numeric.Placeholder
        wrong = isinstance(x, NO_NUMBER) or not number or bool(what)
        if wrong or scheduler or (function and kind != "Hyper"):
            shown = repr(x) if x is None or isinstance(x, (str, bytes)) else f"a {type(x).__name__}"
            advice = ", which functional_optim.schedules.from_torch converts" if scheduler else ""
            raise TypeError(
                f"{make.__name__} takes {NUMBERS[kind]} as {name}, but got {shown}{what}{advice}."
            )


def _unfit(x: Any) -> str:
    """What keeps a tensor, or a scalar of numpy, from being a real number; "" if nothing does."""
    if isinstance(x, Tensor) and x.numel() != 1:
        return f" of shape {tuple(x.shape)}"
    unreal = x.is_complex() if isinstance(x, Tensor) else not isinstance(x, Real)
    return ", which is not real" if unreal and isinstance(x, (Tensor, Complex)) else ""


def check_step_function(who: str, name: str, schedule: Callable[..., Any]) -> None:
    """Raise TypeError for a function that is not one of the step count."""
    if not takes(schedule, 0):
        raise TypeError(
            f"{who} takes a schedule as {name}, a function of the number of finished steps, but "
            "the function that it got does not take one argument; pass e.g. lambda count: 0.1."
        )


def check_flags(annotations: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Raise TypeError unless a flag is True or False."""
    for name, x in kwargs.items():
        if annotations.get(name) == "bool" and not _is_flag(x):
            raise TypeError(f"{name} must be True or False, but got {x!r}.")


def _is_flag(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.numel() == 1
    return type(x).__name__ in ("bool", "bool_") or (type(x) is int and x in (0, 1))


def check_choice(who: str, choices: Collection[Any], **values: Any) -> None:
    """Raise ValueError unless each of some arguments is one of the choices. who: takes them."""
    for name, x in values.items():
        if x not in choices:
            *others, last = map(repr, choices)
            raise ValueError(f"{who} takes {', '.join(others)} or {last} as {name}, but got {x!r}.")


INSIDE = ("a hyperparameter must be", " takes a number")
"""Texts in errors for a number that a factory has passed on."""


def explained(
    error: TypeError,
    make: Callable[..., Any],
    names: tuple[str, ...] = (),
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> TypeError:
    """The error of a call, with our name for an unknown argument, and the argument that is not a
    number. names: of the args."""
    from functional_optim.core.other_names import hint_for_argument

    text = str(error)
    if any(words in text for words in INSIDE):
        try:
            check_numbers(make, names, args, kwargs or {})
        except TypeError as named:
            return named
    text = text.partition(". Did you mean ")[0]  # of Python 3.13, which knows similar names only
    call, many, _ = text.partition("() takes ")
    own = (make.__name__, make.__qualname__)
    named = _by_name(make)
    if many and text.endswith(" given") and call in own and named:
        return TypeError(f"{text}; pass the others by name: {named}.")
    call, unexpected, name = text.partition("() got an unexpected keyword argument ")
    if not unexpected or call not in own:
        return error
    known = [x for x in inspect.signature(make).parameters if x != "self"]
    here = hint_for_argument(name.strip("'"), known)
    advice = f"pass {here}" if here else f"it takes {', '.join(known)}"
    return TypeError(f"{text}; {advice}.")


def _by_name(make: Callable[..., Any]) -> str:
    """The arguments that a function takes only by name, as in a call."""
    found = inspect.signature(make).parameters.values()
    own = [f"{x.name}=" for x in found if x.kind is x.KEYWORD_ONLY]
    hyper = any(x.kind is x.VAR_KEYWORD and x.name == "hyperparameters" for x in found)
    return ", ".join(["lr="] * hyper + own)


def explaining(init: Callable[..., None]) -> Any:
    """A constructor with an error that gives our name for an unknown argument."""

    @functools.wraps(init)
    def explained_init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError as error:
            found = explained(error, init)
            call, rest = f"{init.__qualname__}()", str(found)
            if rest.startswith(call) and type(self).__init__ is explained_init:  # inherited
                own = f"{type(self).__qualname__}.__init__()"
                found = TypeError(own + rest.removeprefix(call))
            raise found from error.__cause__

    return explained_init


def not_called(make: Callable[..., Any]) -> Callable[..., Any]:
    """`init` and `update` of a factory that has not been called: they raise an error."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        name = make.__name__
        raise TypeError(
            f"{name} is a factory; call it first, e.g. tx = {name}(), then tx.init(params) and "
            "tx.update(grads, state, params)."
        )

    return refused
