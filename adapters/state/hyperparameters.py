"""The hyperparameters of a parameter group: detects changes, and replaces values without building a
new transformation.

A recipe is a function of hyperparameters, so it would have to be called again whenever a learning
rate changes. Instead it is called once with a placeholder (`numeric.Placeholder`) for each number
that has changed. If the result differs from a plain one only where rules read these numbers, it is
used for all later numbers.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Collection
from operator import is_not
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor

from functional_optim.adapters.state.recipes import ByReference
from functional_optim.core.base import GradientTransformation
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.rule import Rule
from functional_optim.numeric import Placeholder

PARAMS = ("params", "param_names")
"""The keys of a group that are not hyperparameters."""

PLAIN_NUMBERS = (float, int, bool)


def host_values(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters, those in CPU tensors as Python numbers."""
    return {key: _host(value) for key, value in group.items() if key not in PARAMS}


def constants(group: dict[str, Any]) -> dict[str, Any] | None:
    """A group's entries, if none of them can change in place."""
    values = [value for key, value in group.items() if key not in PARAMS]
    parts = [x for value in values if isinstance(value, tuple) for x in value]
    return None if any(isinstance(x, (Tensor, list, dict)) for x in values + parts) else dict(group)


def _host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else value
    if isinstance(value, (tuple, list)):
        parts = tuple([_host(x) for x in value])
        if isinstance(value, list) or type(value) is tuple:  # a list may be edited in place
            return parts
        if any(map(is_not, parts, value)):
            return getattr(value, "_make", tuple)(parts)
    return value  # a transformation is a NamedTuple, too


def changed_values(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new hyperparameters that differ from the old; all, if they have other names.

    Tensors on other devices always do: their values may change in place.
    """
    if old.keys() != new.keys():
        return new
    return {key: x for key, x in new.items() if not _equal(old[key], x)}


def _equal(x: Any, y: Any) -> bool:
    if x is y:
        return not isinstance(x, Tensor)  # its value may have changed in place
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return False
    if isinstance(x, tuple) and type(x) is type(y):
        return len(x) == len(y) and all(_equal(a, b) for a, b in zip(x, y, strict=True))
    return type(x) is type(y) and bool(x == y)  # 0.1 equals numpy's float32(0.1), and 1 True


PACKAGE = "functional_optim."

Make = Callable[[dict[str, Any]], GradientTransformation]
"""A recipe, as a function of a group's hyperparameters."""


class Placeholders:
    """The hyperparameters of a group, replaced where its transformation reads them.

    recipe: the functions that build a transformation; nothing is replaced if they might check the
    class of a number.
    """

    def __init__(self, *recipe: Any) -> None:
        self.recipe = recipe
        self.known: dict[str, Any] = {}
        self.unfit: set[str] = set()

    def take(self, changed: dict[str, Any]) -> bool:
        """Replace numbers that have changed; return False, without changes, if that is not
        possible."""
        for key, x in changed.items():
            if key not in self.known or not _suits(self.known[key], x):
                return False
        for key, x in changed.items():
            for place, number in zip(_each(self.known[key]), _each(x), strict=True):
                place.now = number
        return True

    def transform(
        self, make: Make, group: dict[str, Any], changed: Collection[str]
    ) -> GradientTransformation:
        """The transformation of a group, whose numbers `take` can replace if possible.

        changed: the keys of hyperparameters that have changed since the last step.
        """
        tx = make(group)
        keys = [key for key in {*self.known, *changed} if _is_number(group.get(key))]
        self.known = {}
        if not keys or not self.unfit.isdisjoint(changed) or not isinstance(tx, Leafwise):
            return tx
        known = {key: _placeholder(group[key]) for key in keys}
        if not any(map(asks_class, self.recipe)):
            try:
                found = make({**group, **known})
            except Exception:
                found = None
            alike = isinstance(found, Leafwise) and _alike(tx.placements, found.placements)
            every = [x for places in known.values() for x in _each(places)]
            if found is not None and alike and not any(x.refused for x in every):
                self.known = known
                for x in every:
                    x.readable = True
                return found
        self.unfit.update(changed)
        return tx


def _is_number(x: Any) -> bool:
    """Whether a hyperparameter is a Python number, or a tuple of these."""
    return all(type(y) in (float, int) for y in _each(x))


def _placeholder(x: Any) -> Any:
    return tuple(map(Placeholder, x)) if type(x) is tuple else Placeholder(x)


def _each(x: Any) -> tuple[Any, ...]:
    return x if type(x) is tuple else (x,)


def _suits(places: Any, x: Any) -> bool:
    """Whether placeholders can take a hyperparameter."""
    if type(places) is not tuple or type(x) is not tuple:
        return type(places) is Placeholder and places.suits(x)
    return len(x) == len(places) and all(map(Placeholder.suits, places, x))


def _alike(a: Any, b: Any, above: Collection[tuple[int, int]] = (), *, read: bool = False) -> bool:
    """Whether two objects are the same except for placeholders in the second.

    above: the pairs that are being compared. read: whether a rule of this package contains the
    object, and so reads a number with `numeric.at`.
    """
    kind = type(b)
    if kind is Placeholder:
        return read and b.now is a
    if a is b or (id(a), id(b)) in above:
        return True
    if type(a) is not kind:
        return False
    inside = {*above, (id(a), id(b))}
    if kind in (float, int, str):
        return repr(a) == repr(b)
    if kind is FunctionType:
        own = _is_own(b) and not _home(b).startswith(PACKAGE + "schedules.")
        given, other = [(f.__defaults__, f.__kwdefaults__) for f in (a, b)]
        same = a.__code__ is b.__code__ and a.__globals__ is b.__globals__
        return (
            same and _alike(given, other, inside) and _alike(_held(a), _held(b), inside, read=own)
        )
    if kind is Rule:
        x, y = [(*z._replace(hyper=(), reads=()), z.reads.extra, z.reads.plain) for z in (a, b)]
        mine, other = [(z.hyper, z.reads.hyper) for z in (a, b)]
        return _alike(x, y, inside) and _alike(mine, other, inside, read=True)
    if kind is list or isinstance(b, tuple):
        read = read and kind in (list, tuple)
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(_alike(x, y, inside, read=read) for x, y in pairs)
    if kind is dict:
        return list(a) == list(b) and _alike([*a.values()], [*b.values()], inside, read=read)
    if _is_own(kind) and hasattr(b, "__dict__"):
        return _alike(vars(a), vars(b), inside)
    return False


def _is_own(x: Any) -> bool:
    """Whether a function or class belongs to this package."""
    return _home(x).startswith(PACKAGE)


def _home(x: Any) -> str:
    return x.__globals__.get("__name__", "") if type(x) is FunctionType else x.__module__


def _held(f: FunctionType) -> tuple[Any, ...]:
    """The closure of a function; a variable that was never set is represented by its cell."""
    return tuple([_content(cell) for cell in f.__closure__ or ()])


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return cell


ASKS = {"type", "isinstance", "issubclass", "__class__"}
"""Functions that check the class of a number, besides `match`."""


def asks_class(f: Any, home: Any = None, seen: set[Any] | None = None) -> bool:
    """Whether a recipe might check the class of a number, which a placeholder does not have.

    It and the functions and methods that it can call by name are searched for such checks.

    home: the object or class that it is a method of. seen: functions that were searched.
    """
    seen = set() if seen is None else seen
    f = f.call if type(f) is ByReference else f
    f = f.func if type(f) is functools.partial else f
    home, f = getattr(f, "__self__", home), _function(f)
    if type(f) is not FunctionType:
        return True
    if _is_own(f) or f in seen:
        return False
    seen.add(f)
    names = _names(f.__code__)
    read = [
        home,
        vars(f).get("__wrapped__"),
        *_held(f),
        *[f.__globals__.get(name) for name in names],
    ]
    found = [(x, None) for x in read]
    found += [(y, x) for x in read if type(x) is not FunctionType for y in _parts(x, names)]
    functions = [(g, x) for y, x in found if type(g := _function(y)) is FunctionType]
    return not ASKS.isdisjoint(names) or any(asks_class(g, x, seen) for g, x in functions)


def _function(x: Any) -> Any:
    """The function in Python that a call of x runs, behind decorators of Python's own."""
    if isinstance(x, (MethodType, staticmethod, classmethod)):
        return _function(x.__func__)
    if isinstance(x, CACHED):
        return _function(x.__wrapped__)
    if isinstance(x, functools.partial):
        return _function(x.func)
    return x.fget if isinstance(x, property) else x


def _parts(x: Any, names: Collection[str]) -> list[Any]:
    """What an object, a class or a module has under these names."""
    if x is None or (_is_own(x) if isinstance(x, type) else _is_own(type(x))):
        return []
    called = CALLED if isinstance(x, type) else ("__call__",)
    return [inspect.getattr_static(x, name, None) for name in (*names, *called)]


CALLED = ("__init__", "__new__", "__post_init__")
"""What a call of a class runs."""

CACHED = type(functools.cache(len))
"""The class of functions that remember results."""


def _names(code: CodeType) -> set[str]:
    """The global names and attributes that code reads, including nested functions."""
    inner = [_names(x) for x in code.co_consts if isinstance(x, CodeType)]
    matches = {"isinstance"} if dis.opmap["MATCH_CLASS"] in code.co_code[::2] else set[str]()
    return {*code.co_names, *matches}.union(*inner)
