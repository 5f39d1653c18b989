"""What the engine asks of a device that runs Triton kernels.

A driver for another kind of device is a class here, and an entry in `DRIVERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from functional_optim.kernels.triton_primitives import KernelText

Launcher = Callable[[int, Sequence[Any]], None]
"""A loaded kernel: called with the number of programs and the arguments, addresses as integers."""


class CaptureError(RuntimeError):
    """What cannot be done while a CUDA graph is captured."""


class Cuda:
    """NVIDIA's GPUs, through torch.cuda."""

    timed = True

    def missing(self) -> str | None:
        """What is missing for Triton kernels, for a warning; None if nothing is."""
        if torch.version.hip is not None:
            return "its kernels were never run on ROCm"
        try:
            import triton  # noqa: F401
        except ImportError:
            return "Triton is not installed"
        return None

    def name(self, device: torch.device) -> str:
        """The model of a device and the version of its compiler, by which kernels are kept."""
        import triton

        capability = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} {capability} triton {triton.__version__}"

    def load(self, text: KernelText, device: torch.device) -> Launcher:
        """A kernel, compiled for a device and loaded there."""
        from triton.backends.compiler import GPUTarget

        from functional_optim.kernels.triton_compiler import compiled

        major, minor = torch.cuda.get_device_capability(device)
        kernel = compiled(text, GPUTarget("cuda", 10 * major + minor, 32))

        def launch(programs: int, arguments: Sequence[Any]) -> None:
            here = torch.cuda.current_device() == device.index
            with nullcontext() if here else torch.cuda.device(device):
                kernel[programs, 1, 1](*arguments)

        return launch

    def threads(self, text: str, device: torch.device) -> Launcher | None:
        from functional_optim.kernels import nvrtc

        return nvrtc.loaded(text, device)

    def capturing(self) -> bool:
        """Whether operations of this thread are being recorded for replay."""
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)

    def seconds(self, run: Callable[[], object], device: torch.device) -> float:
        """How long the operations of a call take."""
        with torch.cuda.device(device):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            run()
            begin.record()
            for _ in range(TRIALS):
                run()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1000 / TRIALS


TRIALS = 5
"""Runs of which `seconds` takes the mean, after one that warms up."""

DRIVERS: dict[str, Cuda] = {"cuda": Cuda()}
"""The driver of each type of device that has one."""
