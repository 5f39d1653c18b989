"""Triton kernels of recipes in the interpreter, beside the C++ of the same graphs."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from unittest import mock

import torch
from cases import CASES
from torch import Tensor

import functional_optim as fo
from functional_optim import kernels
from functional_optim.core.numbers import Own, kinds_of
from functional_optim.engine import group
from functional_optim.engine.executor import BoundScalars, Runner
from functional_optim.engine.gpu import TritonExecutor
from functional_optim.engine.native import Served
from functional_optim.engine.per_tensor import PerTensorExecutor
from functional_optim.kernels.print_triton import KernelVariant, source_of
from functional_optim.kernels.triton_launch import Gradients, Tables
from functional_optim.kernels.triton_primitives import KernelText
from functional_optim.kernels.triton_spaces import LaunchConfig
from gpu.drivers import Host, Memory, installed
from gpu.interpreter import Interpreted

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-41, -1e-41, 65520.0, 3e38, 1.0, -1.0]
KEY = 11_234_567.0
"""Of 24 bits, of which a half would lose some."""

GAP = 64
"""Bytes on each side of a tensor that belong to nobody."""


class Asked(TritonExecutor):
    """Notes which kernels are asked for; the steps are eager."""

    found: dict[Any, Served]

    def prepare(self, grads: list[Tensor], scalars: BoundScalars) -> Runner | None:
        try:
            every = self.graphs(grads, scalars)
        except kernels.Unsuitable:
            return None
        for own in every:
            self.found.setdefault(self.text_of(own.graph), own)
        return PerTensorExecutor(self.group, self.members, grads)


def asked(tx: Any, params: dict[str, Tensor]) -> list[Served]:
    """What the first steps of a transform ask kernels for."""
    Asked.found = {}
    step, state = fo.compile(tx), tx.init(params)
    executors = [Asked, PerTensorExecutor]
    with installed("cpu", Host()), mock.patch.object(group, "EXECUTORS", executors):
        for _ in range(2):
            grads = {name: torch.randn_like(p) for name, p in params.items()}
            params, state = step(grads, state, params)
    return list(Asked.found.values())


BY_NAME = {case.name: case for case in CASES}
OF_MATRICES = {
    *("muon", "normuon", "adamuon", "dion2", "scion-row", "scion-col", "scion-sign", "psgd_kron"),
    *("psgd_kron-seldom", "soap", "soap-both-sides", "kl_soap", "kl_shampoo", "shampoo"),
    "shampoo-blocks",
}
"""Recipes whose steps are products: these are tested in `test_gpu_steps`."""
WITH_ROOTS = {"madgrad"}
"""Recipes with a cube root, where libraries differ."""

EVERY = [case.name for case in CASES if case.name not in OF_MATRICES]


@cache
def served(name: str, dtype: torch.dtype = torch.float32, mixed: bool = False) -> list[Served]:
    """What a recipe asks kernels for, on a vector, a matrix and a tensor of three dimensions."""
    case = BY_NAME[name]
    tx: Any = case.tx()
    if mixed:
        tx = fo.slot_dtypes(tx, **dict.fromkeys(tx.layout.keys, torch.float32))
    every = case.params(dtype)
    return asked(tx, {key: every[key] for key in ("vector", "matrix", "cube") if key in every})


class Table:
    """Tensors of some shapes for a graph, and the numbers of a step.

    special: whether some elements are infinite, NaN, zero or very small. offset: by how many
    elements each tensor begins after a multiple of 16 bytes.
    """

    def __init__(
        self, own: Served, shapes: Sequence[Any], *, special: bool = False, offset: int = 0
    ) -> None:
        self.own = own
        self.offset = offset
        self.special = special
        self.random = torch.Generator().manual_seed(0)
        g, p, slots = own.like
        every = [own.body.tensors(g, p, slots, shape) for shape in shapes]
        self.leaves = [[self._drawn(x, i) for i, x in enumerate(leaf)] for leaf in every]
        self.sizes = [own.graph.sizes_of(tuple(leaf[1].shape) or (1,)) for leaf in every]
        self.constants = [own.body.constants(own.graph, g, p, slots, x) for x in shapes]
        count = own.body.count
        self.numbers = (0.1 + 0.8 * torch.rand(count, generator=self.random)).double().tolist()
        at = 0
        for form in own.body.forms:
            if form.record is Own and form.each[1].each:
                self.numbers[at + len(form.each[0].each)] = KEY
            at += len(kinds_of([form]))
        self.memory = Memory()
        """What the last kernels might touch, and how much they did."""

    def _drawn(self, like: Tensor, i: int) -> Tensor:
        """A tensor's values; slots are rarely negative, and codes are any."""
        shape, random = like.shape, self.random
        if like.element_size() < 3 and (like.element_size() == 1 or not like.is_floating_point()):
            last = (*shape[:-1], shape[-1] * like.element_size())
            return torch.randint(0, 256, last, generator=random, dtype=torch.uint8).view(like.dtype)
        if not like.is_floating_point():
            return like.clone()
        x = torch.randn(shape, generator=random, dtype=torch.float64)
        x *= torch.exp(2 * torch.randn(shape, generator=random, dtype=torch.float64))
        if i > 1:
            few = 0.0 if self.own.graph.block else 0.1
            x = torch.where(torch.rand(shape, generator=random) < few, x, x.abs())
        if self.special and not (self.own.graph.block and i > 1):
            special = torch.tensor(SPECIAL, dtype=torch.float64)
            some = torch.randint(len(SPECIAL), shape, generator=random)
            x = torch.where(torch.rand(shape, generator=random) < 0.05, special[some], x)
        return x.to(like.dtype)

    def copies(self) -> list[list[Tensor]]:
        """The tensors in memory of their own, which is all that kernels may touch."""
        stored = {i for i, _ in self.own.graph.stores}
        found: list[list[Tensor]] = []
        for leaf in self.leaves:
            found.append([])
            for i, x in enumerate(leaf):
                memory = torch.zeros(2 * GAP + x.nbytes + 16, dtype=torch.uint8)
                start = GAP - memory.data_ptr() % 16 + self.offset * x.element_size()
                mine = memory[start : start + x.nbytes].view(x.dtype).view(x.shape)
                found[-1].append(mine.copy_(x))
                self.memory.allow(mine, writable=i in stored)
        return found

    def by_cpp(self) -> tuple[list[list[Tensor]], list[float]]:
        """What the C++ makes of the tensors, and what it measures."""
        leaves = self.copies()
        own = self.own
        native = kernels.library(kernels.source_of(own.graph))
        assert native is not None
        rows = [list(map(Tensor.data_ptr, leaf[1:])) for leaf in leaves]
        launch = kernels.Launch(native, self.sizes, rows, self.constants, 1)
        totals = launch.bound([leaf[0] for leaf in leaves], [tuple(self.numbers)])()
        return leaves, list(totals)

    def by_triton(
        self,
        sources: Sequence[Any] | None = None,
        *,
        aligned: bool = True,
        skip: float | None = None,
        change: Callable[[str], str] = str,
        config: LaunchConfig | None = None,
        ahead: int = 0,
    ) -> tuple[list[list[Tensor]], list[float]]:
        """The same of the Triton kernels, whose text may be changed.

        sources: of the numbers; None for one from the launch and one from a tensor, in turns. skip:
        the number that leaves all out if it is not 0. ahead: chunks of each tensor that come before
        those that are there, and are not launched.
        """
        cpu, source = torch.device("cpu"), source_of(self.own.graph)
        own = sources or [("value", "tensor")[i % 2] for i in range(len(self.numbers))]
        variant = KernelVariant(tuple(own), aligned, skip is not None)
        texts = source.texts(variant, config or source.configs()[0])
        launchers = [self._launcher(x._replace(text=change(x.text))) for x in texts]
        with installed("cpu", Host()):
            self.memory = Memory()
            leaves = self.copies()
            before = ahead * source.chunk
            places = [[x.data_ptr() - before * x.element_size() for x in leaf] for leaf in leaves]
            grads, rows = [own[0] for own in places], [own[1:] for own in places]
            sizes = [[size + before for size in own] for own in self.sizes] if ahead else self.sizes
            tables = Tables(source, cpu, sizes, rows, self.constants)
            tables.divide(grads)
            if ahead:
                ends = itertools.accumulate(tables.counts[0])
                pairs = zip(ends, [count - ahead for count in tables.counts[0]], strict=True)
                tables.stages[0].parts[:] = [(True, end - count, count) for end, count in pairs]
            given = Gradients(cpu, len(rows))
            at = given.address(grads)
            assert given.there is not None
            wide = torch.tensor(self.numbers, dtype=torch.float64)
            off = torch.tensor(skip or 0.0)
            for x in (tables.table, tables.chunks, given.there, wide, off):
                self.memory.allow(x, writable=False)
            self.memory.allow(tables.scratch)
            numbers = [
                x if kind == "value" else wide[i]
                for i, (x, kind) in enumerate(zip(self.numbers, own, strict=True))
            ]
            both = dict.fromkeys((True, False), launchers)
            totals = tables.run(both, at, numbers, None if skip is None else off)
        return leaves, [float(x) for x in totals]

    def _launcher(self, text: KernelText) -> Any:
        kernel = Interpreted(text)
        return lambda programs, given: kernel(programs, given, self.memory.access)


def alike(x: Tensor, y: Tensor, loose: float = 0.0) -> bool:
    """Whether tensors are the same bits, or any NaN, or as near to each other, relatively, as
    rounding takes them."""
    if loose and x.is_floating_point() and x.element_size() > 1:
        return torch.allclose(x.double(), y.double(), rtol=loose, atol=loose, equal_nan=True)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    same = x.view(kind) == y.view(kind)
    if x.is_floating_point():
        same |= x.isnan() & y.isnan()
    return bool(same.all())


def check(own: Served, shapes: Sequence[Any], *, loose: float = 0.0, **options: Any) -> Table:
    """Assert that Triton kernels do what the C++ of the same graph does.

    loose: see `alike`; sums may part by a millionth. options: of `Table` and of its `by_triton`.
    """
    mine = {key: options.pop(key) for key in ("special", "offset") if key in options}
    table = Table(own, shapes, **mine)
    expected, sums = table.by_cpp()
    found, totals = table.by_triton(**options)
    for leaf, wanted, shape in zip(found, expected, shapes, strict=True):
        for i, (x, y) in enumerate(zip(leaf, wanted, strict=True)):
            assert alike(x, y, loose), f"tensor {i} of shape {shape}: {_apart(x, y)}"
    torch.testing.assert_close(totals, sums, rtol=1e-6, atol=1e-9, equal_nan=True)
    return table


def _apart(x: Tensor, y: Tensor) -> str:
    other = (x != y) & ~((x != x) & (y != y))
    pairs = list(zip(x[other].tolist(), y[other].tolist(), strict=True))
    return f"{len(pairs)} of {x.numel()}, such as {pairs[:4]}"
