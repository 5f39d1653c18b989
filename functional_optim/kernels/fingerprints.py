"""What a kernel is known by: inside a process, and on disk from one process to the next."""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import time
import types
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

STABLE = (bool, int, float, complex, str, bytes, type(None), type(...))
"""Types whose values are told by their repr."""

LOADED = time.time()
"""When this package was imported: what is written to its source later is not what runs here."""

UNTOLD = {
    "__import__",
    "compile",
    "eval",
    "exec",
    "globals",
    "hash",
    "id",
    "locals",
    "open",
    "vars",
}
"""Builtins whose results depend on more than can be seen in the code."""

GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
"""Instructions that read a global variable."""


def static_key(fn: Any, above: tuple[int, ...] = ()) -> Any:
    """A hashable stand-in for a function: its code, and the constants that it closes over.

    Args:
        fn: the function, or a constant.
        above: ids of what is being described, for functions that call themselves.

    Raises:
        TypeError: if it closes over a tensor, whose value a kernel would freeze.
    """
    if isinstance(fn, Tensor):
        raise TypeError(
            "the update of a rule closes over a tensor, which a compiled kernel would freeze; "
            "return it from scalars instead, and take it as a number."
        )
    if isinstance(fn, float):
        return (type(fn), repr(fn))  # 0.0 and -0.0 are equal
    if id(fn) in above:
        return (_Keep, above.index(id(fn)))
    inside = (*above, id(fn))
    if isinstance(fn, types.FunctionType):
        cells = tuple(map(_content, fn.__closure__ or ()))
        constants = (cells, fn.__defaults__, fn.__kwdefaults__, vars(fn))
        own = [static_key(x, inside) if x else None for x in constants]
        return (fn.__code__, _Keep(fn.__globals__), *own)
    if type(fn) is types.MethodType:
        return (types.MethodType, *[static_key(x, inside) for x in (fn.__func__, fn.__self__)])
    if type(fn) is functools.partial:
        parts = (fn.func, fn.args, fn.keywords)
        return (functools.partial, *[static_key(x, inside) for x in parts])
    if type(fn) is dict:
        return (dict, *[static_key(pair, inside) for pair in fn.items()])
    if type(fn) is list or isinstance(fn, tuple):
        return (type(fn), *[static_key(x, inside) for x in fn])
    try:
        hash(fn)
    except TypeError:
        return (type(fn), _Keep(fn))
    return (type(fn), fn)


class _Keep:
    """Stands for an object itself, and holds it, so that its id stays its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keep) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that was never set, in a branch that is never taken
        return types.CellType


def fingerprint(*things: Any) -> str | None:
    """A digest of functions and constants that is the same in every process; None if there is none.

    A function counts with its bytecode, its constants, what it closes over and every function that
    it can reach by name. Whatever cannot be described completely has no fingerprint: its kernel is
    then compiled by each process for itself.
    """
    try:
        text = repr([_describe(thing, ()) for thing in things])
        return hashlib.sha256((own_source() + text).encode()).hexdigest()
    except (_Indescribable, RecursionError):
        return None


@functools.cache
def own_source() -> str:
    """A digest of this package's own source, which rules may call.

    Raises:
        _Indescribable: if it is not there, or has been written to since it was imported.
    """
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    paths = [
        Path(folder, name)
        for folder, _, names in os.walk(root, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]
    for path in sorted(paths):
        found = path.stat()
        if max(found.st_mtime, found.st_ctime) > LOADED:
            raise _Indescribable
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    if not paths:
        raise _Indescribable
    return digest.hexdigest()


class _Indescribable(Exception):
    """Something that may mean another thing in the next process."""


def _describe(x: Any, above: tuple[int, ...]) -> Any:
    if type(x) in STABLE:
        return (type(x).__name__, repr(x))
    if isinstance(x, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(x)
    if id(x) in above:
        return ("itself", above.index(id(x)))
    inside = (*above, id(x))
    if isinstance(x, types.CodeType):
        return _describe_code(x, inside)
    if isinstance(x, types.FunctionType):
        return _describe_function(x, inside)
    if type(x) is types.MethodType:
        return ("method", _describe(x.__func__, inside), _describe(x.__self__, inside))
    if type(x) is functools.partial:
        parts = (x.func, x.args, x.keywords)
        return ("partial", [_describe(part, inside) for part in parts])
    if type(x) in (tuple, list):
        return (type(x).__name__, [_describe(item, inside) for item in x])
    if type(x) in (set, frozenset):
        return ("set", sorted(repr(_describe(item, inside)) for item in x))
    if type(x) is dict:
        return ("dict", [(_describe(k, inside), _describe(v, inside)) for k, v in x.items()])
    if isinstance(x, type):
        return _describe_class(x, inside)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return (_describe_class(type(x), inside), [_describe(item, inside) for item in x])
    if type(x) is types.ModuleType and _is_known(x.__name__):
        return ("module", x.__name__)
    if isinstance(x, (types.BuiltinFunctionType, types.MethodDescriptorType)):
        return _describe_builtin(x, inside)
    raise _Indescribable


def _describe_builtin(x: Any, above: tuple[int, ...]) -> Any:
    owner = getattr(x, "__self__", None)  # a module, or what a method is bound to
    home = getattr(x, "__objclass__", x).__module__
    if owner is not None and not isinstance(owner, types.ModuleType):
        return ("bound", _describe(owner, above), x.__qualname__)
    if home is None or not _is_known(home):
        raise _Indescribable
    return ("builtin", home, x.__qualname__)


class _Record(NamedTuple):
    """What every NamedTuple has."""


WRITTEN_BY_PYTHON = {
    *vars(_Record),
    "__annotate__",
    "__annotate_func__",
    "__annotations__",
    "__annotations_cache__",
    "__classcell__",
    "__firstlineno__",
    "__orig_bases__",
    "__static_attributes__",
}
"""Entries of a NamedTuple's class that say no more than its fields."""


def _describe_class(x: type, above: tuple[int, ...]) -> Any:
    """A class of a known module by its name, a NamedTuple by its fields, defaults and methods."""
    if _is_known(x.__module__):
        return ("class", x.__module__, x.__qualname__)
    fields: tuple[str, ...] | None = getattr(x, "_fields", None)
    if x.__bases__ != (tuple,) or fields is None:
        raise _Indescribable
    own = {k: v for k, v in vars(x).items() if k not in WRITTEN_BY_PYTHON and k not in fields}
    defaults = vars(x)["_field_defaults"]
    return ("record", fields, [(k, _describe(v, above)) for k, v in (own | defaults).items()])


def _describe_function(f: types.FunctionType, above: tuple[int, ...]) -> Any:
    home = f.__globals__.get("__name__", "")
    if f.__closure__ is None and "<locals>" not in f.__qualname__ and _is_known(home):
        return ("function", home, f.__qualname__)
    cells = [_describe(_content(cell), above) for cell in f.__closure__ or ()]
    names = [name for name in _global_names(f.__code__) if name in f.__globals__]
    named = [(name, _describe(f.__globals__[name], above)) for name in names]
    own = [_describe(x, above) for x in (f.__defaults__, f.__kwdefaults__, vars(f))]
    return (_describe_code(f.__code__, above), cells, named, own)


def _describe_code(code: types.CodeType, above: tuple[int, ...]) -> Any:
    if "ops" in code.co_names:  # torch.ops.anybodys
        raise _Indescribable
    constants = [_describe(x, above) for x in code.co_consts]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_kwonlyargcount, code.co_flags
    return (code.co_code, code.co_exceptiontable, constants, names, counts)


@functools.cache
def _global_names(code: types.CodeType) -> list[str]:
    """The global variables that a function reads, and the functions inside it."""
    found = set()
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME" or (step.opname in GLOBAL and step.argval in UNTOLD):
            raise _Indescribable
        if step.opname in GLOBAL:
            found.add(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(_global_names(constant))
    return sorted(found)


def _is_known(module: str) -> bool:
    """Is a module's code told by the versions of Python, of torch, or of this package?"""
    return module.split(".")[0] in (
        "torch",
        "functional_optim",
        "builtins",
        "math",
        "operator",
        "functools",
        "typing",
        "_operator",
        "_functools",
    )
