"""A Triton kernel in the simulator, next to its rule's graph run by torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

from functional_optim.kernels.triton_builds import KernelVariant, chunks_of, compiled
from functional_optim.kernels.triton_source import KernelText, LaunchConfig, kernel_text
from gpu.ahead import own_cache
from gpu.kernel_cases import Traced
from gpu.memory import Memory, Range
from gpu.ptx import Program
from gpu.trials import SPECIAL

aten = torch.ops.aten
ROOTS = (aten.sqrt.default, aten.rsqrt.default)
LARGER = (aten.maximum.default, aten.clamp_min.default, aten.clamp_min.Tensor)
SMALLER = (aten.minimum.default, aten.clamp_max.default, aten.clamp_max.Tensor)

NAME = "kernel"
GAP = 64
"""Bytes on each side of a tensor that belong to nobody."""


def text_of(kernel: Traced, variant: KernelVariant, config: LaunchConfig) -> KernelText:
    return kernel_text(kernel.rule, variant.sources, config, aligned=variant.aligned, name=NAME)


@cache
def compile_text(text: str, arguments: tuple[tuple[str, str], ...], warps: int, of: int) -> Any:
    """A kernel, compiled for a capability: 80 for an A100, 90 for an H100."""
    with own_cache():
        target = GPUTarget("cuda", of, 32)
        return compiled(KernelText(text, dict(arguments)), NAME, target, warps)


def compile_for(text: KernelText, config: LaunchConfig, of: int = 90) -> Any:
    return compile_text(text.text, tuple(text.arguments.items()), config.warps, of)


class Reference(torch.fx.Interpreter):
    """A graph run by torch, with roots that are rounded correctly, sums in float64, and 0 larger
    than −0, which torch's CPU leaves to the order of the operands.

    scales: the sum of the magnitudes of what each sum adds up.
    """

    def __init__(self, graph: Any) -> None:
        super().__init__(graph)
        self.scales: list[float] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in ROOTS:
            wide = args[0].float() if args[0].element_size() == 2 else args[0]
            with np.errstate(invalid="ignore"):
                root = torch.as_tensor(np.sqrt(wide.numpy()))
            inverse = target is aten.rsqrt.default
            return (1 / root if inverse else root).to(args[0].dtype)
        if target is aten.sum.default:
            self.scales.append(float(args[0].double().abs().nan_to_num(0.0, 0.0).sum()))
            return args[0].double().sum()
        found = super().call_function(target, args, kwargs)
        if target in LARGER or target in SMALLER:
            x, y = map(torch.as_tensor, args)
            zero = x + y if target in LARGER else -(-x + -y)
            found = torch.where((x == 0) & (y == 0), zero, found)
        return found


class Table:
    """Tensors as a kernel goes over them.

    sources: where each number comes from. offset: by how many entries each tensor begins after a
    multiple of 16 bytes. skipped: chunks of each tensor before those that are there; none of them
    is launched. Some entries are infinite, NaN, zero, or very small.
    """

    def __init__(
        self,
        kernel: Traced,
        sizes: Sequence[int],
        sources: Sequence[str],
        config: LaunchConfig,
        *,
        offset: int = 0,
        skipped: int = 0,
    ) -> None:
        self.kernel, self.sizes, self.config = kernel, sizes, config
        self.sources = tuple(sources)
        self.random = torch.Generator().manual_seed(0)
        self.offset = offset
        (dtypes,) = kernel.signature.leaves
        self.leaves = [
            [self._drawn(size, dtype, i > 1) for i, dtype in enumerate(dtypes)] for size in sizes
        ]
        count, wide = kernel.signature.numbers
        shape = (len(sizes), count)
        rows = 0.1 + 0.8 * torch.rand(shape, generator=self.random)
        of_all = torch.tensor([source != "row" for source in self.sources], dtype=torch.bool)
        self.numbers = torch.where(of_all, rows[:1], rows).to(wide)
        before = [skipped * config.chunk * dtype.itemsize for dtype in dtypes]
        places = [
            [x.data_ptr() - gone for x, gone in zip(leaf, before, strict=True)]
            for leaf in self.leaves
        ]
        lines = [
            [size + skipped * config.chunk, *place[1:]]
            for size, place in zip(sizes, places, strict=True)
        ]
        self.chunks = torch.tensor(chunks_of(sizes, config.chunk), dtype=torch.int64) + skipped
        self.rows = torch.tensor(lines, dtype=torch.int64)
        self.grads = torch.tensor([place[0] for place in places], dtype=torch.int64)
        self.programs = len(self.chunks)
        shape = (self.programs, kernel.outputs)
        self.partials = torch.full(shape, -7.0, dtype=torch.float64)
        self.ranges: list[list[Range | None]] = []

    def _drawn(self, size: int, dtype: torch.dtype, slot: bool) -> Tensor:
        """A tensor in memory of its own; slots are rarely negative."""
        random = self.random
        x = torch.randn(size, generator=random, dtype=torch.float64)
        x *= torch.exp(2 * torch.randn(size, generator=random, dtype=torch.float64))
        if slot:
            x = torch.where(torch.rand(size, generator=random) < 0.9, x.abs(), x)
        special = torch.tensor(SPECIAL, dtype=torch.float64)
        some = torch.randint(len(SPECIAL), (size,), generator=random)
        x = torch.where(torch.rand(size, generator=random) < 0.05, special[some], x)
        width = dtype.itemsize
        memory = torch.zeros(2 * GAP + (size + self.offset) * width, dtype=torch.uint8)
        start = GAP - memory.data_ptr() % 16 + self.offset * width
        return memory[start : start + size * width].view(dtype).copy_(x)

    def arguments(self) -> list[Any]:
        """Those of a launch: tensors, whose addresses a kernel gets, and numbers."""
        wide = self.wide = self.numbers.double()
        found: list[Any] = [self.chunks, self.rows, self.grads]
        if "row" in self.sources:
            found += [wide, wide.stride(0)]
        for i, source in enumerate(self.sources):
            if source == "value":
                found.append(float(wide[0, i]))
            elif source == "tensor":
                found.append(wide[0, i])
        return [*found, self.partials] if self.kernel.outputs else found

    def run(self, ptx: str) -> Program:
        """Launch a kernel, which may touch nothing but the tensors and the tables."""
        memory = Memory()
        written = {i for i, _ in self.kernel.rule.stored}
        self.ranges = [
            [memory.allow_tensor(x, writable=i in written) for i, x in enumerate(leaf)]
            for leaf in self.leaves
        ]
        arguments = self.arguments()
        for table in (self.chunks, self.rows, self.grads, self.wide):
            memory.allow_tensor(table, writable=False)
        memory.allow_tensor(self.partials)
        given = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
        program = Program(ptx)
        program.run(self.programs, given, memory)
        return program

    def expected(self) -> tuple[list[list[Tensor]], list[list[float]], list[float]]:
        """What the graph makes of the tensors; the sums of each, and the scale of them."""
        leaves = [[x.clone() for x in leaf] for leaf in self.leaves]
        sums, scales = [], []
        for leaf, numbers in zip(leaves, self.numbers, strict=True):
            reference = Reference(self.kernel.graph)
            with torch.no_grad():
                found = reference.run(leaf[0].numel(), *leaf, numbers)
            sums.append([float(x) for x in found])
            scales.append(max(reference.scales, default=0.0))
        return leaves, sums, scales

    def check(self, run: Callable[[], object], loose: float = 0.0) -> None:
        """Assert that a call does what the graph does.

        loose: how far parameters may part, of the largest number in their place.
        """
        leaves, sums, scales = self.expected()
        before = [[x.clone() for x in leaf] for leaf in self.leaves]
        run()
        for olds, mine, theirs in zip(before, self.leaves, leaves, strict=True):
            for i, (x, y) in enumerate(zip(mine, theirs, strict=True)):
                far = torch.zeros_like(x)
                if i == 1 and loose:
                    every = torch.stack([own.double().abs().nan_to_num() for own in (*olds, y)])
                    far = loose * every.amax(0)
                _alike(x, y, far, f"tensor {i} of {len(x)} entries")
        if self.kernel.outputs:
            counts = [-(-size // self.config.chunk) for size in self.sizes]
            for own, want, scale in zip(self.partials.split(counts), sums, scales, strict=True):
                wanted = torch.tensor(want, dtype=torch.float64)
                torch.testing.assert_close(
                    own.sum(0), wanted, rtol=0, atol=1e-6 * scale, equal_nan=True
                )


def _alike(x: Tensor, y: Tensor, far: Tensor, what: str) -> None:
    """Assert that numbers are the same bits, or any NaN, or at most so far from each other."""
    apart = ((x != y) | (x.signbit() != y.signbit())) & ~(x.isnan() & y.isnan())
    apart &= ~((x.double() - y.double()).abs() <= far) | (far == 0)
    pairs = list(zip(x[apart].tolist(), y[apart].tolist(), strict=True))
    assert not pairs, f"{what}: {pairs[:4]} …"
