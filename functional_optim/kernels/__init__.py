"""From a rule to machine code.

`record` runs a rule on small tensors, and gives its operations as a `graph`; `ops` has what each
operation is; `cuts` says in which order a kernel computes them; `print_cpp` and `print_triton`
write it; `libraries` builds C++, keeps it on disk (`disk_cache`) and loads it (`launches`).
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import torch

from functional_optim.kernels import disk_cache, toolchain, watch
from functional_optim.kernels.callers import warn_once
from functional_optim.kernels.comparison import compare
from functional_optim.kernels.disk_cache import folder
from functional_optim.kernels.divided import Combination, DividedLaunch
from functional_optim.kernels.drivers import DRIVERS, CaptureError
from functional_optim.kernels.failures import (
    NoCompiler,
    cause,
    fallback,
    is_compile_error,
    is_limit,
    line,
    refusal,
    warn_failed,
)
from functional_optim.kernels.graph import Graph
from functional_optim.kernels.interrupts import held
from functional_optim.kernels.keys import static_key
from functional_optim.kernels.launches import READER, Launch, Launches, Together
from functional_optim.kernels.libraries import Native, count, library, prefetch
from functional_optim.kernels.node import NumberSource, RuleError, Unsuitable
from functional_optim.kernels.print_cpp import Source, source_of

__all__ = [
    "DRIVERS",
    "READER",
    "CaptureError",
    "Combination",
    "DividedLaunch",
    "Graph",
    "Launch",
    "Launches",
    "Native",
    "NoCompiler",
    "NumberSource",
    "RuleError",
    "Source",
    "Together",
    "Unsuitable",
    "capturing",
    "cause",
    "compare",
    "count",
    "fallback",
    "folder",
    "is_compile_error",
    "is_kept",
    "is_limit",
    "library",
    "line",
    "own_code",
    "prefetch",
    "refusal",
    "require_compiler",
    "source_of",
    "static_key",
    "warn_failed",
    "warn_once",
    "watcher",
]


def capturing() -> bool:
    """Whether operations on some device are being recorded for replay."""
    for driver in DRIVERS.values():  # noqa: SIM110  (in each step; a generator takes longer)
        if driver.capturing():
            return True
    return False


def watcher() -> Any:
    """The library that looks over objects, or None (see `watch`)."""
    return watch.module if READER else None


def is_kept(kernel: Native) -> bool:
    """Will the next process find this kernel?"""
    return disk_cache.find(kernel.name) is not None


def require_compiler(device: torch.device) -> None:
    """Go on only if what a device needs for torch's compiler is there, which is then imported.

    Ctrl-C waits for that import, which takes a second or two: a module that is left half-way stays
    so, and every later compilation of the process would fail.

    Raises:
        NoCompiler: if there is no C++ compiler that works, which the CPU needs.
    """
    if device.type == "cpu":
        toolchain.require()
    if not torch.compiler.is_compiling():
        held(torch.compiler.list_backends)  # the public function that imports it


def own_code(function: FunctionType) -> FunctionType:
    """A function with a code object that no other one has.

    torch.compile counts the graphs of a code object, and gives up after eight: functions that come
    out of one `def` would share them.
    """
    code = function.__code__.replace()
    own = (function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made = FunctionType(code, *own)
    functools.update_wrapper(made, function)
    return made
