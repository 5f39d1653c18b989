"""One launch of a Triton kernel for all tensors of a group, and the sums that it leaves."""

from __future__ import annotations

import array
import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from functional_optim.kernels.drivers import DRIVERS, Launcher, uploaded
from functional_optim.kernels.triton_builds import (
    CaptureError,
    KernelVariant,
    TritonKernel,
    chunks_at,
    compiled,
)
from functional_optim.kernels.triton_source import KernelText, Source

ALIGNMENT = 16
"""Bytes at a multiple of which a tensor begins whose entries can be read several at once."""


class Gradients:
    """The addresses of the gradients of some tensors, as a vector on a device.

    It is written anew where one has changed, into memory of its own: a kernel of an earlier step
    may still be reading the last one. count: of the tensors.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.driver = DRIVERS[device.type]
        self.device = device
        self.count = count
        self.known: list[int] = []
        self.there: Tensor | None = None
        self.spare: Tensor | None = None
        self.recorded: list[tuple[list[int], Tensor, Tensor]] = []
        """What captured steps read: the addresses, and the memory on both sides of the copy."""

    def address(self, addresses: list[int]) -> int:
        """Where these addresses are on the device."""
        if self.driver.capturing():
            return self._recorded(addresses).data_ptr()
        if self.spare is None:
            self.spare = self.driver.pinned(self.count)
        if self.there is None or addresses != self.known:
            here = self.driver.pinned(self.count)
            self.there = uploaded(here, array.array("q", addresses), self.device)
            self.known = addresses
        return self.there.data_ptr()

    def _recorded(self, addresses: list[int]) -> Tensor:
        """The vector in a captured step. A copy that is captured has not been made, so steps that
        are not captured must not read it; and no memory can be pinned meanwhile."""
        if self.there is not None and addresses == self.known:
            self.recorded.append((addresses, self.there, self.there))
            return self.there
        if not self.recorded or self.recorded[-1][0] != addresses:
            here, self.spare = self.spare, None
            here = self.driver.pinned(self.count) if here is None else here
            there = uploaded(here, array.array("q", addresses), self.device)
            self.recorded.append((addresses, here, there))
        return self.recorded[-1][2]


class TableLaunch:
    """A kernel, and the tensors that it goes over.

    sizes: of the tensors. rows: for each one the addresses of the parameter and its slots. each:
    whether it sums over each tensor by itself. All tensors must outlive it.
    """

    def __init__(
        self, kernel: TritonKernel, sizes: Sequence[int], rows: Sequence[list[int]], *, each: bool
    ) -> None:
        self.kernel = kernel
        self.sizes = sizes
        self.each = each
        self.even = [not any(x % ALIGNMENT for x in row) for row in rows]
        table = [[size, *row] for size, row in zip(sizes, rows, strict=True)]
        self.rows = self._there(array.array("q", itertools.chain(*table)))
        self.odd: list[int] | None = None
        self.parts: list[tuple[bool, int, int]] = []

    def _there(self, values: array.array[int]) -> Tensor:
        return uploaded(self.kernel.driver.pinned(len(values)), values, self.kernel.device)

    def ready(
        self, grads: Sequence[int], sources: tuple[Source, ...], *, skips: bool = False
    ) -> list[Launcher]:
        """Have all ready that a launch needs, and give its kernels.

        grads: the addresses of the gradients. skips: whether a number says that all is left out.

        Raises:
            CaptureError: in a capture, if the work has to be divided anew.
            Exception: if a kernel cannot be compiled.
        """
        odd = [i for i, even in enumerate(self.even) if not even or grads[i] % ALIGNMENT]
        if odd != self.odd:
            if self.kernel.driver.capturing():
                raise CaptureError(
                    "a step is being captured whose gradients begin at other multiples of bytes "
                    "than those of the step before, which divides the work anew; make a step with "
                    "gradients like these before."
                )
            self._divide(odd)
        return [
            self.kernel.launcher(KernelVariant(sources, even, skips)) for even, *_ in self.parts
        ]

    def _divide(self, odd: list[int]) -> None:
        """Divide the work: tensors that begin anywhere have a kernel of their own."""
        chunk, among = self.kernel.config.chunk, set(odd)
        chunks, ranges = array.array("q"), array.array("q", bytes(16 * len(self.sizes)))
        self.parts = []
        for even in (True, False):
            first = len(chunks)
            for i, size in enumerate(self.sizes):
                if (i not in among) is even:
                    ranges[2 * i] = len(chunks)
                    chunks.extend(chunks_at(i, size, chunk))
                    ranges[2 * i + 1] = len(chunks)
            if len(chunks) > first:
                self.parts.append((even, first, len(chunks) - first))
        self.count = len(chunks)
        self.chunks = self._there(chunks)
        self.ranges = self._there(ranges if self.each else array.array("q", [0, self.count]))
        self.odd = odd

    def run(
        self,
        launchers: Sequence[Launcher],
        grads: int,
        numbers: Sequence[Any],
        found: Tensor | None,
        totals: Tensor | None,
        skip: Tensor | None = None,
    ) -> None:
        """Launch the kernels.

        Args:
            launchers: as `ready` gave them.
            grads: where the addresses of the gradients are on the device.
            numbers: those that are no rows, as values or addresses.
            found: for each tensor a row of the numbers that come first.
            totals: gets the sums, a row for each tensor or one for all; in float64.
            skip: the number that says whether all is left out, in float32.
        """
        outputs, device = self.kernel.outputs, self.kernel.device
        partials: Tensor | None = None
        if totals is not None:
            partials = torch.empty(self.count, outputs, dtype=torch.float64, device=device)
        rows = [] if found is None else [found.data_ptr(), found.stride(0)]
        for launch, (_, first, count) in zip(launchers, self.parts, strict=True):
            own = [self.chunks.data_ptr() + 8 * first, self.rows.data_ptr(), grads, *rows, *numbers]
            if partials is not None:
                own.append(partials.data_ptr() + 8 * outputs * first)
            if skip is not None:
                own.append(skip.data_ptr())
            launch(count, own)
        if totals is not None and partials is not None:
            programs = totals.shape[0] * outputs
            arguments = [partials, self.ranges, totals]
            launch = adder(device)
            launch(programs, [*map(Tensor.data_ptr, arguments), outputs, totals.stride(0)])


SUMS = """import triton
import triton.language as tl


@triton.jit
def sum_kernel(partials, ranges, totals, outputs, stride):
    program = tl.program_id(0).to(tl.int64)
    tensor = program // outputs
    output = program % outputs
    first = tl.load(ranges + 2 * tensor)
    stop = tl.load(ranges + 2 * tensor + 1)
    offsets = tl.arange(0, 1024)
    total = tl.zeros([1024], tl.float64)
    for at in range(first, stop, 1024):
        rows = at + offsets
        total += tl.load(partials + rows * outputs + output, mask=rows < stop, other=0.0)
    tl.store(totals + tensor * stride + output, tl.sum(total, axis=0))
"""
"""Adds up what programs have left, in an order that depends on sizes alone."""


@cache
def adder(device: torch.device) -> Launcher:
    """The kernel that adds up, on a device."""
    driver = DRIVERS[device.type]
    types = {"partials": "*fp64", "ranges": "*i64", "totals": "*fp64"}
    text = KernelText(SUMS, {**types, "outputs": "i64", "stride": "i64"})
    return driver.loaded(compiled(text, "sum_kernel", driver.target(device), 4), device)
