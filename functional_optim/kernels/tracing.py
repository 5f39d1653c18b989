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


class Signature(NamedTuple):
    """What a kernel is specialized on, beside its code.

    leaves: for each leaf the dtypes of its tensors. shapes: for each leaf the (shape, strides) of
    its tensors, or None if a leaf is seen as 1-D, of any size up to a block. numbers: length of the
    vector of numbers, and its dtype. threads: 1 for a serial kernel.
    """

    leaves: tuple[tuple[torch.dtype, ...], ...]
    shapes: tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], ...] | None
    numbers: tuple[int, torch.dtype]
    device: torch.device
    threads: int


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
    """Record what a body does, without Dynamo. Inputs: a size per leaf of any size, then tensors,
    then the numbers."""
    from torch._dynamo.source import ConstantSource
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv(duck_shape=False, specialize_zero_one=True)
    mode = FakeTensorMode(shape_env=env)
    sizes: list[Any] = []
    tensors: list[Any] = []
    with mode:
        for i, dtypes in enumerate(signature.leaves):
            if signature.shapes is None:
                hint = 1_000 + i
                symbol = env.create_symbol(
                    hint, ConstantSource(f"size{i}"), dynamic_dim=DimDynamic.DYNAMIC
                )
                size = env.create_symintnode(symbol, hint=hint, source=None)
                sizes.append(size)
                layouts: Any = [((size,), (1,))] * len(dtypes)
            else:
                layouts = signature.shapes[i]
            tensors += [
                torch.empty_strided(shape, strides, dtype=dtype, device=signature.device)
                for (shape, strides), dtype in zip(layouts, dtypes, strict=True)
            ]
        length, dtype = signature.numbers
        numbers = torch.empty(length, dtype=dtype, device=signature.device)
    known = len(sizes)

    def flat(*args: Any) -> Any:
        return body(split_leaves(args[known:-1], signature), args[-1])

    inputs = [*sizes, *tensors, numbers]
    # Inductor's own goes through a function that takes no symbolic sizes (seen with torch 2.13)
    table = {**select_decomp_table(), torch.ops.aten.lerp.Tensor: _lerp}
    with mode, torch.no_grad():
        graph = make_fx(flat, tracing_mode="real", decomposition_table=table)(*inputs)
    return Trace(graph, inputs, mode)


def _lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    """torch.lerp as it is computed: from the nearer end, so that weights 0 and 1 are exact."""
    near = weight.abs() < 0.5
    return torch.where(near, start, end) + torch.where(near, weight, weight - 1) * (end - start)


def lower(traced: Trace, threads: int, **options: Any) -> Callable[[list[Any]], Any]:
    """Inductor's callable for a graph: it takes one flat list like the trace's inputs.

    Raises:
        RuntimeError: if it would hold for some sizes up to a block only.
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
    for guard in traced.mode.shape_env.guards:
        for size in (0, BLOCK):
            if guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, size)) != True:  # noqa: E712
                raise RuntimeError(f"the kernel holds only where {guard.expr}")
    return kernel


@contextmanager
def quiet() -> Iterator[None]:
    """Inductor's imports warn of torch's own deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
