"""Packed slots in a kernel: a block of codes becomes floats before the rule, and codes after it.

Inductor writes both from the codec's own functions, for one block. So a slot is in float32 only
while a thread works on some thousand entries of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.kernels.building import Unsuitable, captured
from functional_optim.kernels.tracing import BLOCK, PackedSlot, lower, record

PLAIN = {
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.bfloat16: torch.int16,
}
"""Integers that have the bits of a float: compilers read no classes into vectors."""

PLACES = f"""
static const struct Places {{
    alignas(64) int32_t at[{BLOCK}];
    Places() {{ for (int32_t i = 0; i < {BLOCK}; ++i) at[i] = i; }}
}} places;
"""
"""The places in a block. Inductor counts them in 64 bits, and to halve these takes as long as a
product."""


class Packing(NamedTuple):
    """The source that unpacks and packs a slot.

    functions: before everything else. before, after: the rule's kernel.
    """

    functions: str
    before: str
    after: str


def packing(slot: PackedSlot, row: int, number: str) -> Packing:
    """The source for a slot. row: where its first address is. number: C type of the numbers."""
    codec, i = slot.codec, slot.at
    block = codec.block
    stored = codec.encode_block(torch.zeros(block), None, None)
    dtypes: list[torch.dtype] = [x.dtype for x in stored]
    shapes = [(tuple(x.shape), PLAIN.get(y, y)) for x, y in zip(stored, dtypes, strict=True)]

    def decode(tensors: list[Tensor], numbers: Tensor) -> tuple[Tensor, ...]:
        own = [x.view(dtype) for x, dtype in zip(tensors, dtypes, strict=True)]
        return (codec.cells.decode(tuple(own)),)

    def encode(tensors: list[Tensor], numbers: Tensor) -> tuple[Tensor, ...]:
        if slot.key is None:
            return codec.encode_block(tensors[0], None, None)
        key, start = numbers.unbind()
        return codec.encode_block(tensors[0], tensors[1] + start, key)

    opened = [((block,), torch.float32), ((block,), torch.int32)]
    unpack = _function(f"unpack{i}", decode, shapes, 1)
    pack = _function(f"pack{i}", encode, opened, len(stored))
    lines = [f"alignas(64) float slot{i}[{BLOCK}];"]
    sizes = [x.element_size() * x.numel() for x in stored]
    places = [f"(char*)row[{row + j}] + {n} * (start / {block} + k)" for j, n in enumerate(sizes)]
    addresses = "".join([f"char* at{j} = {place}; " for j, place in enumerate(places)])
    ats = ", ".join([f"at{j}" for j in range(len(stored))])
    head = f"for (int64_t k = 0; k * {block} < length; ++k) {{ {addresses}"
    floats = f"slot{i} + {block} * k"
    short = f"if (length - k * {block} < {block})"
    fill = save = back = ""
    for j, (x, n) in enumerate(zip(stored, sizes, strict=True) if codec.entrywise else ()):
        # the last block ends where the tensor ends
        spare, part = f"spare{i}_{j}", f"(size_t)((length - k * {block}) * {x.element_size()})"
        lines.append(f"alignas(64) char {spare}[{n}];")
        fill += f"{short} {{ memset({spare}, 0, {n}); memcpy({spare}, at{j}, {part}); "
        fill += f"at{j} = {spare}; }} "
        save += f"char* real{j} = at{j}; {short} at{j} = {spare}; "
        back += f"if (real{j} != at{j}) memcpy(real{j}, at{j}, {part}); "
    lines.append(f"{head}{fill}unpack{i}({ats}, {floats}, nullptr); }}")
    seeds = "0, 0" if slot.key is None else f"(int32_t)(({number}*)own)[{slot.key}], (int32_t)at"
    after = f"{head}const int64_t at = start + {block} * k; int32_t seeds[2] = {{{seeds}}}; "
    after += f"{save}pack{i}({floats}, (void*)places.at, {ats}, seeds); {back}}}"
    return Packing(f"{unpack}{pack}", "\n        ".join(lines), after)


def _function(
    name: str,
    function: Callable[[list[Tensor], Tensor], tuple[Tensor, ...]],
    given: list[tuple[tuple[int, ...], torch.dtype]],
    outputs: int,
) -> str:
    """A function of tensors of fixed shapes in C++. Its arguments are addresses: of what is given,
    of the results, and of two integers, null where it reads none.

    Inductor writes plain loops here. Its own vectors read bytes, and the bits of a float, through
    memory, which takes six times as long as what the compiler makes of a loop.

    Raises:
        Unsuitable: if Inductor does more than to run loops over these.
    """

    def made(sizes: list[Any]) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype) for shape, dtype in given]

    def flat(sizes: list[Any], tensors: list[Tensor], numbers: Tensor) -> tuple[Tensor, ...]:
        return function(tensors, numbers)

    cpu = torch.device("cpu")
    traced = record(flat, (), made, (2, torch.int32), cpu)
    scalar: dict[str, Any] = {"cpp.simdlen": 1}
    with captured() as calls:
        kernel = lower(
            traced, 1, chunked=False, fx_graph_cache=False, force_disable_caches=True, **scalar
        )
        tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in given]
        numbers = torch.zeros(2, dtype=torch.int32)
        results = kernel([*tensors, numbers])
    if len(results) != outputs or not calls or any(len(call.given) != 1 for call in calls):
        raise Unsuitable(f"{len(calls)} kernels that are not called once")
    known = {x.data_ptr(): f"in{i}" for i, x in enumerate(tensors)}
    known |= {x.data_ptr(): f"out{i}" for i, x in enumerate(results)}
    known[numbers.data_ptr()] = "numbers"
    source, lines = "", []
    for n, call in enumerate(calls):
        source += call.plain_function(f"{name}_{n}")
        arguments: list[str] = []
        for kind, x in zip(call.types, call.given[0], strict=True):
            if not isinstance(x, Tensor):
                raise Unsuitable("a kernel of tensors of a fixed size that asks for one")
            whole = x.untyped_storage()
            if whole.data_ptr() not in known:
                own = known[whole.data_ptr()] = f"own{len(known)}"
                lines.insert(0, f"    alignas(64) char {own}[{whole.nbytes()}];")
            at = x.data_ptr() - whole.data_ptr()
            arguments.append(f"({kind})((char*){known[whole.data_ptr()]} + {at})")
        lines.append(f"    {name}_{n}({', '.join(arguments)});")
    names = [*[f"in{i}" for i in range(len(given))], *[f"out{i}" for i in range(outputs)]]
    own = ", ".join([f"void* {x}" for x in (*names, "numbers")])
    body = "\n".join(lines)
    return f"{source}\nstatic inline void {name}({own})\n{{\n{body}\n}}\n"
