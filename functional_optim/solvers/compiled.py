"""Evaluations compiled with torch.compile, kept for the functions that they call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from functional_optim import kernels, tree
from functional_optim.core import modes

KEPT = 16
"""Number of cached graphs, and of libraries, least recently used first."""
QUICK = {
    "compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True,
    "emulate_precision_casts": True,
}  # fmt: skip
"""Options of Inductor. All but the last halve the time of a first compilation: they omit headers,
autotuning and processes, which pay off from the tenth kernel on. The last keeps the rounding of x
to half types."""

BLOCK, DEVICE_BLOCK = 512, 16_384
"""Problems in a compiled evaluation, on the CPU and elsewhere: one graph serves any number of
them."""


class CompiledCall:
    """A function that torch.compile compiles at the first call. broken: it could not."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.compiled = _compiled(function)
        self.broken = False


_steps: OrderedDict[Any, CompiledCall] = OrderedDict()


class Same:
    """A key that is equal for one object alone, whatever its own equality says."""

    def __init__(self, known: Any) -> None:
        self.known = known

    def __hash__(self) -> int:
        return id(self.known)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.known is self.known


def key_of(function: Any) -> Any:
    """What a function is known by: itself, since equal ones may do different things; a method, of
    which each access makes another one, by its object."""
    if isinstance(function, MethodType):
        return Same(function.__self__), Same(function.__func__)
    return Same(function)


def in_blocks(key: Any, evaluate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A function of points, or states, and the data of their problems, trees of tensors (B, ...),
    as a graph for blocks of them. key: that of the cached graph. It runs eagerly where torch cannot
    compile it, with a warning, and in transforms of torch.func, which support no graphs."""
    graph = _kept(key, evaluate)

    def blocks(x: Any, own: Any) -> Any:
        first = tree.leaves(x)[0]
        count, block = len(first), BLOCK if first.device.type == "cpu" else DEVICE_BLOCK
        more = -count % block
        x, own = tree.map(lambda a: torch.cat([a, a[:1].expand(more, *a.shape[1:])]), (x, own))
        parts = [
            graph.compiled(*tree.map(lambda a, i=i: a[i : i + block], (x, own)))
            for i in range(0, count, block)
        ]
        return tree.map(lambda *same: torch.cat(same)[:count], *parts)

    def whole(x: Any, own: Any) -> Any:
        if graph.broken or modes.transformed():
            return evaluate(x, own)
        try:
            return blocks(x, own)
        except Exception as error:
            if not kernels.is_compile_error(error):
                raise
            failure, graph.broken = error, True
        found = evaluate(x, own)  # an error of the function itself is raised here
        kernels.warn_failed("torch.compile failed", failure, "; the solver runs eagerly")
        return found

    return whole


def _kept(key: Any, function: Callable[..., Any]) -> CompiledCall:
    """A function's graph, made at the first call with this key."""
    if key not in _steps:
        _steps[key] = CompiledCall(function)
    used(_steps, key)
    return _steps[key]


def used(cache: OrderedDict[Any, Any], key: Any) -> None:
    """Note that an entry was used; the least recently used ones are dropped."""
    cache.move_to_end(key)
    while len(cache) > KEPT:
        cache.popitem(last=False)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    def own(*args: Any) -> Any:
        return function(*args)

    own.__code__ = own.__code__.replace()  # torch bounds the number of graphs of a code object
    try:
        return torch.compile(own, fullgraph=True, dynamic=False, options=QUICK)
    except RuntimeError:  # a version of torch without one of these options
        return torch.compile(own, fullgraph=True, dynamic=False)
