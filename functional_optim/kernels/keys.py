"""What a kernel is known by: inside a process, and on disk from one process to the next."""

from __future__ import annotations

import builtins
import functools
import hashlib
import os
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Stable = (bool, int, float, complex, str, bytes, type(None), type(...))


def static_key(fn: Any) -> Any:
    """A hashable stand-in for a function: its code, and the constants that it closes over.

    Raises:
        TypeError: if it closes over a tensor, whose value a kernel would freeze.
    """
    if isinstance(fn, types.FunctionType):
        cells = [cell.cell_contents for cell in fn.__closure__ or ()]
        named = tuple(sorted((fn.__kwdefaults__ or {}).items()))
        constants = [static_key(x) for x in (*cells, fn.__defaults__, named)]
        return (fn.__code__, *constants)
    if isinstance(fn, Tensor):
        raise TypeError(
            "the update of a rule closes over a tensor, which a compiled kernel would freeze; "
            "return it from scalars instead, and take it as a number."
        )
    if isinstance(fn, tuple):
        return (type(fn), *[static_key(x) for x in fn])
    try:
        hash(fn)
    except TypeError:
        return (type(fn), id(fn), _Keep(fn))
    return (type(fn), fn)


class _Keep:
    """Holds an unhashable constant, so that its id stays its own while a kernel's key names it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keep) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def fingerprint(*things: Any) -> str | None:
    """A digest of functions and constants that is the same in every process; None if there is none.

    A function counts with its bytecode, its constants, what it closes over and every function that
    it can reach by name. Whatever cannot be described completely has no fingerprint: its kernel is
    then compiled by each process for itself.
    """
    try:
        text = repr([_describe(thing, ()) for thing in things])
    except _Indescribable:
        return None
    return hashlib.sha256((library() + text).encode()).hexdigest()


@functools.cache
def library() -> str:
    """A digest of this package's own source, which rules may call."""
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    for folder, folders, files in os.walk(root, followlinks=True):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder, name)
                digest.update(path.relative_to(root).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


class _Indescribable(Exception):
    """Something that may mean another thing in the next process."""


def _describe(x: Any, above: tuple[int, ...]) -> Any:
    if isinstance(x, Stable):
        return (type(x).__name__, repr(x))
    if isinstance(x, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(x)
    if isinstance(x, types.CodeType):
        return _describe_code(x, above)
    if isinstance(x, types.FunctionType):
        return _describe_function(x, above)
    if type(x) in (tuple, list):
        return (type(x).__name__, [_describe(item, above) for item in x])
    if isinstance(x, (set, frozenset)):
        return ("set", sorted(repr(_describe(item, above)) for item in x))
    if type(x) is dict:
        return ("dict", [(_describe(k, above), _describe(v, above)) for k, v in x.items()])
    if isinstance(x, types.ModuleType):
        if _is_known(x.__name__):
            return ("module", x.__name__)
    elif isinstance(x, type):
        return _describe_class(x)
    elif isinstance(x, tuple) and hasattr(x, "_fields"):
        return (_describe_class(type(x)), [_describe(item, above) for item in x])
    elif hasattr(x, "__qualname__") and _is_known(getattr(x, "__module__", None) or "builtins"):
        return ("builtin", getattr(x, "__module__", None), x.__qualname__)
    raise _Indescribable


def _describe_class(x: type) -> Any:
    if _is_known(x.__module__):
        return ("class", x.__module__, x.__qualname__)
    if issubclass(x, tuple) and hasattr(x, "_fields"):
        return ("record", x._fields)
    raise _Indescribable


def _describe_function(f: types.FunctionType, above: tuple[int, ...]) -> Any:
    if id(f) in above:
        return ("itself", above.index(id(f)))
    if f.__closure__ is None and _is_known(f.__module__):
        return ("function", f.__module__, f.__qualname__)
    above = (*above, id(f))
    cells = [_describe(cell.cell_contents, above) for cell in f.__closure__ or ()]
    named = [
        (name, _describe(f.__globals__[name], above))
        for name in sorted(_names(f.__code__))
        if name in f.__globals__ and not hasattr(builtins, name)
    ]
    defaults = _describe(f.__defaults__, above), _describe(f.__kwdefaults__, above)
    return (_describe_code(f.__code__, above), cells, named, defaults)


def _describe_code(code: types.CodeType, above: tuple[int, ...]) -> Any:
    constants = [_describe(x, above) for x in code.co_consts]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_kwonlyargcount, code.co_flags
    return (code.co_code, code.co_exceptiontable, constants, names, counts)


def _names(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


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
