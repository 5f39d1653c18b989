"""Cards that are not there: Triton's kernels, compiled for sm_90, run on the device for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from functional_optim.kernels import drivers
from gpu import device as fake
from gpu.memory import FIRST, Array, Memory
from gpu.ptx import Program

ARCHITECTURE = 90


class DeviceMemory(Memory):
    """The memory of one device: an address that is not its is an error, but for a kernel's own
    constants."""

    def __init__(self, device: str) -> None:
        super().__init__()
        super().allow(FIRST, 1 << 48)
        self.device = device
        self.constants: list[range] = []

    def allow(self, address: int, size: int, writable: bool = True) -> None:
        self.constants.append(range(address, address + size))

    def _check(
        self, addresses: Array, active: Array | None, blocks: Array, size: int, what: str
    ) -> tuple[Array, Array]:
        used = addresses if active is None else addresses[active]
        for place in (int(used.min()), int(used.max())) if used.size else ():
            if fake.owner(place) != self.device and not any(place in x for x in self.constants):
                raise MemoryError(f"A {what} at {place:#x}, which is not of {self.device}.")
        return super()._check(addresses, active, blocks, size, what)


class Simulated:
    """A driver, as the engine has one for CUDA. launches: the name of each kernel that was launched
    since the list was cleared, and the number of its programs. compiled: how many kernels were."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, int]] = []
        self.compiled = 0

    def missing(self) -> str | None:
        return None

    def target(self, device: torch.device) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", ARCHITECTURE, 32)

    def name(self, device: torch.device) -> str:
        return "simulated"

    def loaded(self, compiled: Any, device: torch.device) -> Callable[[int, Sequence[Any]], None]:
        self.compiled += 1
        program = Program(compiled.asm["ptx"])

        def launch(programs: int, arguments: Sequence[Any]) -> None:
            given = list(arguments)
            self.launches.append((compiled.name, programs))

            def run() -> None:
                program.run(programs, given, memory_of(device))

            fake.record(compiled.name, run)

        return launch

    def capturing(self) -> bool:
        return fake.load().is_capturing()

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)

    def seconds(self, run: Callable[[], None], device: torch.device) -> float | None:
        return None


def memory_of(device: torch.device) -> Memory:
    """What a kernel may touch."""
    return DeviceMemory(f"{device.type}:{device.index or 0}")


@contextmanager
def simulated() -> Iterator[Simulated]:
    """Inside, the device for tests has a driver."""
    fake.load()
    driver = Simulated()
    drivers.DRIVERS[fake.DEVICE] = driver
    try:
        yield driver
    finally:
        del drivers.DRIVERS[fake.DEVICE]
