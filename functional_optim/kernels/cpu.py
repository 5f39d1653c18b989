"""A kernel as a small library of its own, which goes over any number of tensors in one call.

Inductor writes the C++ of a rule for one tensor. Here it is taken before Inductor compiles it, and
put into a library with a loop over blocks of many tensors: a step is then one call of 2 µs and one
parallel region, however many tensors there are, and the library can be kept on disk.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from functional_optim.kernels.building import Unsuitable, captured, type_of
from functional_optim.kernels.builds import Draft
from functional_optim.kernels.launches import (
    WHOLE_NUMBER,
    Launch,
    Native,
    compare,
    compare_packed,
    opened,
    symbol_of,
)
from functional_optim.kernels.packing import PLACES, Packing, packing
from functional_optim.kernels.tracing import BLOCK, Body, Signature, Trace, lower, trace

PROBE = 37
"""Elements of the tensors that a new library is tried on."""


class MultiTensorLaunch(Launch):
    """A library for tensors seen as 1-D, with those that it goes over.

    sizes: of the tensors. The other arguments are those of `Launch`.
    """

    def __init__(
        self,
        native: Native,
        sizes: Sequence[int],
        rows: array.array[int],
        threads: int,
        dtype: torch.dtype,
        *,
        each: bool = False,
    ) -> None:
        blocks = cut(sizes)
        super().__init__(native, len(sizes), rows, threads, dtype, each=each)
        self.blocks = blocks
        self.call[0], self.call[1] = blocks.buffer_info()[0], len(blocks) // 3


def cut(sizes: Sequence[int]) -> array.array[int]:
    """Blocks that cover tensors of these sizes: of each one the index of its tensor, its first
    element and its length."""
    blocks = array.array("q")
    for i, size in enumerate(sizes):
        for at in range(0, size, BLOCK):
            blocks.extend((i, at, min(BLOCK, size - at)))
    return blocks


def draft(name: str | None, body: Body, signature: Signature, outputs: int) -> Draft:
    """The library of a rule that is a single loop.

    Raises:
        Unsuitable: if the rule is no such loop.
        Exception: whatever goes wrong in Inductor.
    """
    symbol = symbol_of(name)
    source = write(trace(body, signature), signature, outputs, symbol)
    check = partial(_try, body=body, signature=signature)
    return Draft(name, symbol, outputs, source, check)


def write(traced: Trace, signature: Signature, outputs: int, symbol: str) -> str:
    """The C++ source of a library: Inductor's kernel, and the loop over blocks around it.

    symbol: of its function.
    """
    with captured() as calls:
        kernel = lower(traced, 1, fx_graph_cache=False, force_disable_caches=True)
        (dtypes,) = signature.leaves
        tensors = [torch.empty(PROBE, dtype=dtype) for dtype in dtypes]
        numbers = torch.empty(signature.numbers[0], dtype=signature.numbers[1])
        results = kernel([PROBE, *tensors, numbers])
    if len(calls) != 1 or len(calls[0].given) != 1:
        raise Unsuitable(f"{len(calls)} kernels instead of one")
    types, _, (given,) = calls[0]
    own = f"(({type_of(numbers)}*)numbers + stride * tensor)"
    known = {id(numbers): own, id(tensors[0]): _at(tensors[0], "grad")}
    packed, width, parts = {x.at: x for x in signature.packed}, 0, list[Packing]()
    for i, x in enumerate(tensors[1:], 1):
        known[id(x)] = _at(x, f"row[{width}]")
        slot = packed.get(i)
        if slot is None:
            width += 1
            continue
        known[id(x)] = f"slot{i}"
        kinds = [kind for kind, y in zip(types, given, strict=True) if y is x]
        if kinds:
            found = packing(slot, width, type_of(numbers))
            written = any("const" not in kind for kind in kinds)
            parts.append(found if written else found._replace(after=""))
        width += slot.parts
    known |= {id(x): f"&sum{i}" for i, x in enumerate(results)}
    arguments, spare = [], ""
    for k, (kind, x) in enumerate(zip(types, given, strict=True)):
        if isinstance(x, Tensor) and id(x) in known:
            arguments.append(f"({kind}){known[id(x)]}")
        elif isinstance(x, Tensor) and not x.dim():
            # what the numbers come to, which Inductor may work out before its loop
            spare += f"        {type_of(x)} spare{k};\n"
            arguments.append(f"({kind})&spare{k}")
        elif type(x) is int and x == PROBE:
            arguments.append("length")
        else:
            raise Unsuitable("a kernel with memory of its own")
    sums = "".join(f"        {type_of(x)} sum{i} = 0;\n" for i, x in enumerate(results))
    stores = "".join(
        f"        parts[{outputs} * b + {i}] = (double)sum{i};\n" for i in range(outputs)
    )
    functions = "".join([part.functions for part in parts])
    return (
        functions
        + calls[0].function("kernel", numbers)
        + LOOP.format(
            symbol=symbol,
            width=width,
            before="".join([f"        {part.before}\n" for part in parts]),
            after="".join([f"        {part.after}\n" for part in parts if part.after]),
            places=PLACES if parts else "",
            own=f"        void* own = (void*){own};\n" if parts else "",
            outputs=outputs,
            sums=sums + spare,
            stores=stores,
            arguments=", ".join(arguments),
        )
    )


LOOP = """
#include <cstdint>
#include <cstring>
#include <vector>

typedef void* (*Reader)(void*);
{places}
extern "C" void {symbol}(const int64_t* call)
{{
    const int64_t* blocks = (const int64_t*)call[0];
    const int64_t count = call[1];
    const int64_t* rows = (const int64_t*)call[2];
    const int64_t* given = (const int64_t*)call[3];
    void* numbers = (void*)call[5];
    const int64_t stride = call[9], apart = call[10];
    const int64_t threads = call[6];
    double* totals = (double*)call[7];
    Reader read = (Reader)call[8];
    std::vector<int64_t> grads(given, given + call[4]);
    if (read)
        for (auto& grad : grads) grad = (int64_t)read((void*)grad);
    std::vector<double> parts({outputs} * count);
    auto block = [&](int64_t b) {{
        const int64_t tensor = blocks[3 * b];
        const int64_t* row = rows + {width} * tensor;
        const int64_t grad = grads[tensor];
        const int64_t start = blocks[3 * b + 1];
        const int64_t length = blocks[3 * b + 2];
{sums}{own}{before}        kernel({arguments});
{after}{stores}    }};
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
}}

/* Calls of such functions in turn; the sums of each become numbers of those after it. */
extern "C" void {symbol}_stages(const int64_t* calls, int64_t count)
{{
    for (const int64_t* call = calls; call < calls + 8 * count; call += 8) {{
        double* totals = (double*)call[2];
        const int64_t rows = call[3], columns = call[4], stride = call[6];
        for (int64_t i = 0; i < rows * columns; ++i) totals[i] = 0;
        ((void (*)(const int64_t*))call[0])((const int64_t*)call[1]);
        for (int64_t i = 0; call[5] && i < rows * columns; ++i) {{
            const int64_t at = i / columns * stride + i % columns;
            if (call[7])
                ((double*)call[5])[at] = totals[i];
            else
                ((float*)call[5])[at] = (float)totals[i];
        }}
    }}
}}
"""


def _at(x: Tensor, address: str) -> str:
    return f"(({type_of(x)}*){address} + start)"


def _try(native: Native, body: Body, signature: Signature) -> None:
    """Raise Unsuitable unless the library does to a tensor what the rule does.

    It sees the tensor in two blocks, so that a rule is refused whose measurements are no sums over
    the entries.
    """
    if signature.packed:
        _try_packed(native, body, signature)
        return
    (dtypes,) = signature.leaves
    random = torch.Generator().manual_seed(0)
    real = [torch.rand(PROBE, generator=random).add_(0.1).to(dtype) for dtype in dtypes]
    expected = [x.clone() for x in real]
    length, dtype = signature.numbers
    numbers = torch.rand(length, generator=random).add_(0.1).to(dtype)
    with torch.no_grad():
        sums = body([expected], numbers)
    blocks = list(zip(*[x.tensor_split([PROBE // 3]) for x in real], strict=True))
    rows = array.array("q", [x.data_ptr() for _, *mine in blocks for x in mine])
    launch = MultiTensorLaunch(native, [len(g) for g, *_ in blocks], rows, 1, dtype)
    totals = launch.ready([g for g, *_ in blocks], [tuple(numbers.tolist())])()
    results = [*real, torch.tensor(totals, dtype=torch.float64)]
    wanted = [*expected, torch.tensor([float(x) for x in sums], dtype=torch.float64)]
    compare(results, wanted)


def _try_packed(native: Native, body: Body, signature: Signature) -> None:
    """The same where slots are packed: but for a code now and then, they must be packed alike."""
    (dtypes,) = signature.leaves
    packed = {x.at: x for x in signature.packed}
    size = 2 * max([x.codec.block for x in signature.packed]) + PROBE
    random = torch.Generator().manual_seed(0)
    real = [torch.rand(size, generator=random).add_(0.1).to(dtype) for dtype in dtypes]
    length, dtype = signature.numbers
    numbers = torch.rand(length, generator=random).add_(0.1).to(dtype)
    for slot in signature.packed:
        if slot.key is not None:
            numbers[slot.key] = WHOLE_NUMBER
    stored = {i: [x.clone() for x in slot.codec.encode(real[i])] for i, slot in packed.items()}
    expected = [x.clone() for x in real]
    for i, slot in packed.items():
        expected[i] = opened(slot.codec, stored[i], real[i])
    with torch.no_grad():
        sums = body([expected], numbers)
    addresses = [y for i, x in enumerate(real[1:], 1) for y in stored.get(i, [x])]
    launch = MultiTensorLaunch(
        native, [size], array.array("q", map(Tensor.data_ptr, addresses)), 1, dtype
    )
    totals = launch.ready([real[0]], [tuple(numbers.tolist())])()
    pairs = [(x, y) for i, (x, y) in enumerate(zip(real, expected, strict=True)) if i not in packed]
    found = torch.tensor(totals, dtype=torch.float64)
    pairs.append((found, torch.tensor([float(x) for x in sums], dtype=torch.float64)))
    compare(*zip(*pairs, strict=True))
    for i, slot in packed.items():
        key = None if slot.key is None else float(numbers[slot.key])
        compare_packed(slot.codec, [stored[i]], [expected[i]], key)
