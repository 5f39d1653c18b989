"""What the checks ask of a kind of device: waits, captures, times and memory."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

Step = Callable[[], object]


class NotHere(Exception):
    """What a device cannot be asked, with the reason: the check is skipped."""


class Platform:
    """A device that can only be computed on, as the CPU in a dry run.

    device: the device, with its index where there are several. captures: whether steps can be
    captured and replayed. timed: whether times measured on it are those that the bars are about.
    """

    captures = False
    timed = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def not_here(self) -> NotHere:
        """The reason why a check is skipped that needs more than this."""
        return NotHere(f"not on this device ({self.device})")

    def described(self) -> dict[str, Any]:
        """The model and what drives it."""
        return {"name": str(self.device)}

    def devices(self) -> list[torch.device]:
        """All devices of this kind, this one first."""
        return [self.device]

    def synchronize(self) -> None:
        """Wait until all is done; raises if something has gone wrong there."""

    def no_waits(self) -> AbstractContextManager[None]:
        """Inside, an operation for which the host waits raises an error."""
        raise self.not_here()

    def busy(self) -> Callable[[], bool]:
        """Keep the device at work for a while. What is returned says whether it is done."""
        raise self.not_here()

    def launched(self, step: Step) -> list[str]:
        """The names of all kernels that a step launches, as far as the device tells."""
        raise self.not_here()

    def captured(self, step: Step) -> Step:
        """Make `WARM_UPS` steps and capture the next one: returns its replay."""
        raise self.not_here()

    def seconds(self, run: Step) -> float:
        """How long the device needs for the operations of a call."""
        self.synchronize()
        begin = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - begin

    def free_memory(self) -> int:
        """Bytes that are free."""
        raise self.not_here()

    def extra_memory(self, run: Step) -> int:
        """The most bytes that a call needs for a while beyond those that are taken before it."""
        raise self.not_here()


WARM_UPS = 3
"""Steps that are made before one is captured."""


class CudaPlatform(Platform):
    """A GPU, through torch.cuda."""

    captures = True
    timed = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.cuda.set_device(device)

    def described(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory,
            "processors": properties.multi_processor_count,
            "devices": torch.cuda.device_count(),
            "runtime": torch.version.cuda or torch.version.hip,
        }

    def devices(self) -> list[torch.device]:
        every = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        return sorted(every, key=lambda x: x != self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        self.synchronize()
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():  # that the mode does not see all waits
            warnings.filterwarnings("ignore", ".*[Ss]ynchroniz.*debug.*", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def busy(self) -> Callable[[], bool]:
        side = torch.rand(4096, 4096, device=self.device)
        for _ in range(200):
            torch.mm(side, side)
        done = torch.cuda.Event()
        done.record()
        return done.query

    def launched(self, step: Step) -> list[str]:
        both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=both) as profiler:
            step()
            self.synchronize()
        names = [
            event.name
            for event in profiler.events() or []
            if event.device_type.name == "CUDA"
            and not getattr(event, "is_user_annotation", False)
            and not event.name.startswith(("Memcpy", "Memset"))
        ]
        if not names:
            raise NotHere("the profiler saw no kernels: may this user read the GPU's counters?")
        return names

    def captured(self, step: Step) -> Step:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def seconds(self, run: Step) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def free_memory(self) -> int:
        gc.collect()  # of earlier checks
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def extra_memory(self, run: Step) -> int:
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before


class AcceleratorPlatform(Platform):
    """Another kind of device, through torch.accelerator: results only."""

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)


def platform_of(name: str | None) -> Platform:
    """The platform of a device by its name; None: the first card, or else the CPU.

    Raises:
        ValueError: if there is no such device.
    """
    if name is None:
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} names no device of torch: {error}") from None
    if device.type == "cpu":
        return Platform(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                "torch sees no CUDA device: it needs a driver, and a build of torch for CUDA. "
                "--device cpu is a dry run."
            )
        index = device.index or 0
        if index >= torch.cuda.device_count():
            raise ValueError(f"there is no device {name}; torch sees {torch.cuda.device_count()}.")
        return CudaPlatform(torch.device("cuda", index))
    if torch.accelerator.is_available():
        here = torch.accelerator.current_accelerator()
        if here is not None and here.type == device.type:
            return AcceleratorPlatform(device)
    raise ValueError(f"torch sees no device of the kind {device.type!r} here.")
