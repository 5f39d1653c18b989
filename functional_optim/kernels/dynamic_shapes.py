"""One library for all shapes of a number of dimensions, for rules that sum over parts of tensors.

`phases` cuts the rule into kernels, Inductor writes them, and a driver calls them: large tensors
one after the other, their chunks shared by the threads; others as a whole, each by one thread.
"""

from __future__ import annotations

import array
import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.kernels.building import CTYPES, Unsuitable, captured, type_of
from functional_optim.kernels.builds import Draft
from functional_optim.kernels.launches import Launch, Native, compare, symbol_of
from functional_optim.kernels.phases import HINTS, ROWS, ChunkKernel, Phases, cut, empty, mean
from functional_optim.kernels.tracing import Body, Trace, lower, record

CHUNK = 1 << 13
"""Entries of a chunk: few enough to stay in a core's cache."""

ALIGNED = 64
"""Bytes to which scratch memory is aligned."""

TRIED = ((2, 3, 5, 4), (67, 2, 3, 2), (3, 41, 2, 7), (33, 29, 2, 3))
"""Sizes of the tensors that a new library is tried on: also tall ones and wide ones."""

MOST = len(HINTS)
"""Dimensions that a tensor may have, not counting those of size 1."""

Axes = tuple[int | None, ...]
"""A shape: for each dimension the index of its size, None for a size of 1."""


class ShapeSignature(NamedTuple):
    """What a kernel is specialized on, beside its code.

    dtypes, axes: of the gradient, the parameter and its slots. numbers: length of the vector of
    numbers, and its dtype.
    """

    dtypes: tuple[torch.dtype, ...]
    axes: tuple[Axes, ...]
    numbers: tuple[int, torch.dtype]

    @property
    def sizes(self) -> int:
        """How many dimensions of the parameter are not of size 1."""
        return sum(axis is not None for axis in self.axes[1])


class ShapedLaunch(Launch):
    """A library for tensors of a number of dimensions, with those that it goes over.

    sizes: of each tensor, those that are not 1. chunk: entries of a chunk. The other arguments are
    those of `Launch`.
    """

    def __init__(
        self,
        native: Native,
        sizes: Sequence[Sequence[int]],
        rows: array.array[int],
        threads: int,
        dtype: torch.dtype,
        *,
        each: bool = False,
        chunk: int = CHUNK,
    ) -> None:
        super().__init__(native, len(sizes), rows, threads, dtype, each=each)
        entries = list(map(math.prod, sizes))
        # a thread that steps a large tensor alone is waited for
        limit = max(sum(entries) // (2 * threads), chunk) if threads > 1 else max(entries)
        order = sorted(range(len(sizes)), key=lambda i: -entries[i])
        large = sum(size > limit for size in entries)
        needed, table = [0], array.array("q")
        for own in sizes:
            row, last = self._row(own, threads, chunk)
            table.extend(row)
            needed.append(last)
        alone = max([needed[1 + i] for i in order[large:]], default=0)
        together = max([needed[1 + i] for i in order[:large]], default=0)
        self.scratch = torch.empty(max(alone * threads, together) + ALIGNED, dtype=torch.uint8)
        at = -(-self.scratch.data_ptr() // ALIGNED) * ALIGNED
        self.table, self.order = table, array.array("q", order)
        self.call[0], self.call[1] = table.buffer_info()[0], large
        self.call[11], self.call[12] = self.order.buffer_info()[0], at
        self.call[13] = alone

    def _row(self, sizes: Sequence[int], threads: int, chunk: int) -> tuple[list[int], int]:
        """A row of the table of tensors: sizes, rows of a chunk, chunks, and where each value lies
        in scratch memory; and how much of that there is."""
        first, inner = (sizes[0], math.prod(sizes[1:])) if sizes else (1, 1)
        chunks = min(first, -(-first * inner // chunk))
        rows = -(-first // chunks)
        chunks = -(-first // rows)
        at, offsets = 0, []
        layout = self.native.layout
        for width, axes, parts in zip(layout[::3], layout[1::3], layout[2::3], strict=True):
            offsets.append(at)
            size = width * math.prod([n for i, n in enumerate(sizes) if axes >> i & 1])
            if parts == TEMPORARY:
                size = (
                    threads
                    * width
                    * math.prod(
                        [rows if i == 0 else n for i, n in enumerate(sizes) if axes >> i & 1]
                    )
                )
            elif parts == PARTS:
                size *= chunks
            at += -(-size // ALIGNED) * ALIGNED
        return [*sizes, rows, chunks, *offsets], at


WHOLE, PARTS, TEMPORARY = range(3)
"""Scratch memory for a value, for what each chunk leaves of it, and for a kernel while it runs."""


def draft(name: str | None, body: Body, signature: ShapeSignature, outputs: int) -> Draft:
    """The library of a rule for all shapes of a signature.

    Raises:
        Unsuitable: if the rule cannot be cut.
        Exception: whatever goes wrong in Inductor.
    """
    symbol = symbol_of(name)
    source = write(trace(body, signature), signature, outputs, symbol)
    check = partial(_try, body=body, signature=signature)
    return Draft(name, symbol, outputs, source, check)


def trace(body: Body, signature: ShapeSignature) -> Trace:
    """A rule for one tensor of open sizes as a graph.

    Raises:
        Unsuitable: if it does different things for different shapes, or fails where they are open.
    """

    def made(sizes: list[Any]) -> list[Tensor]:
        pairs = zip(signature.axes, signature.dtypes, strict=True)
        return [empty(axes, sizes, dtype) for axes, dtype in pairs]

    aten = torch.ops.aten
    means = {aten.mean.dim: mean, aten.mean.default: mean}
    hints = HINTS[: signature.sizes]
    try:
        traced = record(
            lambda sizes, tensors, numbers: body([tensors], numbers),
            hints,
            made,
            signature.numbers,
            torch.device("cpu"),
            means,
        )
        check_open(traced)
    except Exception as error:  # of the rule, such as two sizes that must be equal
        raise Unsuitable(str(error)) from None
    return traced


def check_open(traced: Trace) -> None:
    """Raise Unsuitable unless a graph surely holds for all sizes of 2 and more."""
    for guard in traced.mode.shape_env.guards:
        at_least_two = {
            size: 2 + size.func(f"{size}_more", integer=True, nonnegative=True)
            for size in guard.expr.free_symbols
        }
        holds: Any = guard.expr.subs(at_least_two)
        if hasattr(holds, "rel_op"):
            holds = holds.func((holds.lhs - holds.rhs).expand(), 0)
        if holds != True:  # noqa: E712
            raise Unsuitable(f"a rule that holds only where {guard.expr}")


def write(traced: Trace, signature: ShapeSignature, outputs: int, symbol: str) -> str:
    """The C++ source of a library: the kernels, and what calls them. symbol: of its function."""
    phases = cut(traced, signature.sizes)
    writer = _Writer(phases, signature)
    for part in phases.parts:
        writer.add(part)
    return writer.source(outputs, symbol)


class _Writer:
    """The source of a library, kernel by kernel."""

    def __init__(self, phases: Phases, signature: ShapeSignature) -> None:
        self.phases = phases
        self.signature = signature
        self.kernels: list[str] = []
        self.calls: dict[tuple[int, bool], list[str]] = {}
        self.layout: list[tuple[int, int, int]] = []
        self.offset = signature.sizes + 2
        """Where the places of values begin in a row of the table."""
        for kept in phases.kept:
            self.layout.append((kept.dtype.itemsize, _mask(kept.axes), WHOLE))
        self.parts: dict[int, int] = {}
        for i, kept in enumerate(phases.kept):
            if kept.combined:
                self.parts[i] = len(self.layout)
                self.layout.append((kept.dtype.itemsize, _mask(kept.axes), PARTS))

    def add(self, part: ChunkKernel) -> None:
        """Have Inductor write a kernel, and call it where it belongs."""
        hints = (ROWS, *HINTS[: self.signature.sizes])
        with captured() as found:
            kernel = lower(
                part.traced, 1, chunked=True, fx_graph_cache=False, force_disable_caches=True
            )
            tensors = [empty(shape, hints, dtype) for shape, dtype in part.layouts]
            numbers = torch.empty(self.signature.numbers[0], dtype=self.signature.numbers[1])
            results = kernel([*hints, *tensors, numbers])
        known = {numbers.data_ptr(): "t.numbers"}
        for x, (kind, i) in zip(tensors, part.reads, strict=True):
            given = kind == "given"
            known[x.data_ptr()] = self._given(i) if given else self._kept(i, part.when.chunked)
        for x, i in zip(results, part.writes, strict=True):
            known[x.data_ptr()] = self._left(i, part.when.chunked)
        names = ["rows", *[f"t.size[{i}]" for i in range(self.signature.sizes)]]
        sizes: dict[int, str] = dict(zip(hints, names, strict=True))
        lines = self.calls.setdefault((part.when.phase, part.when.chunked), [])
        for call in found:
            name = f"kernel{len(self.kernels)}"
            self.kernels.append(call.function(name, numbers))
            for own in call.given:
                arguments = [
                    f"({kind}){self._argument(x, known, sizes)}"
                    for kind, x in zip(call.types, own, strict=True)
                ]
                lines.append(f"{name}({', '.join(arguments)});")

    def _argument(self, x: Any, known: dict[int, str], sizes: dict[int, str]) -> str:
        """What stands for an argument of a kernel.

        Raises:
            Unsuitable: if it is not known what that is.
        """
        if not isinstance(x, Tensor):
            if type(x) is int and x in sizes:
                return sizes[x]
            raise Unsuitable(f"a kernel with the argument {x!r}")
        if x.data_ptr() not in known:
            known[x.data_ptr()] = self._temporary(x)
        return known[x.data_ptr()]

    def _temporary(self, x: Tensor) -> str:
        """Memory that a kernel needs while it runs."""
        hints = (ROWS, *HINTS[1 : self.signature.sizes])
        for axes in range(1 << self.signature.sizes):
            if x.numel() == math.prod([n for i, n in enumerate(hints) if axes >> i & 1]):
                self.layout.append((x.element_size(), axes, TEMPORARY))
                length = " * ".join(
                    ["1", *[("t.rows" if i == 0 else f"t.size[{i}]") for i in _indices(axes)]]
                )
                own = f"omp_get_thread_num() * {x.element_size()} * {length}"
                return f"({self._place(len(self.layout) - 1)} + {own})"
        raise Unsuitable("a kernel with memory of another shape")

    def _given(self, i: int) -> str:
        address = "t.grad" if i == 0 else f"t.row[{i - 1}]"
        axes = [axis for axis in self.signature.axes[i] if axis is not None]
        return f"(({CTYPES[self.signature.dtypes[i]]}*){address}{self._start(axes)})"

    def _start(self, axes: Sequence[int]) -> str:
        """Where the chunk begins in a tensor of these dimensions."""
        if 0 not in axes:
            return ""
        return " + " + " * ".join(["start", *[f"t.size[{axis}]" for axis in axes if axis]])

    def _place(self, i: int) -> str:
        return f"(t.scratch + t.at[{i}])"

    def _kept(self, i: int, chunked: bool) -> str:
        kept = self.phases.kept[i]
        start = self._start(kept.axes) if chunked else ""
        return f"(({CTYPES[kept.dtype]}*){self._place(i)}{start})"

    def _left(self, i: int, chunked: bool) -> str:
        kept = self.phases.kept[i]
        if i not in self.parts:
            return self._kept(i, chunked)
        return f"(({CTYPES[kept.dtype]}*){self._place(self.parts[i])} + k * {_length(kept.axes)})"

    def source(self, outputs: int, symbol: str) -> str:
        """All of it."""
        last = max([phase for phase, _ in self.calls], default=-1)
        found = ["\n".join(self.kernels), HEAD]
        integers = [3 * len(self.layout), *itertools.chain.from_iterable(self.layout)]
        layout = ", ".join(map(str, integers))
        found.append(f'extern "C" const int64_t {symbol}_layout[] = {{{layout}}};\n')
        steps: list[str] = []
        for phase in range(last + 1):
            before = self.calls.get((phase, False))
            inside = self.calls.get((phase, True))
            if before:
                found.append(_function(f"prelude{phase}", "", "", before))
                steps.append(f"prelude{phase}(t);")
            if inside:
                start = "const int64_t start = k * t.rows, "
                first = start + "rows = std::min(t.rows, t.size[0] - start);"
                found.append(_function(f"chunk{phase}", ", int64_t k", first, inside))
                steps.append(f"each([&](int64_t k) {{ chunk{phase}(t, k); }});")
                ended = [part for part in self.phases.parts if part.when[:2] == (phase, True)]
                lines = [self._combination(i) for part in ended for i in part.writes]
                steps += [line for line in lines if line]
        for i, j in self.phases.moves:
            kept = self.phases.kept[j]
            size = f"{kept.dtype.itemsize} * {_length(kept.axes)}"
            steps.append(f"std::memcpy((void*)t.row[{i - 1}], {self._place(j)}, {size});")
        results = [
            f"parts[{outputs} * i + {j}] = (double)*{self._kept(i, False)};"
            for j, i in enumerate(self.phases.results)
        ]
        found.append(
            DRIVER.format(
                symbol=symbol,
                sizes=self.signature.sizes,
                places=self.offset,
                columns=self.offset + len(self.layout),
                width=len(self.signature.axes) - 1,
                outputs=outputs,
                steps="\n        ".join([*steps, *results]),
                wide=type_of(torch.empty(0, dtype=self.signature.numbers[1])),
            )
        )
        return "\n".join(found)

    def _combination(self, i: int) -> str:
        kept = self.phases.kept[i]
        if kept.combined is None:
            return ""
        kind = CTYPES[kept.dtype]
        total, parts = self._kept(i, False), f"({kind}*){self._place(self.parts[i])}"
        return (
            f"combine<{kind}, {kept.combined}>({total}, {parts}, t.chunks, {_length(kept.axes)});"
        )


def _function(name: str, more: str, first: str, lines: list[str]) -> str:
    body = "\n    ".join([first, *lines] if first else ["const int64_t rows = 0;", *lines])
    return f"static void {name}(const Tensor& t{more})\n{{\n    {body}\n}}\n"


def _mask(axes: Sequence[int]) -> int:
    return sum(1 << axis for axis in axes)


def _indices(mask: int) -> list[int]:
    return [i for i in range(MOST) if mask >> i & 1]


def _length(axes: Sequence[int]) -> str:
    return " * ".join(["1", *[f"t.size[{axis}]" for axis in axes]])


HEAD = """
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#include <omp.h>

typedef void* (*Reader)(void*);

/* A tensor: its sizes, the rows of a chunk, how many chunks there are, and where values lie. */
struct Tensor {
    const int64_t* size;
    int64_t rows, chunks;
    const int64_t* at;
    char* scratch;
    const int64_t* row;
    int64_t grad;
    char* numbers;
};

struct sum { static double of(double a, double b) { return a + b; } };
struct max { static double of(double a, double b) { return a > b || a != a ? a : b; } };
struct min { static double of(double a, double b) { return a < b || a != a ? a : b; } };

/* Put together what the chunks have left, in their order. */
template <typename T, typename How>
static void combine(T* total, const T* parts, int64_t chunks, int64_t length)
{
    const int64_t width = 64;
    double sums[width];
    for (int64_t at = 0; at < length; at += width) {
        const int64_t here = std::min(width, length - at);
        for (int64_t j = 0; j < here; ++j) sums[j] = (double)parts[at + j];
        for (int64_t k = 1; k < chunks; ++k)
            for (int64_t j = 0; j < here; ++j)
                sums[j] = How::of(sums[j], (double)parts[k * length + at + j]);
        for (int64_t j = 0; j < here; ++j) total[at + j] = (T)sums[j];
    }
}
"""

DRIVER = """
extern "C" void {symbol}(const int64_t* call)
{{
    const int64_t* table = (const int64_t*)call[0];
    const int64_t large = call[1], count = call[4], threads = call[6];
    const int64_t* given = (const int64_t*)call[3];
    const int64_t stride = call[9], apart = call[10], alone = call[13];
    double* totals = (double*)call[7];
    const int64_t* order = (const int64_t*)call[11];
    Reader read = (Reader)call[8];
    std::vector<int64_t> grads(given, given + count);
    if (read)
        for (auto& grad : grads) grad = (int64_t)read((void*)grad);
    std::vector<double> parts({outputs} * count);
    auto tensor = [&](int64_t i, int64_t place) {{
        const int64_t* own = table + {columns} * i;
        return Tensor{{own, own[{sizes}], own[{sizes} + 1], own + {places},
                      (char*)call[12] + place * alone, (const int64_t*)call[2] + {width} * i,
                      grads[i], (char*)call[5] + stride * i * sizeof({wide})}};
    }};
    auto step = [&](int64_t i, const Tensor& t, auto each) {{
        {steps}
    }};
    for (int64_t b = 0; b < large; ++b) {{
        const Tensor t = tensor(order[b], 0);
        step(order[b], t, [&](auto chunk) {{
            #pragma omp parallel for num_threads(threads) schedule(dynamic, 2)
            for (int64_t k = 0; k < t.chunks; ++k) chunk(k);
        }});
    }}
    auto whole = [&](int64_t b) {{
        const Tensor t = tensor(order[b], omp_get_thread_num());
        step(order[b], t, [&](auto chunk) {{
            for (int64_t k = 0; k < t.chunks; ++k) chunk(k);
        }});
    }};
    if (threads > 1) {{
        #pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
        for (int64_t b = large; b < count; ++b) whole(b);
    }} else {{
        for (int64_t b = large; b < count; ++b) whole(b);
    }}
    for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < {outputs}; ++j) totals[apart * i + j] += parts[{outputs} * i + j];
}}
"""


def _try(native: Native, body: Body, signature: ShapeSignature) -> None:
    """Raise Unsuitable unless the library does to tensors of several shapes what the rule does."""
    random = torch.Generator().manual_seed(0)
    length, dtype = signature.numbers
    numbers = torch.rand(length, generator=random).add_(0.1).to(dtype)
    shapes = [shape[: signature.sizes] for shape in TRIED]
    real = [
        [
            empty(axes, shape, kind).copy_(
                torch.rand(empty(axes, shape, kind).shape, generator=random).add_(0.1)
            )
            for axes, kind in zip(signature.axes, signature.dtypes, strict=True)
        ]
        for shape in shapes
    ]
    expected = [[x.clone() for x in leaf] for leaf in real]
    with torch.no_grad():
        sums = [body([leaf], numbers) for leaf in expected]
    rows = array.array("q", [x.data_ptr() for _, *mine in real for x in mine])
    launch = ShapedLaunch(native, shapes, rows, 1, dtype, each=True, chunk=16)
    every = numbers.expand(len(real), -1).contiguous()
    totals = torch.tensor(launch.with_rows([g for g, *_ in real], every), dtype=torch.float64)
    wanted = torch.tensor([[float(x) for x in own] for own in sums], dtype=torch.float64)
    compare(
        [*[x for leaf in real for x in leaf], totals],
        [*[x for leaf in expected for x in leaf], wanted.reshape(totals.shape)],
    )
