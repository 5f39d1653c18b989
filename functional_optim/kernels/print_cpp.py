"""A graph as C++: loops over the elements of many tensors, with no header of torch.

A library has one function. It takes an array of integers, most of them addresses (`LAYOUT` names
them), and steps all tensors in one call. Sums are taken in float64 and rounded once; those of the
chunks of a tensor are added in the order of the chunks, so they do not depend on the number of
threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from functional_optim.kernels import ops
from functional_optim.kernels.cuts import Nest, Plan
from functional_optim.kernels.graph import Graph, Node, Unsuitable

STORED = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "uint16_t",
    torch.float16: "uint16_t",
    torch.bool: "uint8_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.float8_e4m3fn: "uint8_t",
    torch.float8_e5m2: "uint8_t",
}
"""The C++ type of an element in memory."""

VALUE = {**STORED, torch.bfloat16: "float", torch.float16: "float", torch.bool: "bool"}
"""That of a value: half types are floats that are rounded."""

HALF = {torch.bfloat16: "bf16", torch.float16: "fp16"}

SYMBOL = "SYMBOL"
"""Stands for the name of a library's function, which has the digest of the text in it."""

BLOCK = 1 << 12
"""Elements of a chunk of a tensor that is seen as 1-D."""


class Cpp:
    """A printer: primitives as C++, and the lines that give names to texts."""

    def __init__(self, lines: list[str], names: Iterable[int]) -> None:
        self.lines = lines
        self.names = iter(names)
        self.dtype = torch.float32

    add, sub, mul, div = (lambda self, x, y, _s=s: f"({x} {_s} {y})" for s in "+-*/")
    lt, le, gt, ge, eq, ne = (
        lambda self, x, y, _s=s: f"({x} {_s} {y})" for s in ("<", "<=", ">", ">=", "==", "!=")
    )
    bitand, bitor, bitxor, shl, shr = (
        lambda self, x, y, _s=s: f"({x} {_s} {y})" for s in ("&", "|", "^", "<<", ">>")
    )

    def neg(self, x: str) -> str:
        return f"(-{x})"

    def not_(self, x: str) -> str:
        return f"(!{x})" if self.dtype is torch.bool else f"(~{x})"

    def abs(self, x: str) -> str:
        if self.dtype.is_floating_point:
            return f"__builtin_fabs{self._f()}({x})"
        return f"({x} < 0 ? -{x} : {x})"

    def sqrt(self, x: str) -> str:
        return f"__builtin_sqrt{self._f()}({x})"

    def fma(self, x: str, y: str, z: str) -> str:
        return f"__builtin_fma{self._f()}({x}, {y}, {z})"

    def maximum(self, x: str, y: str) -> str:
        if not self.dtype.is_floating_point:
            return f"({x} > {y} ? {x} : {y})"
        return f"({x} > {y} || {x} != {x} ? {x} : {y})"

    def minimum(self, x: str, y: str) -> str:
        if not self.dtype.is_floating_point:
            return f"({x} < {y} ? {x} : {y})"
        return f"({x} < {y} || {x} != {x} ? {x} : {y})"

    def select(self, c: str, x: str, y: str) -> str:
        return f"({c} ? {x} : {y})"

    def call(self, name: str, *x: str) -> str:
        return f"__builtin_{name}{self._f()}({', '.join(x)})"

    def const(self, x: Any) -> str:
        return constant(x, self.dtype)

    def let(self, x: str) -> str:
        name = f"s{next(self.names)}"
        self.lines.append(f"const auto {name} = {x};")
        return name

    def _f(self) -> str:
        return "" if self.dtype is torch.float64 else "f"


def cast(x: str, old: torch.dtype, new: torch.dtype) -> str:
    """A value in another dtype."""
    if old is new or (old in HALF and new is torch.float32):
        return x
    if new in HALF:
        return f"to_{HALF[new]}((float){x})"
    if new is torch.bool:
        return f"({x} != 0)"
    return f"({VALUE[new]}){x}"


def constant(x: Any, dtype: torch.dtype) -> str:
    """A number in a dtype."""
    if dtype is torch.bool:
        return "true" if x else "false"
    if not dtype.is_floating_point:
        return f"({VALUE[dtype]}){int(x)}LL"
    value, kind = float(x), VALUE[dtype]
    if value != value:
        return f'({kind})__builtin_nan("")'
    if math.isinf(value):
        return f"({kind}){'-' if value < 0 else ''}__builtin_inf()"
    if dtype is not torch.float64:
        value = float(torch.tensor(value, dtype=dtype))
    return f"({kind}){value.hex()}" if math.isfinite(value) else constant(value, torch.float64)


def expression(b: Cpp, node: Node, name: Any) -> str:
    """What a node is, of operands whose names `name` tells."""
    op = node.op
    if op == "const":
        return constant(node.args[0], node.dtype)
    kind = ops.kind(op)
    if kind == "fill":
        value = ops.filled(op, node.args)
        if isinstance(value, Node):
            return cast(name(value), value.dtype, node.dtype)
        return constant(value, node.dtype)
    if kind == "view" or op in ops.SAME or kind == "reduce":
        (x,) = [x for x in node.args[:1]]
        return cast(name(x), x.dtype, node.dtype)
    if op == ops.CAST:
        return cast(name(node.args[0]), node.args[0].dtype, node.dtype)
    if op == ops.BITS:
        x = node.args[0]
        return f"{_bits(node.dtype)}({_raw(name(x), x.dtype)})"
    if op not in ops.POINT:
        raise Unsuitable(f"the operation {op}", node.rule)
    b.dtype = ops.computed_in(node)
    condition = ops.CHOICES.get(op)

    def operand(x: Any, place: Any) -> str | None:
        if x is None:
            return None
        if not isinstance(x, Node):
            return constant(x, b.dtype)
        return name(x) if place == condition else cast(name(x), x.dtype, b.dtype)

    given = [operand(x, i) for i, x in enumerate(node.args)]
    named = {k: operand(x, k) for k, x in node.kwargs.items() if k in NAMED}
    text = ops.POINT[op](b, node, *given, **named)
    return cast(text, torch.float32, node.dtype) if node.dtype in HALF else text


NAMED = ("alpha", "value", "min", "max")


def _bits(dtype: torch.dtype) -> str:
    return f"from_{HALF[dtype]}" if dtype in HALF else f"as<{VALUE[dtype]}>"


def _raw(x: str, dtype: torch.dtype) -> str:
    return f"{HALF[dtype]}_bits({x})" if dtype in HALF else x


def load(text: str, dtype: torch.dtype) -> str:
    """An element in memory as a value."""
    return f"from_{HALF[dtype]}({text})" if dtype in HALF else text


def stored(text: str, dtype: torch.dtype) -> str:
    """A value as an element in memory."""
    return f"{HALF[dtype]}_bits({text})" if dtype in HALF else text


HEAD = r"""
#include <cstdint>
#include <cstdlib>
#include <cstring>
#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_thread_num() { return 0; }
#endif

typedef void* (*Reader)(void*);

template <class A, class B> static inline A as(B x)
{ static_assert(sizeof(A) == sizeof(B), ""); A a; memcpy(&a, &x, sizeof(A)); return a; }
static inline float from_bf16(uint16_t x) { return as<float>((uint32_t)x << 16); }
static inline uint16_t bf16_bits(float x) { return (uint16_t)(as<uint32_t>(x) >> 16); }
static inline float to_bf16(float x)
{
    const uint32_t u = as<uint32_t>(x), r = (u + 0x7fffu + ((u >> 16) & 1)) & 0xffff0000u;
    return as<float>(x != x ? 0x7fc00000u : r);
}
static inline float from_fp16(uint16_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x8000u) << 16, rest = (uint32_t)(x & 0x7fffu) << 13;
    const uint32_t scaled = as<uint32_t>(as<float>(rest) * 0x1p112f);
    return as<float>(sign | (rest >= 0x0f800000u ? rest | 0x7f800000u : scaled));
}
static inline uint16_t fp16_bits(float x)
{
    const uint32_t u = as<uint32_t>(x), sign = (u >> 16) & 0x8000u, size = u & 0x7fffffffu;
    const uint32_t small = as<uint32_t>(as<float>(size) + 0.5f) - 0x3f000000u;
    const uint32_t usual = (size + 0xc8000fffu + ((size >> 13) & 1)) >> 13;
    const uint32_t large = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return (uint16_t)(sign | (size >= 0x47800000u ? large : size < 0x38800000u ? small : usual));
}
static inline float to_fp16(float x) { return from_fp16(fp16_bits(x)); }

struct Tensor {
    const int64_t* size;      /* of the axes, the rows of a chunk, and how many chunks there are */
    const int64_t* at;        /* where kept values lie in the scratch memory */
    const int64_t* row;       /* addresses of the parameter and its slots */
    const double* numbers;
    char* scratch;
    void* grad;
};

struct Sum { static double of(double a, double b) { return a + b; } };
struct Max { static double of(double a, double b) { return a > b || a != a ? a : b; } };
struct Min { static double of(double a, double b) { return a < b || a != a ? a : b; } };

/* Put together what the chunks have left, in their order. */
template <class How, class T>
static void combine(T* total, const T* parts, int64_t chunks, int64_t length)
{
    for (int64_t j = 0; j < length; ++j) total[j] = parts[j];
    for (int64_t k = 1; k < chunks; ++k)
        for (int64_t j = 0; j < length; ++j)
            total[j] = (T)How::of((double)total[j], (double)parts[k * length + j]);
}
"""

BLOCKS = """
extern "C" void {symbol}(const int64_t* call)
{{
    const int64_t* blocks = (const int64_t*)call[0];
    const int64_t count = call[1], tensors = call[4], threads = call[6], apart = call[10];
    const int64_t* rows = (const int64_t*)call[2];
    const int64_t* given = (const int64_t*)call[3];
    double* totals = (double*)call[7];
    const Reader read = (Reader)call[8];
    int64_t* grads = (int64_t*)malloc(8 * tensors + 8);
    for (int64_t i = 0; i < tensors; ++i)
        grads[i] = read ? (int64_t)read((void*)given[i]) : given[i];
    double* parts = (double*)calloc({outputs} * count + 1, 8);
    auto block = [&](int64_t b) {{
        const int64_t i = blocks[3 * b];
        const Tensor t = {{nullptr, nullptr, rows + {width} * i, (const double*)call[5], nullptr,
                          (void*)grads[i]}};
        chunk0(t, blocks[3 * b + 1], blocks[3 * b + 2], parts + {outputs} * b);
    }};
    if (threads > 1) {{
        const int64_t least = count < 1024 ? 1 : 8; /* of few blocks, eight are a long wait */
        #pragma omp parallel for num_threads(threads) schedule(guided, least)
        for (int64_t b = 0; b < count; ++b) block(b);
    }} else {{
        for (int64_t b = 0; b < count; ++b) block(b);
    }}
    for (int64_t b = 0; b < count; ++b)
        for (int64_t i = 0; i < {outputs}; ++i)
            totals[apart * blocks[3 * b] + i] += parts[{outputs} * b + i];
    free(parts);
    free(grads);
}}
"""

PHASES = """
extern "C" void {symbol}(const int64_t* call)
{{
    const int64_t* table = (const int64_t*)call[0];
    const int64_t large = call[1], count = call[4], threads = call[6];
    const int64_t* given = (const int64_t*)call[3];
    const int64_t apart = call[10], alone = call[13];
    double* totals = (double*)call[7];
    const int64_t* order = (const int64_t*)call[11];
    const Reader read = (Reader)call[8];
    int64_t* grads = (int64_t*)malloc(8 * count + 8);
    for (int64_t i = 0; i < count; ++i)
        grads[i] = read ? (int64_t)read((void*)given[i]) : given[i];
    double* parts = (double*)calloc({outputs} * count + 1, 8);
    auto tensor = [&](int64_t i, int64_t place) {{
        const int64_t* own = table + {columns} * i;
        return Tensor{{own, own + {places}, (const int64_t*)call[2] + {width} * i,
                      (const double*)call[5], (char*)call[12] + place * alone, (void*)grads[i]}};
    }};
    auto step = [&](const Tensor& t, double* found, auto each) {{
        {steps}
    }};
    for (int64_t b = 0; b < large; ++b) {{
        const Tensor t = tensor(order[b], 0);
        const int64_t chunks = t.size[{axes} + 1];
        step(t, parts + {outputs} * order[b], [&](auto chunk) {{
            #pragma omp parallel for num_threads(threads) schedule(dynamic, 2)
            for (int64_t k = 0; k < chunks; ++k) chunk(k);
        }});
    }}
    auto whole = [&](int64_t b) {{
        const Tensor t = tensor(order[b], omp_get_thread_num());
        const int64_t chunks = t.size[{axes} + 1];
        step(t, parts + {outputs} * order[b], [&](auto chunk) {{
            for (int64_t k = 0; k < chunks; ++k) chunk(k);
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
    free(parts);
    free(grads);
}}
"""

WHOLE, PARTS = range(2)
"""Scratch memory for a value, and for what each chunk leaves of it."""


class Kept:
    """A value in scratch memory. place: in the table of places. parts: of what the chunks leave."""

    def __init__(self, node: Node, place: int, parts: int | None, kind: str, how: str) -> None:
        self.node = node
        self.place = place
        self.parts = parts
        self.kind = kind
        self.how = how


class Source:
    """The text of a library, and how it is to be called.

    blocks: whether a call goes over blocks of tensors that are seen as 1-D, else over tensors.
    axes: how many sizes a tensor has. layout: for each value in scratch memory the bytes of an
    element, the axes as bits, and whether it is `WHOLE` or `PARTS`. outputs: how many sums a call
    returns.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.plan = Plan(graph)
        self.axes = len(graph.sizes)
        self.outputs = len(graph.results)
        self.written = {i for i, _ in graph.stores}
        self.layout: list[tuple[int, int, int]] = []
        self.kept: dict[Node, Kept] = {}
        self.functions: list[str] = []
        self.counter = iter(range(1 << 30))
        for node in graph.nodes:
            if node.op == "input" and node.dtype not in STORED:
                raise Unsuitable(f"a tensor of {node.dtype}")
            if node.dtype not in VALUE:
                raise Unsuitable(f"a value in {node.dtype}", node.rule)
        self.blocks = self._is_blocks()
        self._keep()
        steps = self._steps()
        self.text = HEAD + "\n".join(self.functions) + self._driver(steps)

    def _is_blocks(self) -> bool:
        """Whether all chunks are computed by themselves, but for sums that are results."""
        if self.axes != 1:
            return False
        ends = [x for x in self.plan.kept if self.plan.reduces(x)]
        sums = all(ops.REDUCE[x.op] == "sum" for x in ends)
        return sums and set(ends) == set(self.graph.results) | set() and not (
            ends and self.graph.stores
        )

    def _keep(self) -> None:
        for node in self.plan.kept:
            how = ops.REDUCE[node.op] if self.plan.reduces(node) else ""
            kind = _accumulator(node, how)
            place = len(self.layout)
            size = 8 if kind in ("double", "int64_t") else 4 if kind in ("float", "int32_t") else 1
            self.layout.append((size, _mask(node.axes), WHOLE))
            parts = None
            if how and self.plan.ends(node):
                parts = len(self.layout)
                self.layout.append((size, _mask(node.axes), PARTS))
            self.kept[node] = Kept(node, place, parts, kind, how)

    def _steps(self) -> str:
        lines: list[str] = []
        for k, phase in enumerate(self.plan.phases):
            if phase.prelude:
                self._function(f"prelude{k}", k, phase.prelude, chunked=False)
                lines.append(f"prelude{k}(t);")
            if phase.rows:
                self._function(f"chunk{k}", k, phase.rows, chunked=True)
                if not self.blocks:
                    rows = f"t.size[{self.axes}]"
                    last = f"(k + 1) * {rows} < t.size[0] ? {rows} : t.size[0] - k * {rows}"
                    lines.append(f"each([&](int64_t k) {{ chunk{k}(t, k * {rows}, {last}, k); }});")
                for node in [x for nest in phase.rows for x in nest.reduced]:
                    if self.plan.ends(node):
                        lines.append(self._combination(node))
        if self.outputs and not self.blocks:
            self._results()
            lines.append("results(t, found);")
        return "\n        ".join(lines)

    def _combination(self, node: Node) -> str:
        kept = self.kept[node]
        how = {"max": "Max", "any": "Max", "min": "Min", "all": "Min"}.get(kept.how, "Sum")
        total = f"({kept.kind}*)(t.scratch + t.at[{kept.place}])"
        parts = f"(const {kept.kind}*)(t.scratch + t.at[{kept.parts}])"
        length = " * ".join(["1", *[f"t.size[{i}]" for i in node.axes]])
        return f"combine<{how}>({total}, {parts}, t.size[{self.axes} + 1], {length});"

    def _results(self) -> None:
        function = Function(self, len(self.plan.phases), chunked=False)
        lines = [
            f"found[{i}] = (double){function.scalar(x)};" for i, x in enumerate(self.graph.results)
        ]
        body = "\n    ".join([*function.head(), *function.scalars, *lines])
        self.functions.append(
            f"static void results(const Tensor& t, double* found)\n{{\n    {body}\n}}\n"
        )

    def _function(self, name: str, phase: int, nests: Sequence[Nest], *, chunked: bool) -> None:
        function = Function(self, phase, chunked=chunked)
        lines = function.nests(nests)
        body = "\n    ".join([*function.head(), *function.scalars, *function.before, *lines])
        arguments = "const Tensor& t"
        if chunked:
            last = "double* __restrict__ found" if self.blocks else "const int64_t k"
            arguments += f", const int64_t start, const int64_t length, {last}"
        self.functions.append(
            f"static __attribute__((noinline)) void {name}({arguments})\n{{\n    {body}\n}}\n"
        )

    def _driver(self, steps: str) -> str:
        width = len(self.graph.inputs) - 1 + len(self.graph.places)
        if self.blocks:
            return BLOCKS.format(symbol=SYMBOL, width=width, outputs=self.outputs)
        return PHASES.format(
            symbol=SYMBOL,
            axes=self.axes,
            places=self.axes + 2,
            columns=self.axes + 2 + len(self.layout),
            width=width,
            outputs=self.outputs,
            steps=steps,
        )


def _accumulator(node: Node, how: str) -> str:
    """The C++ type in which a value is kept."""
    if how in ("sum", "mean"):
        return "double" if node.dtype.is_floating_point else "int64_t"
    if how in ("any", "all"):
        return "int32_t"
    kind = VALUE[node.dtype]
    return {"bool": "uint8_t", "int16_t": "int32_t", "int8_t": "int32_t", "uint8_t": "int32_t"}.get(
        kind, kind
    )


def _mask(axes: Sequence[int]) -> int:
    return sum(1 << axis for axis in axes)


class Around(NamedTuple):
    """Lines around loops: before all of them, and before and behind the innermost one."""

    first: list[str]
    before: list[str]
    behind: list[str]


class Function:
    """The lines of a prelude, or of a pass over some rows.

    scalars: what is the same for all elements. before: what comes before the loops.
    """

    def __init__(self, source: Source, phase: int, *, chunked: bool) -> None:
        self.source = source
        self.graph = source.graph
        self.plan = source.plan
        self.phase = phase
        self.chunked = chunked
        self.scalars: list[str] = []
        self.before: list[str] = []
        self.names: dict[Node, str] = {}
        self.pointers: dict[str, str] = {}

    def head(self) -> list[str]:
        """Pointers and sizes."""
        count = self.source.axes if not self.source.blocks else 0
        sizes = [f"const int64_t n{i} = t.size[{i}];" for i in range(count)]
        return [*sizes, *self.pointers.values()]

    def scalar(self, node: Node) -> str:
        """The name of a value without axes."""
        if node not in self.names:
            lines: list[str] = []
            text = self._value(node, lines, self.scalar, "0")
            self.scalars += lines
            self.scalars.append(f"const {VALUE[node.dtype]} v{node.index} = {text};")
            self.names[node] = f"v{node.index}"
        return self.names[node]

    def _value(self, node: Node, lines: list[str], name: Any, index: str) -> str:
        """The text of a value at an index. name: of its operands."""
        if node.op == "input":
            return load(f"{self._pointer(node)}[{index}]", node.dtype)
        if node.op == "number":
            return f"t.numbers[{node.args[0]}]"
        if node.op == "row":
            width = len(self.graph.inputs) - 1
            return f"as<double>(t.row[{width + node.args[0]}])"
        if node in self.source.kept:
            return self._kept(node, index)
        return expression(Cpp(lines, self.source.counter), node, name)

    def _kept(self, node: Node, index: str) -> str:
        kept = self.source.kept[node]
        text = f"{self._place(kept.place, kept.kind, f'k{node.index}')}[{index}]"
        if kept.how == "mean":
            gone = [i for i in next(node.operands()).axes if i not in node.axes]
            text = f"({text} / (double)({' * '.join([f'n{i}' for i in gone])}))"
        if node.dtype in HALF:
            return f"to_{HALF[node.dtype]}((float){text})"
        if node.dtype is torch.bool:
            return f"({text} != 0)"
        return f"({VALUE[node.dtype]}){text}"

    def _pointer(self, node: Node) -> str:
        i = node.args[0]
        kind = STORED[node.dtype]
        const = "" if i in self.source.written else "const "
        at = "t.grad" if i == 0 else f"t.row[{i - 1}]"
        self.pointers[f"p{i}"] = f"{const}{kind}* __restrict__ const p{i} = ({kind}*){at};"
        return f"p{i}"

    def _place(self, place: int, kind: str, name: str, more: str = "") -> str:
        self.pointers[name] = (
            f"{kind}* __restrict__ const {name} = ({kind}*)(t.scratch + t.at[{place}]){more};"
        )
        return name

    def nests(self, nests: Sequence[Nest]) -> list[str]:
        """The lines of loops, one after the other; row by row in a pass over several axes."""
        if not self.chunked:
            return [line for nest in nests for line in self._loops(nest, nest.axes)]
        for nest in nests:
            for node in nest.reduced:
                if self.plan.ends(node) and not self.source.blocks:
                    self._begun(node)
        if self.source.axes == 1:
            return [line for nest in nests for line in self._loops(nest, (0,))]
        lines: list[str] = []
        for nest in nests:
            lines += self._loops(nest, nest.axes[1:])
        return ["for (int64_t i0 = start; i0 < start + length; ++i0) {", *_deeper(lines), "}"]

    def _begun(self, node: Node) -> None:
        """The part of a sum that a chunk adds to, and its first value."""
        kept = self.source.kept[node]
        assert kept.parts is not None
        length = " * ".join(["1", *[f"n{i}" for i in node.axes]])
        name = self._place(kept.parts, kept.kind, f"a{node.index}", f" + k * ({length})")
        self.before.append(
            f"for (int64_t j = 0; j < {length}; ++j) {name}[j] = {_identity(kept)};"
        )

    def _loops(self, nest: Nest, axes: Sequence[int]) -> list[str]:
        """The lines of one nest. axes: those of its own loops."""
        inner = axes[-1] if axes else None
        levels: dict[int, list[str]] = {-1: [], **{axis: [] for axis in nest.axes}}
        names: dict[Node, str] = {}
        goals = [
            *nest.kept,
            *[next(x.operands()) for x in nest.reduced],
            *[value for _, value in nest.stores],
        ]
        fresh = {x for x in nest.kept}

        def name(node: Node) -> str:
            if node not in names:
                if not node.axes:
                    names[node] = self.scalar(node)
                    return names[node]
                level = levels[max(node.axes)]
                index = self._index(node.axes)
                if node in fresh or (
                    node not in self.source.kept and node.op not in ("input", "number")
                ):
                    if node.op == "iota":
                        text = f"({VALUE[node.dtype]}){index}"
                    else:
                        own: list[str] = []
                        for x in node.operands():
                            name(x)
                        text = expression(Cpp(own, self.source.counter), node, name)
                        level += own
                else:
                    text = self._value(node, level, name, index)
                level.append(f"const {VALUE[node.dtype]} v{node.index} = {text};")
                names[node] = f"v{node.index}"
            return names[node]

        for node in goals:
            name(node)
        around = Around([], [], [])
        clauses: list[str] = []
        for node in nest.reduced:
            self._reduce(node, nest, axes, names, levels, around, clauses)
        for node in nest.kept:
            kept = self.source.kept[node]
            place = self._place(kept.place, kept.kind, f"k{node.index}")
            levels[max(node.axes)].append(
                f"{place}[{self._index(node.axes)}] = ({kept.kind}){names[node]};"
            )
        for i, value in nest.stores:
            target = self.graph.inputs[i]
            text = stored(cast(names[value], value.dtype, target.dtype), target.dtype)
            level = levels[max(target.axes)] if target.axes else levels[-1]
            level.append(f"{self._pointer(target)}[{self._index(target.axes)}] = {text};")
        lines: list[str] = []
        for depth in reversed(axes):
            own = [*levels[depth], *lines]
            first, count = f"i{depth} = 0", f"n{depth}"
            if depth == 0 and self.chunked:
                first, count = "i0 = start", "start + length"
            body = [f"for (int64_t {first}; i{depth} < {count}; ++i{depth}) {{", *_deeper(own), "}"]
            if depth == inner:
                pragma = f"#pragma omp simd{''.join(clauses)}"
                body = [*around.before, pragma, *body, *around.behind]
            lines = body
        outer = [
            line
            for depth in (-1, *[x for x in nest.axes if x not in axes])
            for line in levels.get(depth, [])
        ]
        return ["{", *_deeper([*around.first, *outer, *lines]), "}"]

    def _index(self, axes: Sequence[int]) -> str:
        text = "0"
        for k, axis in enumerate(axes):
            text = f"i{axis}" if k == 0 else f"({text}) * n{axis} + i{axis}"
        return text

    def _reduce(
        self,
        node: Node,
        nest: Nest,
        axes: Sequence[int],
        names: dict[Node, str],
        levels: dict[int, list[str]],
        around: Around,
        clauses: list[str],
    ) -> None:
        """Lines that add a value to a reduction."""
        kept = self.source.kept.get(node) or _unkept(node)
        (x,) = [x for x in node.operands()][:1]
        value = f"({kept.kind}){names[x]}"
        if kept.how in ("any", "all"):
            value = f"({kept.kind})({names[x]} != 0)"
        ends = self.plan.ends(node)
        index = self._index(node.axes)
        if self.source.blocks:
            target = f"found[{self.graph.results.index(node)}]"
        elif ends:
            target = f"a{node.index}[{index}]"
        else:
            target = f"{self._place(kept.place, kept.kind, f'k{node.index}')}[{index}]"
        gone = [i for i in x.axes if i not in node.axes]
        if not axes:
            levels[0].append(f"{target} = {_put(kept, target, value)};")
            return
        inner = axes[-1]
        alone = [i for i in axes if i in gone] == [inner] and not ends
        if not ends and not alone:
            line = f"{target} = {_identity(kept)};"
            for i in reversed([i for i in node.axes if i in axes]):
                line = f"for (int64_t i{i} = 0; i{i} < n{i}; ++i{i}) {line}"
            around.first.append(line)
        if inner not in gone:
            levels[inner].append(f"{target} = {_put(kept, target, value)};")
            return
        local = f"r{node.index}"
        floating = kept.kind in ("float", "double")
        nan = kept.how in ("max", "min") and floating
        levels[inner].append(f"{local} = {_put(kept, local, value, nan=nan)};")
        sign = {"max": "max", "min": "min", "any": "max", "all": "min"}.get(kept.how, "+")
        clauses.append(f" reduction({sign}:{local})")
        begin = [f"{kept.kind} {local} = {_identity(kept)};"]
        end = local
        if nan:
            levels[inner].append(f"{local}n |= ({names[x]} != {names[x]});")
            clauses.append(f" reduction(|:{local}n)")
            begin.append(f"int32_t {local}n = 0;")
            end = f"({local}n ? ({kept.kind})__builtin_nan(\"\") : {local})"
        put = f"{target} = {end if alone else _put(kept, target, end)};"
        around.before.extend(begin)
        around.behind.append(put)


def _unkept(node: Node) -> Kept:
    how = ops.REDUCE[node.op]
    return Kept(node, -1, None, _accumulator(node, how), how)


def _identity(kept: Kept) -> str:
    if kept.how in ("sum", "mean", "any"):
        return "0"
    if kept.how == "all":
        return "1"
    if kept.kind in ("float", "double"):
        return f"{'-' if kept.how == 'max' else ''}__builtin_inf()"
    bits = 63 if kept.kind == "int64_t" else 31
    low = f"(-(({kept.kind})1 << {bits - 1}) * 2)"
    return low if kept.how == "max" else f"(-({low} + 1))"


def _put(kept: Kept, a: str, b: str, *, nan: bool = False) -> str:
    """Two parts of a reduction together. nan: those are counted apart."""
    if kept.how in ("max", "any"):
        floating = kept.kind in ("float", "double") and not nan
        return f"({a} > {b} || {a} != {a} ? {a} : {b})" if floating else f"({a} > {b} ? {a} : {b})"
    if kept.how in ("min", "all"):
        floating = kept.kind in ("float", "double") and not nan
        return f"({a} < {b} || {a} != {a} ? {a} : {b})" if floating else f"({a} < {b} ? {a} : {b})"
    return f"{a} + {b}"


def _deeper(lines: Sequence[str]) -> list[str]:
    return [line if line.startswith("#") else f"    {line}" for line in lines]
