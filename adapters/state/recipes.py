"""Recipes, their hyperparameters, and which of these are saved."""

from __future__ import annotations

import copy
import dis
import inspect
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from functional_optim.adapters.state.storage import KEY
from functional_optim.combinators.as_matrix import kernels_of, views_of
from functional_optim.core import base
from functional_optim.kernels.callers import warn

Recipe = Callable[..., base.GradientTransformation]
"""Any function from hyperparameters to a transformation."""

OTHERS = frozenset(
    (
        *("params", "param_names", "name", "initial_lr", "lr_scale", "swa_lr", "max_lr", "min_lr"),
        *("base_momentum", "max_momentum", "foreach", "fused", "capturable", "differentiable"),
        *("recipe", "compile", "stored", "method", "tx"),
    )
)
"""Keys of a parameter group that a recipe need not accept: torch's keys, those that schedulers and
weight averaging write, torch's selection of an implementation, which changes no results, and the
optimizer's arguments, which ZeroRedundancyOptimizer passes in every group."""


PARAMETERS = frozenset(("p", "ps", "params", "parameters"))
"""Arguments of functions that make an optimizer object, which other libraries take."""


class ByReference:
    """A recipe that pickle stores by its name, and deepcopy shares.

    names: its hyperparameters. more: those that some groups have, for a recipe with `**kwargs`.
    groups: those that may contain functions, which pickle also stores by name.
    """

    def __init__(
        self,
        recipe: Recipe,
        names: tuple[str, ...],
        *groups: dict[str, Any],
        more: tuple[str, ...] = (),
    ) -> None:
        self.call = recipe
        self.names = names
        self.more = more
        self.groups = groups

    def beside(self, *groups: dict[str, Any]) -> ByReference:
        """The recipe, to be pickled with these groups."""
        return ByReference(self.call, self.names, *groups, more=self.more)

    def checked(self, group: dict[str, Any]) -> ByReference:
        """The recipe, also for a group; TypeError for a hyperparameter that it does not accept.

        A recipe with `**kwargs` accepts all, and also receives those of the group.
        """
        names = (*self.names, *self.more)
        if not takes_any(self.call):
            check_keys(group, names)
            return self
        return ByReference(self.call, self.names, more=(*self.more, *unknown_keys(group, names)))

    def __call__(self, group: dict[str, Any]) -> Any:
        values = {name: group[name] for name in self.names}
        if self.more:
            values.update({name: group[name] for name in self.more if name in group})
        return self.call(**values)

    def __deepcopy__(self, memo: dict[int, Any]) -> ByReference:
        return self.beside()

    def __reduce__(self) -> tuple[Any, ...]:
        _check_pickled("recipe", self.call)
        for group in self.groups:
            for name in [name for name in (*self.names, KEY, *self.more) if name in group]:
                for x in group[name] if isinstance(group[name], (list, tuple)) else [group[name]]:
                    if is_code(x):
                        _check_pickled(name, x)
        return _restored, (self.call, self.names, self.more)


def _restored(recipe: Recipe, names: tuple[str, ...], more: tuple[str, ...]) -> ByReference:
    return ByReference(recipe, names, more=more)


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
    """Whether a hyperparameter is a function, such as a schedule. A module is data: it has
    parameters."""
    return callable(x) and not isinstance(x, torch.nn.Module)


def as_data(x: Any) -> Any:
    """A hyperparameter as it is saved: None instead of a function, and the name of a dtype, which
    torch.distributed.checkpoint does not gather."""
    if type(x) is tuple:
        return tuple([as_data(part) for part in x])
    if type(x) is torch.dtype:
        return str(x)
    return None if is_code(x) else x


def has_none(saved: Any) -> bool:
    """May a function have been where a hyperparameter was saved?"""
    return any(x is None for x in (saved if isinstance(saved, (list, tuple)) else [saved]))


def with_code(saved: Any, own: Any) -> Any:
    """A saved hyperparameter, with the functions of the optimizer, and dtypes for their names."""
    if type(own) is tuple and isinstance(saved, (list, tuple)) and len(saved) == len(own):
        return type(saved)([with_code(x, y) for x, y in zip(saved, own, strict=True)])
    if is_code(own):
        return own
    if isinstance(saved, str) and not isinstance(own, str):
        return {str(x): x for x in vars(torch).values() if type(x) is torch.dtype}.get(saved, saved)
    return saved


def takes_any(recipe: Recipe) -> bool:
    """Does a recipe have `**kwargs`?"""
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(recipe).parameters.values())


def unknown_keys(group: dict[str, Any], names: Iterable[str]) -> list[str]:
    """The keys of a group that are neither among the names nor allowed otherwise."""
    return sorted([key for key in map(str, group) if key not in OTHERS and key not in set(names)])


def check_keys(group: dict[str, Any], names: Collection[str]) -> None:
    """Raise TypeError for a parameter group with hyperparameters that are not among the names."""
    unknown = unknown_keys(group, names)
    if unknown:
        raise TypeError(
            f"a parameter group has {', '.join(unknown)}, which the recipe does not take (it "
            f"takes: {', '.join(sorted(names)) or 'none'}). Check the spelling, or make it an "
            f"argument of the recipe. To store a custom entry, assign it "
            f"afterwards: opt.param_groups[i][{unknown[0]!r}] = …."
        )


def check_arguments(who: str, params: Any, lr: Any = None, instead: str = "") -> None:
    """Raise TypeError for arguments that torch does not explain: a module instead of its
    parameters, and a learning rate that is not a number. instead: the call for a schedule."""
    if isinstance(params, torch.nn.Module) and not isinstance(params, torch.nn.ParameterList):
        raise TypeError(
            f"{who} takes parameters, but got a {type(params).__name__}; pass model.parameters(), "
            "or model.named_parameters()."
        )
    if isinstance(params, Mapping):
        raise TypeError(
            f"{who} takes an iterable of parameters, of pairs with names, or of groups, but got a "
            f"{type(params).__name__}; pass model.named_parameters(), or the dict's items()."
        )
    if isinstance(lr, str) or (callable(lr) and not isinstance(lr, Tensor)):
        raise TypeError(
            f"{who} takes a number or a 0-dim tensor as lr, but got {lr!r}; for a schedule use "
            f"{instead}, or an LR scheduler of torch."
        )


def check_iterable(who: str, params: Any) -> None:
    """Raise TypeError for parameters that cannot be iterated over."""
    if not isinstance(params, Iterable):
        raise TypeError(
            f"{who} takes parameters, but got {params!r}; pass model.parameters(), or "
            "model.named_parameters()."
        )


def of_model(
    who: str,
    params: Any,
    recipe: Recipe,
    hyper: dict[str, Any],
    wanted: Callable[[str, Any], Any] = lambda path, p: True,
) -> tuple[Any, dict[str, Any]]:
    """Parameters with their names and matrix views, if a model is passed: instead of the
    parameters, or as the `views` of a recipe. wanted: the parameters that must be described."""
    views = hyper.get("views")
    whole = isinstance(params, torch.nn.Module)
    model = params if whole else views
    takes = "views" in hyper or "views" in inspect.signature(recipe).parameters
    if not takes or not isinstance(model, torch.nn.Module):
        return params, hyper
    known = {} if views is None or isinstance(views, torch.nn.Module) else views
    views_of(who, known)
    given = [*model.named_parameters()] if whole else named_by(model, params)
    mine = {id(p) for group in given for _, p in pairs_in(group)}
    found = kernels_of(model, known, lambda path, p: id(p) in mine and wanted(path, p))
    there = set(map(id, model.parameters()))
    pairs = [pair for group in given for pair in pairs_in(group)]
    for name, p in pairs:
        if id(p) not in there:
            raise ValueError(
                f"views= got a model without a parameter {name!r} of shape {tuple(p.shape)}, which "
                f"{who} has; pass the model whose parameters these are."
            )
    return given, {**hyper, "views": _by_given_names(model, found, known, pairs)}


def _by_given_names(
    model: torch.nn.Module,
    found: dict[str, Any],
    known: Collection[str],
    pairs: Iterable[tuple[str, Tensor]],
) -> dict[str, Any]:
    """Views of a model also by the names with which parameters are passed, which may be paths of
    other parameters of the model. known: patterns of the user, which take precedence."""
    every = dict(model.named_parameters(remove_duplicate=False))
    paths = {id(p): path for path, p in model.named_parameters()}
    views, seen = dict(found), {}
    for name, p in pairs:
        path = name if every.get(name) is p else paths.get(id(p), name)
        own = found.get(path)
        if seen.setdefault(name, own) != own:
            raise ValueError(
                f"two parameters are called {name!r}, but the model has different matrix views for "
                "them; pass them by their names in the model, model.named_parameters()."
            )
        if name != path and name not in known:
            views.pop(name, None)
            views.update({} if own is None else {name: own})
    return views


def named_by(model: torch.nn.Module, given: Any) -> Any:
    """Parameters, or groups of such, with their names in a model, unless they have names; invalid
    values unchanged, for torch's errors."""
    paths = {id(p): path for path, p in model.named_parameters()}

    def with_name(x: Any) -> Any:
        if isinstance(x, Tensor):
            return paths.get(id(x), ""), x
        return with_names(x) if isinstance(x, dict) else x

    def with_names(group: dict[str, Any]) -> dict[str, Any]:
        params, names = group.get("params"), group.get("param_names")
        if names is not None or params is None or isinstance(params, set):
            return group
        params = [params] if isinstance(params, Tensor) else list(params)
        return {**group, "params": [with_name(x) for x in params]}

    if isinstance(given, dict):
        return with_names(given)
    return given if isinstance(given, (Tensor, set)) else [with_name(x) for x in given]


def pairs_in(group: Any) -> list[tuple[str, Tensor]]:
    """The names and parameters of a group, or of an entry of a list of parameters."""
    found = [group]
    if isinstance(group, dict):
        found = group.get("params", ())
        if "param_names" in group:
            found = list(zip(group["param_names"], found, strict=False))
    return [x for x in found if isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], Tensor)]


def with_kernels(group: Any) -> Any:
    """A parameter group whose `views` are a model, with the views of that model."""
    model = group.get("views") if isinstance(group, dict) else None
    if not isinstance(model, torch.nn.Module):
        return group
    group, found = named_by(model, group), kernels_of(model, {}, lambda path, p: False)
    return {**group, "views": _by_given_names(model, found, (), pairs_in(group))}


def recipe_defaults(recipe: Recipe, given: dict[str, Any]) -> dict[str, Any]:
    """A recipe's hyperparameters: the passed ones, and the recipe's defaults for the others."""
    if isinstance(recipe, type) and issubclass(recipe, torch.optim.Optimizer):
        raise TypeError(
            f"a recipe makes a transformation, but {recipe.__name__} makes an optimizer object; "
            "pass e.g. fo.adamw, or use the class itself."
        )
    parameters = inspect.signature(recipe).parameters.values()
    if any(p.kind is p.POSITIONAL_ONLY or p.kind is p.VAR_POSITIONAL for p in parameters):
        raise TypeError(
            "a recipe takes its hyperparameters by name, so it can have neither positional-only "
            "ones nor *args; name them, e.g. lambda lr: fo.adamw(lr)."
        )
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    of_parameters = [p.name for p in named if p.name in PARAMETERS and p.default is p.empty]
    if set(of_parameters) - set(given):
        raise TypeError(
            f"the recipe has an argument {of_parameters[0]}, but it does not get the parameters: a "
            "recipe takes hyperparameters and returns a transformation; pass e.g. fo.adamw, or "
            f"lambda lr: fo.adamw(lr), and lr=…. (A hyperparameter called {of_parameters[0]} needs "
            "a value, too.)"
        )
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


def warn_of_unread_lr(recipe: Recipe) -> None:
    """Warn if a plain Python function does not read its argument lr. `del lr` reads it."""
    code = getattr(recipe, "__code__", None)
    if code is None or hasattr(recipe, "__wrapped__") or "locals" in code.co_names:
        return
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    read = {*code.co_cellvars}
    for one in dis.get_instructions(code):
        if "LOAD_FAST" in one.opname or one.opname == "DELETE_FAST":
            read.update(one.argval if isinstance(one.argval, tuple) else (one.argval,))
    if "lr" in given and "lr" not in read:
        warn(
            "functional_optim: the recipe does not read its argument lr, so neither "
            "param_groups[i]['lr'] nor an LR scheduler changes the steps; pass it on, e.g. "
            "lambda lr: fo.adamw(lr), or leave it out."
        )


HOW = {
    "compile": Parameter("compile", Parameter.KEYWORD_ONLY, default=True, annotation="Compile"),
    "stored": Parameter("stored", Parameter.KEYWORD_ONLY, default=None, annotation="Stored | None"),
    "capturable": Parameter("capturable", Parameter.KEYWORD_ONLY, default=False, annotation="bool"),
}
"""The arguments for the execution of an algorithm."""


def constructor(
    owner: str, parameters: Iterable[Parameter], how: Iterable[str]
) -> Callable[..., None]:
    """The `__init__` of a class called `owner`: it passes its arguments to `_construct`, by name.

    parameters: all except those for execution. how: the names of these.
    """
    every = [*parameters, *[HOW[name] for name in how]]
    signature = inspect.Signature(sorted(every, key=lambda x: x.kind), return_annotation="None")

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{owner}.__init__() {error}") from None
        given.apply_defaults()
        self._construct(given.arguments)

    __init__.__qualname__ = f"{owner}.__init__"
    vars(__init__)["__signature__"] = signature
    return __init__
