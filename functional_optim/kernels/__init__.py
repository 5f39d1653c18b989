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
from functional_optim.kernels.callers import warn_once as warn_once
from functional_optim.kernels.comparison import compare as compare
from functional_optim.kernels.disk_cache import folder as folder
from functional_optim.kernels.divided import Combination as Combination
from functional_optim.kernels.divided import DividedLaunch as DividedLaunch
from functional_optim.kernels.divided import Passes as Passes
from functional_optim.kernels.drivers import DRIVERS as DRIVERS
from functional_optim.kernels.drivers import CaptureError as CaptureError
from functional_optim.kernels.failures import NoCompiler as NoCompiler
from functional_optim.kernels.failures import cause as cause
from functional_optim.kernels.failures import fallback as fallback
from functional_optim.kernels.failures import is_compile_error as is_compile_error
from functional_optim.kernels.failures import is_limit as is_limit
from functional_optim.kernels.failures import line as line
from functional_optim.kernels.failures import refusal as refusal
from functional_optim.kernels.failures import warn_failed as warn_failed
from functional_optim.kernels.interrupts import held
from functional_optim.kernels.keys import static_key as static_key
from functional_optim.kernels.launches import READER as READER
from functional_optim.kernels.launches import Launch as Launch
from functional_optim.kernels.launches import Launches as Launches
from functional_optim.kernels.launches import Together as Together
from functional_optim.kernels.libraries import Native as Native
from functional_optim.kernels.libraries import count as count
from functional_optim.kernels.libraries import library as library
from functional_optim.kernels.libraries import prefetch as prefetch
from functional_optim.kernels.node import Unsuitable as Unsuitable
from functional_optim.kernels.print_cpp import Source as Source
from functional_optim.kernels.print_cpp import source_of as source_of


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
