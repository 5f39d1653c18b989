"""What a function is known by inside of a process."""

from __future__ import annotations

import dis
import functools
import itertools
import types
from numbers import Number
from typing import Any, NamedTuple

from torch import Tensor


def static_key(fn: Any) -> Any:
    """A hashable stand-in for a function: its code, and the constants that it closes over.

    A tensor is identified by the object: a rule that closes over one is refused when it is
    recorded.

    Args:
        fn: the function, or a constant.
    """
    return _key(fn, (), {})


def _key(fn: Any, above: tuple[int, ...], met: dict[int, int]) -> Any:
    """The key of a part.

    Args:
        fn: the part.
        above: ids of the containers that hold it, which may hold themselves.
        met: the functions that the key has described, by id: each is described once.
    """
    if isinstance(fn, types.FunctionType):
        if id(fn) in met:
            return (Keep, types.FunctionType, met[id(fn)])
        met[id(fn)] = len(met)
        cells = tuple(map(_content, fn.__closure__ or ()))
        constants = (cells, fn.__defaults__, fn.__kwdefaults__, vars(fn))
        own = [_key(x, above, met) if x else None for x in constants]
        read = [_key(x, above, met) for x in _globals_of(fn)]
        return (fn.__code__, Keep(fn.__globals__), *own, *read)
    if isinstance(fn, Tensor):
        return Keep(fn)
    if issubclass(type(fn), Number) and not issubclass(type(fn), int):
        return (type(fn), repr(fn))  # 0.0 and -0.0 are equal
    if id(fn) in above:
        return (Keep, above.index(id(fn)))
    inside = (*above, id(fn))
    if type(fn) is types.MethodType:
        return (types.MethodType, *[_key(x, inside, met) for x in (fn.__func__, fn.__self__)])
    if type(fn) is functools.partial:
        parts = (fn.func, fn.args, fn.keywords)
        return (functools.partial, *[_key(x, inside, met) for x in parts])
    if type(fn) is dict:
        return (dict, *[_key(pair, inside, met) for pair in fn.items()])
    if _is_record(fn):  # which a recipe may define at each call
        return (type, fn.__module__, fn.__qualname__, fn._fields, repr(fn._field_defaults))
    if type(fn) is list or isinstance(fn, tuple):
        return (type(fn), *[_key(x, inside, met) for x in fn])
    known = vars(fn).items() if hasattr(fn, "__dict__") and not _is_fixed(fn) else ()
    numbers = [(name, static_key(x)) for name, x in known if type(x) in PLAIN]
    return (type(fn), fn if _is_value(fn) else Keep(fn), *numbers)


def _is_value(x: Any) -> bool:
    """Whether objects that are equal to this one hold the same numbers. Those of other packages may
    compare a part of what they hold."""
    if type(x).__eq__ is not object.__eq__ and not _is_of(OWN, type(x).__module__):
        return False
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _is_record(x: Any) -> bool:
    """Whether x is a NamedTuple without methods."""
    return (
        isinstance(x, type)
        and x.__bases__ == (tuple,)
        and hasattr(x, "_fields")
        and all(name in RECORD or name in x._fields for name in vars(x))
    )


class _Record(NamedTuple):
    """A NamedTuple, to see which attributes all of them have."""

    field: int


RECORD = set(vars(_Record)) - {"field"}
"""The attributes of each NamedTuple."""

PLAIN = (bool, int, float, str)
"""The types of numbers and words that a rule may read from an object."""


def _is_fixed(x: Any) -> bool:
    """Whether an object is a module, a class, or a part of one of those packages that do not
    change."""
    if isinstance(x, (type, types.ModuleType)):
        return True
    return _is_of(OWN, getattr(x, "__module__", None))


OWN = ("functional_optim", "torch", "math", "builtins")
"""The packages whose functions read nothing that changes."""


def _globals_of(fn: types.FunctionType) -> list[Any]:
    """What a function and those inside of it read by name, which may be bound again."""
    if _is_fixed(fn):
        return []
    names = _names_in(fn.__code__)
    found = [fn.__globals__[name] for name in names if name in fn.__globals__]
    return [x for x in found if not _is_fixed(x)]


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names that a code reads from its globals, and those that the functions in it read."""
    own = [x.argval for x in dis.get_instructions(code) if x.opname in READS]
    inside = [_names_in(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return tuple(dict.fromkeys([*own, *itertools.chain(*inside)]))


READS = ("LOAD_GLOBAL", "LOAD_NAME")
"""The instructions that read a value by the name of a global. The same names are attributes in
others, as in `u.round()`."""


BUILT_IN = (
    types.BuiltinFunctionType, types.ClassMethodDescriptorType, types.MethodDescriptorType,
    types.MethodWrapperType, types.WrapperDescriptorType,
)  # fmt: skip
"""The types of functions of C, such as those of torch. Other callables of torch may hold code of
anybody: a module, a script, an operation that somebody has registered."""


def are_own(functions: tuple[Any, ...]) -> bool:
    """Whether functions, and what they close over, are of this package or of torch.

    A function belongs where its globals do: functools.wraps copies the `__module__` of another.
    """
    waiting: list[Any] = [*functions]
    met: set[int] = set()
    while waiting:
        fn = waiting.pop()
        if id(fn) in met:
            continue
        met.add(id(fn))
        if isinstance(fn, functools.partial):
            waiting += [fn.func, fn.args, fn.keywords]
        elif isinstance(fn, (tuple, list)):
            waiting += fn
        elif isinstance(fn, dict):
            waiting += fn.values()
        elif isinstance(fn, (types.MethodType, staticmethod)):
            waiting += [fn.__func__, getattr(fn, "__self__", None)]
        elif isinstance(fn, types.FunctionType):
            if not _is_of(OWN, fn.__globals__.get("__name__")):
                return False
            waiting += map(_content, fn.__closure__ or ())
        elif isinstance(fn, type):
            if not (_is_of(OWN, fn.__module__) or _is_record(fn)):
                return False
        elif callable(fn) and not isinstance(fn, BUILT_IN):
            if not _is_of(OWN[:1], type(fn).__module__):
                return False
            waiting += getattr(fn, "__dict__", {}).values()
    return True


def _is_of(packages: tuple[str, ...], module: Any) -> bool:
    """Whether the name of a module, or None, is one in these packages."""
    return str(module).partition(".")[0] in packages


class Keep:
    """Stands for an object itself, and holds it, so that its id stays its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keep) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that was never set, in a branch that is never taken
        return types.CellType
