"""The scalars that rules read in a step: their neighbours, all of them in one list, and the dtype
of tensors among them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core import modes
from functional_optim.kernels import ops

Numbers = tuple[Any, ...]
"""The scalars of a rule in a step: a plain tuple, the rule's own NamedTuple, or an `Own`."""


class Own(NamedTuple):
    """The scalars of a rule that does not act in every step, rounds stochastically, or runs others.

    which: above 0 if the rule acts; for a rule with several variants, the index of the active one,
    from 1. 0: update and slots are unchanged, behind a closed gate. One such number for each turn
    of a rule with turns; empty for a rule that always acts. key: of the random numbers of the step;
    empty if it rounds to nearest. values: the scalars that `update` reads; for a rule that runs
    others, a tuple of those of each.
    """

    which: tuple[Any, ...]
    key: tuple[Any, ...]
    values: Numbers


def tensor_of(x: Any) -> Tensor:
    """A tensor as it is; anything else as a tensor on the CPU, whatever the default device is."""
    if isinstance(x, Tensor):
        return x
    return torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None, device="cpu")


_records: dict[Any, Any] = {}


def record_of(name: str, fields: tuple[str, ...]) -> Any:
    """The NamedTuple of this name with these fields: one type, which the caches of recipes know."""
    if torch.compiler.is_compiling():
        return namedtuple(name, fields)
    if (name, fields) not in _records:
        _records[name, fields] = namedtuple(name, fields)
    return _records[name, fields]


def parts_of(own: Numbers) -> tuple[tuple[Any, ...], tuple[Any, ...], Numbers]:
    """The scalars of a rule as the parts of an `Own`, whether they are one or not."""
    return own if type(own) is Own else ((), (), own)


def in_turn(own: Numbers, turn: int) -> Numbers:
    """A rule's scalars for the tensors of a turn."""
    if type(own) is Own and len(own.which) > 1:
        return Own(own.which[turn : turn + 1], own.key, own.values)
    return own


def as_args(numbers: Numbers) -> Numbers:
    """The scalars of a rule as arguments: a NamedTuple is one, the entries of a tuple are
    several."""
    return numbers if type(numbers) is tuple else (numbers,)  # tracing `hasattr` is slow


def flat_numbers(numbers: Sequence[Numbers]) -> list[Any]:
    """All scalars of some rules in one list."""
    flat: list[Any] = []
    for own in numbers:
        flat += _inside(own) if type(own) is Own else own
    return flat


def _inside(own: tuple[Any, ...]) -> list[Any]:
    """The items of nested tuples."""
    flat: list[Any] = []
    for x in own:
        flat += _inside(x) if isinstance(x, tuple) else (x,)
    return flat


class Form(NamedTuple):
    """The structure of scalars.

    record: the type of their tuple. each: for each entry the form of a tuple, or the kind of a
    number: int or bool, object for a large int, float for all others. A tensor of a bool is a bool.
    """

    record: type
    each: tuple[Any, ...]


LARGE = 1 << 20
"""Bound of ints whose products of three fit into torch's 64 bits."""


def form_of(own: Numbers) -> Form:
    """The form of a rule's numbers."""
    return Form(type(own), tuple([float if type(x) is float else _kind(x) for x in own]))


def _kind(x: Any) -> Any:
    if isinstance(x, int):
        return type(x) if abs(x) < LARGE else object
    if isinstance(x, Tensor):
        return bool if x.dtype is torch.bool else float
    return form_of(x) if isinstance(x, tuple) else float


def kinds_of(forms: Sequence[Form]) -> list[type]:
    """The kind of each number, in the order of `flat_numbers`."""
    found: list[type] = []
    for form in forms:
        for kind in form.each:
            found += kinds_of([kind]) if type(kind) is Form else (kind,)
    return found


def with_forms(flat: Iterator[Any], forms: Sequence[Form]) -> list[Numbers]:
    """The inverse of `flat_numbers`."""
    found: list[Numbers] = []
    for record, each in forms:
        values: list[Any] = []
        for kind in each:
            values += with_forms(flat, [kind]) if type(kind) is Form else (next(flat),)
        found.append(tuple(values) if record is tuple else record(*values))
    return found


class StepNumber(Tensor):
    """A 0-dim float64 tensor that does not promote the dtype of other operands.

    Operations on it alone are in float64. Together with other tensors it has the dtype to which
    torch rounds a Python float there. A plain tensor of float64 would make a float64 tensor of a
    0-dim one, or of one of bools.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        flat = [y for x in (*args, *kwargs.values()) for y in (x if _is_list(x) else (x,))]
        others = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, cls)]
        if not others:
            return super().__torch_function__(func, types, args, kwargs)
        dtype = ops.number_beside(getattr(func, "__name__", ""), others)

        def read(x: Any) -> Any:
            if _is_list(x):
                return type(x)([read(y) for y in x])
            return _plain(Tensor.to, (x, dtype)) if isinstance(x, cls) and _is_wide(x) else x

        return _plain(func, tuple(map(read, args)), {key: read(x) for key, x in kwargs.items()})


def _plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """The result of a function of torch for tensors of this class as plain tensors."""
    return _OF_PARAMETERS(func, (), args, kwargs or {})


_OF_PARAMETERS: Any = torch.nn.Parameter.__torch_function__


def _is_wide(x: Tensor) -> bool:
    return _plain(_DTYPE, (x,)) is torch.float64


_DTYPE: Any = Tensor.dtype.__get__  # pyright: ignore[reportAttributeAccessIssue]


def _is_list(x: Any) -> bool:
    return type(x) in (list, tuple)


class StepFlag(StepNumber):
    """A 0-dim tensor of a bool that arithmetic takes for the number 0 or 1, as Python's is.

    With masks and as a condition it is a bool. A plain tensor of bools cannot be subtracted.

    bare: the plain tensor, unless torch.compile is tracing. Dispatch modes refuse other classes.
    """

    bare: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Tensor:
        """A plain 0-dim tensor of a bool as a flag."""
        found = x.as_subclass(cls)
        if not torch.compiler.is_compiling():
            found.bare = x
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name, traced = kwargs or {}, getattr(func, "__name__", ""), modes.traced()
        flat = [y for x in (*args, *kwargs.values()) for y in (x if _is_list(x) else (x,))]
        others = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, StepNumber)]
        dtype = None
        if not others and name in ARITHMETIC:
            dtype = torch.float64
        elif name in SUBTRACTION and any(x.dtype is not torch.bool for x in others):
            dtype = torch.int64

        def read(x: Any) -> Any:
            if _is_list(x):
                return type(x)([read(y) for y in x])
            if not isinstance(x, cls):
                return x
            x = _without_class(x)
            x = x if dtype is None else x.to(dtype)
            return x if traced else x.as_subclass(StepNumber)

        found = func(*map(read, args), **{key: read(x) for key, x in kwargs.items()})
        flag = not others and isinstance(found, Tensor) and found.dtype is torch.bool
        return cls.of(found) if flag else found


SUBTRACTION = frozenset(("sub", "subtract", "rsub", "__sub__", "__rsub__"))
"""Functions that refuse tensors of bools."""

ARITHMETIC = SUBTRACTION | {
    "abs", "add", "div", "divide", "float_power", "mul", "multiply", "neg", "negative", "pow",
    "rdiv", "true_divide", "__abs__", "__add__", "__mul__", "__neg__", "__pow__", "__radd__",
    "__rdiv__", "__rmul__", "__rpow__", "__rtruediv__", "__truediv__",
}  # fmt: skip
"""Functions that compute with bools of Python as with numbers."""


def flag_of(x: Any, device: torch.device | str) -> Tensor:
    """A bool among the scalars of a step as rules see it."""
    if not isinstance(x, Tensor):
        x = torch.full((), x, dtype=torch.bool, device=device)
    return StepFlag.of(x.to(device).reshape(()))


def _without_class(x: StepFlag) -> Tensor:
    """A flag as a plain tensor; torch.compile traces neither its attribute nor `_plain`."""
    if not torch.compiler.is_compiling():
        return x.bare
    return Tensor.__torch_function__(Tensor.detach, (), (x,))


def plain(x: Any) -> Any:
    """The return value of a rule, which may depend on scalars of the step only."""
    if type(x) is StepFlag:
        return _without_class(x)
    return _plain(Tensor.as_subclass, (x, Tensor)) if type(x) is StepNumber else x
