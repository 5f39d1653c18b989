"""From a rule's body to a graph, and from the graph to Inductor's own callable."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

Body = Callable[[list[list[Tensor]], Tensor], Any]
"""What a kernel does: `body(leaves, numbers)`, writing results into the tensors of the leaves."""

BLOCK = 1 << 12
"""Elements that a kernel of any size does at once.

Up to here Inductor sums plainly, beyond it in cascades; and it is a multiple of every vector width,
so that an element's result does not depend on where a block begins.
"""


OF_MATRICES = ("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm", "aten.linalg", "aten._linalg")
"""What the names of operations on whole matrices begin with."""


class Signature(NamedTuple):
    """What a kernel is specialized on, beside its code.

    leaves: for each leaf the dtypes of its tensors. shapes: for each leaf the (shape, strides) of
    its tensors, or None if a leaf is seen as 1-D, of any size up to a block. numbers: length of the
    vector of numbers, and its dtype. threads: 1 for a serial kernel. packed: the slots that are
    unpacked for the kernel, for native ones.
    """

    leaves: tuple[tuple[torch.dtype, ...], ...]
    shapes: tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], ...] | None
    numbers: tuple[int, torch.dtype]
    device: torch.device
    threads: int
    packed: tuple[PackedSlot, ...] = ()


class PackedSlot(NamedTuple):
    """A slot that a kernel sees unpacked.

    at: the index of the slot among the tensors of a leaf. codec: with blocks of a fixed size. key:
    where the key of the step is among the numbers; None: it rounds to the nearest. parts: how many
    tensors it is stored in.
    """

    at: int
    codec: Any
    key: int | None
    parts: int


class Trace(NamedTuple):
    """A body as a graph of tensor operations, with what Inductor needs beside it."""

    graph: Any
    inputs: list[Any]
    mode: Any


def split_leaves(args: Sequence[Any], signature: Signature) -> list[list[Tensor]]:
    """A flat list of tensors, leaf by leaf."""
    leaves, at = [], 0
    for dtypes in signature.leaves:
        leaves.append(list(args[at : at + len(dtypes)]))
        at += len(dtypes)
    return leaves


def trace(body: Body, signature: Signature) -> Trace:
    """Record what a body does to leaves. Inputs: a size per leaf of any size, then tensors, then
    the numbers."""
    dynamic = signature.shapes is None
    hints = [1_000 + i for i in range(len(signature.leaves))] if dynamic else []

    def made(sizes: list[Any]) -> list[Tensor]:
        return [
            torch.empty_strided(shape, strides, dtype=dtype, device=signature.device)
            for i, dtypes in enumerate(signature.leaves)
            for (shape, strides), dtype in zip(
                [((sizes[i],), (1,))] * len(dtypes)
                if signature.shapes is None
                else signature.shapes[i],
                dtypes,
                strict=True,
            )
        ]

    def flat(sizes: list[Any], tensors: list[Tensor], numbers: Tensor) -> Any:
        return body(split_leaves(tensors, signature), numbers)

    return record(flat, hints, made, signature.numbers, signature.device)


def record(
    function: Callable[[list[Any], list[Tensor], Tensor], Any],
    hints: Sequence[int],
    made: Callable[[list[Any]], list[Tensor]],
    numbers: tuple[int, torch.dtype],
    device: torch.device,
    decompositions: dict[Any, Callable[..., Any]] | None = None,
) -> Trace:
    """A function of sizes, tensors and numbers as a graph, without Dynamo.

    Args:
        hints: a size for each that is to stay open; the graph holds for every size above 1.
        made: from sizes to the tensors.
        numbers: length and dtype of the vector of numbers.
        decompositions: of operations, before Inductor's own.
    """
    from torch._dynamo.source import ConstantSource
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv(duck_shape=False, specialize_zero_one=True)
    mode = FakeTensorMode(shape_env=env)
    sizes: list[Any] = []
    for i, hint in enumerate(hints):
        symbol = env.create_symbol(hint, ConstantSource(f"size{i}"), dynamic_dim=DimDynamic.DYNAMIC)
        sizes.append(env.create_symintnode(symbol, hint=hint, source=None))
    with mode:
        tensors = made(sizes)
        length, dtype = numbers
        vector = torch.empty(length, dtype=dtype, device=device)

    def flat(*args: Any) -> Any:
        return function(list(args[: len(sizes)]), list(args[len(sizes) : -1]), args[-1])

    inputs = [*sizes, *tensors, vector]
    # Inductor's own goes through a function that takes no symbolic sizes (seen with torch 2.13)
    table = {**select_decomp_table(), torch.ops.aten.lerp.Tensor: _lerp, **(decompositions or {})}
    with mode, torch.no_grad():
        graph = make_fx(flat, tracing_mode="real", decomposition_table=table)(*inputs)
    return Trace(graph, inputs, mode)


def _lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    """torch.lerp as it is computed: from the nearer end, so that weights 0 and 1 are exact."""
    near = weight.abs() < 0.5
    return torch.where(near, start, end) + torch.where(near, weight, weight - 1) * (end - start)


def lower(
    traced: Trace, threads: int, *, chunked: bool = False, **options: Any
) -> Callable[[list[Any]], Any]:
    """Inductor's callable for a graph: it takes one flat list like the trace's inputs.

    Args:
        traced: the graph.
        threads: 1 for a serial callable.
        chunked: it sees at most a chunk of a tensor, never nothing.
        options: more settings of Inductor.

    Raises:
        RuntimeError: if it would hold for some sizes only.
    """
    with quiet():
        from torch._inductor.compile_fx import compile_fx_inner
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.virtualized import V

    settings = {
        "size_asserts": False,
        "alignment_asserts": False,
        "emulate_precision_casts": True,
        "cpp.threads": threads,
        "cpp.dynamic_threads": False,
        **options,
    }
    with (
        config.patch(settings),
        V.set_fake_mode(traced.mode),
        tracing(TracingContext(traced.mode)),
        torch.no_grad(),
    ):
        kernel = compile_fx_inner(
            traced.graph, traced.inputs, is_inference=True, static_input_idxs=[]
        )
    check_guards(traced, (1, 97, BLOCK) if chunked else (0, BLOCK), sums=chunked)
    return kernel


def lower_with_products(traced: Trace, threads: int) -> Callable[[list[Any]], Any]:
    """`lower` for a graph that may multiply or decompose matrices.

    What such a graph writes is written behind it: Inductor of torch 2.11 may overwrite a matrix
    before a product that reads it.
    """
    nodes = list(traced.graph.graph.nodes)
    last, copy = nodes[-1], torch.ops.aten.copy_.default
    writes = [x for x in nodes if x.target is copy and x.args[0].op == "placeholder"]
    multiplies = any(str(x.target).startswith(OF_MATRICES) for x in nodes)
    if not multiplies or not writes or nodes[-1 - len(writes) : -1] != writes:
        return lower(traced, threads)
    inputs = [x for x in nodes if x.op == "placeholder"]
    places = [inputs.index(x.args[0]) for x in writes]
    outputs = tuple(last.args[0] or ())
    last.args = ((*outputs, *[x.args[1] for x in writes]),)
    for x in writes:
        traced.graph.graph.erase_node(x)
    traced.graph.recompile()
    kernel = lower(traced, threads)

    def run(args: list[Any]) -> Any:
        own = [args[i] for i in places]
        results = kernel(args)
        for x, new in zip(own, results[len(outputs) :], strict=True):
            x.copy_(new)
        return results[: len(outputs)]

    return run


def check_guards(traced: Trace, sizes: Sequence[int], *, sums: bool = False) -> None:
    """Raise RuntimeError if a graph holds for some sizes only.

    sizes: with which it is looked at. sums: it may be meant for few entries, beyond which Inductor
    would sum in cascades.
    """
    for guard in traced.mode.shape_env.guards:
        if sums and BLOCK in guard.expr.atoms():
            continue
        for size in sizes:
            if guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, size)) != True:  # noqa: E712
                raise RuntimeError(f"the kernel holds only where {guard.expr}")


@contextmanager
def quiet() -> Iterator[None]:
    """Inductor's imports, and Triton as it compiles, warn of deprecated forms in their own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
