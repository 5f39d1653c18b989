"""Drivers for Triton kernels where there is no GPU: Triton's interpreter runs them on the host's
memory, on the CPU's tensors or on those of the device for tests."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from functional_optim.engine import group
from functional_optim.engine.gpu import TritonExecutor
from functional_optim.engine.per_tensor import PerTensorExecutor
from functional_optim.kernels import drivers, gpu_normals, triton_builds, triton_launch
from functional_optim.kernels.drivers import Launcher
from functional_optim.kernels.triton_primitives import KernelText
from gpu import device as fake
from gpu import threads
from gpu.interpreter import Access, Interpreted


class Host:
    """A driver for the CPU. texts: the kernels that were loaded. launches: the name of each kernel
    that was launched since the list was cleared, and the number of its programs."""

    timed = False

    def __init__(self, access: Access | None = None) -> None:
        self.texts: list[KernelText] = []
        self.launches: list[tuple[str, int]] = []
        self.access = access or (lambda addresses, size, writes: None)

    def missing(self) -> str | None:
        return None

    def name(self, device: torch.device) -> str:
        return "interpreted"

    def load(self, text: KernelText, device: torch.device) -> Launcher:
        self.texts.append(text)
        kernel = Interpreted(text)

        def launch(programs: int, arguments: Sequence[Any]) -> None:
            self.launches.append((text.name, programs))
            self.launch(text.name, lambda: kernel(programs, arguments, self.access_of(device)))

        return launch

    def threads(self, text: str, device: torch.device) -> Launcher:
        run = threads.launcher(text)

        def launch(count: int, arguments: Sequence[int]) -> None:
            self.launches.append(("threads", count))
            self.launch("threads", lambda: run(count, arguments))

        return launch

    def launch(self, name: str, run: Callable[[], None]) -> None:
        run()

    def access_of(self, device: torch.device) -> Access:
        return self.access

    def capturing(self) -> bool:
        return False

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64)

    def seconds(self, run: Callable[[], object], device: torch.device) -> float:
        raise NotImplementedError


class OnDevice(Host):
    """A driver for the device for tests, which counts and records launches."""

    def launch(self, name: str, run: Callable[[], None]) -> None:
        fake.record(name, run)

    def access_of(self, device: torch.device) -> Access:
        """An address that is not of the device is an error."""
        own = f"{device.type}:{device.index or 0}"

        def access(addresses: np.ndarray, size: int, writes: bool) -> None:
            for place in (int(addresses.min()), int(addresses.max())) if addresses.size else ():
                if fake.owner(place) != own:
                    raise MemoryError(f"An access to {place:#x}, which is not of {own}.")

        return access

    def capturing(self) -> bool:
        return fake.load().is_capturing()

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)


@contextmanager
def installed(kind: str, driver: Any) -> Iterator[Any]:
    """Inside, a type of device has a driver, for which no kernel was loaded before."""
    with (
        mock.patch.dict(drivers.DRIVERS, {kind: driver}),
        mock.patch.dict(triton_builds._kernels, clear=True),
        mock.patch.dict(gpu_normals._launchers, clear=True),
    ):
        triton_launch.joining.cache_clear()
        yield driver
    triton_launch.joining.cache_clear()


@contextmanager
def on_host(driver: Host) -> Iterator[Host]:
    """Inside, rules on the CPU go through a driver, and those that it does not take go tensor by
    tensor."""
    executors = [TritonExecutor, PerTensorExecutor]
    with installed("cpu", driver), mock.patch.object(group, "EXECUTORS", executors):
        yield driver


@contextmanager
def on_device() -> Iterator[OnDevice]:
    """Inside, the device for tests has a driver."""
    fake.load()
    with installed(fake.DEVICE, OnDevice()) as driver:
        yield driver


class Memory:
    """The memory that kernels may touch. read, written: the bytes of each tensor that were."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.ends: list[tuple[int, int, bool]] = []
        self.read: list[int] = []
        self.written: list[int] = []

    def allow(self, x: Tensor, *, writable: bool = True) -> None:
        """Permit the elements of a contiguous tensor."""
        self.tensors.append(x)
        self.ends.append((x.data_ptr(), x.data_ptr() + x.nbytes, writable))
        self.read.append(0)
        self.written.append(0)

    def access(self, addresses: np.ndarray, size: int, writes: bool) -> None:
        """Raise MemoryError for what lies outside; a program touches one tensor at once."""
        if not addresses.size:
            return
        low, high = int(addresses.min()), int(addresses.max()) + size
        for i, (first, end, writable) in enumerate(self.ends):
            if first <= low < end:
                if high > end or (writes and not writable) or (low - first) % size:
                    break
                counts = self.written if writes else self.read
                counts[i] += addresses.size * size
                return
        what = "write" if writes else "read"
        raise MemoryError(f"A {what} from {low:#x} to {high:#x} is outside of all tensors.")
