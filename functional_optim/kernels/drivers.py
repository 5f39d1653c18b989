"""What the engine asks of a device that runs Triton kernels.

A driver for another kind of device is a class here, and an entry in `DRIVERS`.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

Launcher = Callable[[int, Sequence[Any]], None]
"""A loaded kernel: called with the number of programs and the arguments, addresses as integers."""


class Driver(Protocol):
    """What a kind of device can do."""

    def missing(self) -> str | None:
        """What is missing for Triton kernels, for a warning; None if nothing is."""
        ...

    def target(self, device: torch.device) -> Any:
        """What kernels for a device are compiled for (a `GPUTarget`)."""
        ...

    def name(self, device: torch.device) -> str:
        """The model of a device, by which measured configurations are kept."""
        ...

    def loaded(self, compiled: Any, device: torch.device) -> Launcher:
        """A compiled kernel, which is from now on this device's."""
        ...

    def capturing(self) -> bool:
        """Whether operations of this thread are being recorded for replay."""
        ...

    def pinned(self, size: int) -> Tensor:
        """Memory of the host for so many integers, which is copied to a device without waiting."""
        ...

    def seconds(self, run: Callable[[], None], device: torch.device) -> float | None:
        """How long the operations of a call take; None where that cannot be measured."""
        ...


class Cuda:
    """NVIDIA's cards, through torch.cuda."""

    def missing(self) -> str | None:
        if torch.version.hip is not None:
            return "its kernels were never run on ROCm"
        try:
            import triton  # noqa: F401
        except ImportError:
            return "Triton is not installed"
        return None

    def target(self, device: torch.device) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = torch.cuda.get_device_capability(device)
        return GPUTarget("cuda", 10 * major + minor, 32)

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def loaded(self, compiled: Any, device: torch.device) -> Launcher:
        def launch(programs: int, arguments: Sequence[Any]) -> None:
            here = torch.cuda.current_device() == device.index
            with nullcontext() if here else torch.cuda.device(device):
                compiled[programs, 1, 1](*arguments)

        return launch

    def capturing(self) -> bool:
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)

    def seconds(self, run: Callable[[], None], device: torch.device) -> float | None:
        with torch.cuda.device(device):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            run()
            begin.record()
            for _ in range(TRIALS):
                run()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1000 / TRIALS


def uploaded(here: Tensor, values: array.array[int], device: torch.device) -> Tensor:
    """Integers as a tensor on a device, by way of pinned memory that holds nothing else until the
    copy is done."""
    here.copy_(torch.tensor(values, dtype=torch.int64, device="cpu"))
    return here.to(device, non_blocking=True)


TRIALS = 5
"""Runs of which `seconds` takes the mean, after one that warms up."""

DRIVERS: dict[str, Driver] = {"cuda": Cuda()}
"""The driver of each type of device that has one."""
