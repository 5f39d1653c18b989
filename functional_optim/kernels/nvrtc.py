"""Kernels in CUDA C++: compiled by NVRTC, kept on disk, and launched with integers.

`cuda.bindings`, NVIDIA's package, comes with torch for CUDA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from functional_optim.kernels import disk_cache
from functional_optim.kernels.node import Unsuitable
from functional_optim.kernels.print_cpp import SYMBOL

if TYPE_CHECKING:
    from functional_optim.kernels.drivers import Launcher

OPTIONS = (
    "--std=c++17",
    "--fmad=false",
    "--device-as-default-execution-space",
    "--maxrregcount=128",
)
"""Products and sums are rounded as the text says. With half of the registers for a thread, bounded
minima of 16 parameters take three quarters of the time, and small problems up to 1.1 of it."""

BLOCK = 64
"""Threads of a block."""

LARGEST = 24 * 1024
"""Bytes on the stack of a thread. A device reserves them for all threads that it can run."""


def loaded(text: str, device: torch.device) -> Launcher | None:
    """The function `SYMBOL` of a text, loaded on a device; None without `cuda.bindings`.

    Raises:
        Unsuitable: if a thread needs more memory than a device has for all.
        RuntimeError: if NVRTC or the driver fails.
    """
    try:
        driver: Any = import_module("cuda.bindings.driver")
    except ImportError:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    code = compiled(text, f"sm_{major}{minor}")
    if code is None:
        return None
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the context is this thread's
        module = _checked(driver.cuModuleLoadData(code))
        function = _checked(driver.cuModuleGetFunction(module, SYMBOL.encode()))
        stack = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
        if _checked(driver.cuFuncGetAttribute(stack, function)) > LARGEST:
            _checked(driver.cuModuleUnload(module))
            raise Unsuitable("values that do not fit a thread's stack")

    def launch(threads: int, arguments: Sequence[int]) -> None:
        given = (tuple(arguments), (ctypes.c_int64,) * len(arguments))
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream().cuda_stream
            blocks = (-(-threads // BLOCK), 1, 1)
            _checked(driver.cuLaunchKernel(function, *blocks, BLOCK, 1, 1, 0, stream, given, 0))

    return launch


def compiled(text: str, architecture: str) -> bytes | None:
    """The machine code of a text for an architecture such as "sm_90"; None without NVRTC."""
    try:
        nvrtc: Any = import_module("cuda.bindings.nvrtc")
        version = _checked(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError):  # the package, or the library that it loads
        return None
    options = (*OPTIONS, f"--gpu-architecture={architecture}")
    name = disk_cache.name_of(text, *options, repr(version), suffix=".cubin")
    with disk_cache.build_lock(name):
        code = disk_cache.read(name)
        if code is None:
            code = _made(nvrtc, text, options)
            disk_cache.keep(name, code)
    return code


def _made(nvrtc: Any, text: str, options: Sequence[str]) -> bytes:
    program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), b"lanes.cu", 0, [], []))
    try:
        given = [x.encode() for x in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        if int(status):
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"NVRTC failed ({status.name}): {log.decode(errors='replace')}")
        code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(code)


def _checked(found: tuple[Any, ...]) -> Any:
    """The results of a call after its status.

    Raises:
        RuntimeError: if that is not success.
    """
    status, *rest = found
    if int(status):
        raise RuntimeError(f"{type(status).__name__}: {status.name}")
    return rest[0] if len(rest) == 1 else tuple(rest)
