"""From a rule's graph to the text of a Triton kernel that goes over a table of tensors.

A row of the table holds the size of a tensor and the addresses of the parameter and its slots; the
addresses of the gradients come beside it, as they change. A program of the kernel takes one chunk
of one tensor: whole blocks without a mask, so that each thread reads and writes 16 bytes at once,
and the rest of the last block with one. Results are those of the graph to the bit: quotients and
roots are rounded correctly, and no product and sum are fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from functional_optim.kernels.building import Unsuitable
from functional_optim.kernels.tracing import Signature, Trace
from functional_optim.kernels.triton_graph import GraphWriter, dtype_of, opmath
from functional_optim.kernels.triton_ops import TYPES
from functional_optim.kernels.triton_packing import PackedText, packed_text

Source = Literal["value", "tensor", "row"]
"""Where a number of a step comes from: an argument of the launch; a float64 tensor of no dimensions
on the device; or what a launch before has measured on each tensor."""

POINTERS = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
"""What Triton calls the dtypes that a kernel reads and writes."""

aten = torch.ops.aten


class LaunchConfig(NamedTuple):
    """How the work is divided.

    block: the entries that the threads of a program take at once. warps: 32 threads each. repeat:
    blocks of a program.
    """

    block: int
    warps: int
    repeat: int

    @property
    def chunk(self) -> int:
        """The entries of a program."""
        return self.block * self.repeat

    def holding(self, block: int) -> LaunchConfig:
        """One whose blocks are no smaller than a codec's; the powers of two divide each other."""
        if block <= self.block:
            return self
        return self._replace(block=block, repeat=max(1, self.chunk // block))


class RuleSource(NamedTuple):
    """What a kernel does to a block.

    lines: Triton, from x0, x1 … and the numbers n0, n1 … to what is stored and summed. read: the
    indices of the tensors that it reads. stored: the index of each tensor that it writes, and the
    variable. sums: the variables that are summed. dtypes: of the tensors. numbers: how many, and
    their dtype. packed: the tensors that are unpacked before, and packed after it.
    """

    lines: list[str]
    read: list[int]
    stored: list[tuple[int, str]]
    sums: list[str]
    dtypes: list[str]
    numbers: tuple[int, str]
    packed: list[PackedText]

    def places(self) -> list[int | range]:
        """Where the address of each tensor is in its row, or the addresses of its parts."""
        packed, found = {x.at: x for x in self.packed}, list[int | range]([0])
        at = 1  # behind the size
        for i in range(1, len(self.dtypes)):
            parts = len(packed[i].types) if i in packed else 1
            found.append(range(at, at + parts) if i in packed else at)
            at += parts
        return found

    def width(self) -> int:
        """The entries of a row."""
        return len(self.dtypes) + sum([len(x.types) - 1 for x in self.packed])


class KernelText(NamedTuple):
    """The text of a kernel, and the type of each of its arguments."""

    text: str
    arguments: dict[str, str]


def rule_source(traced: Trace, signature: Signature, outputs: int) -> RuleSource:
    """The body of a kernel for the graph of a rule on one tensor of any size.

    Raises:
        Unsuitable: if the rule is no loop over the entries of a tensor, or does what no line of
            Triton is known for.
    """
    (dtypes,) = signature.leaves
    writer = _RuleWriter(traced, dtypes)
    writer.write()
    if len(writer.returned) != outputs:
        raise Unsuitable("a rule that measures something else than sums over a tensor")
    if not writer.summed.issuperset(writer.returned):
        raise Unsuitable("a rule that measures something else than sums over a tensor")
    sums = [writer.names[x] for x in writer.returned]
    stored = sorted(writer.stored.items())
    count, wide = signature.numbers
    return RuleSource(
        lines=writer.lines,
        read=sorted(writer.read),
        stored=stored,
        sums=sums,
        dtypes=[POINTERS[dtype] for dtype in dtypes],
        numbers=(count, POINTERS[wide]),
        packed=[packed_text(slot, wide) for slot in signature.packed],
    )


class _RuleWriter(GraphWriter):
    """The lines of a rule, which writes into its tensors and may sum over them."""

    def __init__(self, traced: Trace, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__(traced, dtypes)
        self.stored: dict[int, str] = {}
        self.summed: set[Any] = set()  # sums over a tensor, and what is made of them

    def take(self, node: Any) -> None:
        """Write what a node does."""
        if node.target is aten.copy_.default:
            self._store(*node.args[:2])
        elif node.target is aten.sum.default:
            self._add_sum(node)
        else:
            super().take(node)
            if self.summed.intersection(node.all_input_nodes):
                self.summed.add(node)

    def _store(self, target: Any, value: Any) -> None:
        if target not in self.tensors:
            raise Unsuitable("a rule that writes into a tensor of its own")
        if value in self.summed:
            raise Unsuitable("a rule that goes on with its own sum over a tensor")
        i = self.tensors[target]
        self._note(value)
        name = self._name()
        self.lines.append(f"{name} = {self._cast(value, self.dtypes[i])}")
        self.stored[i] = self.names[target] = name

    def _add_sum(self, node: Any) -> None:
        """A sum over the entries of a block, those that the tensor has."""
        (value,) = node.args
        dtype = opmath(dtype_of(value))
        self._note(value)
        cast = self._cast(value, dtype)
        self._add(node, f"tl.sum(tl.where(mask, {cast}, tl.full((), 0.0, {TYPES[dtype]})), axis=0)")
        self.summed.add(node)


HEAD = """import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def rule({inputs}):
{lines}
    return {results}
{packing}

@triton.jit
def {name}({arguments}):
    program = tl.program_id(0).to(tl.int64)
    at = tl.load(chunks + program)
    tensor = at >> 32
    row = rows + tensor * {width}
    size = tl.load(row)
    chunk = at & 0xFFFFFFFF
    start = chunk * {chunk}
{pointers}
{numbers}
    offsets = tl.arange(0, {block})
    left = tl.minimum(size - start, {chunk}){skip}
    blocks = left // {block}
{zeros}
    for k in range(blocks):
        mask = offsets < {block}
{full}
    if left > blocks * {block}:
        k = blocks
        mask = offsets < left - blocks * {block}
{rest}
{sums}
"""


def kernel_text(
    rule: RuleSource,
    sources: Sequence[Source],
    config: LaunchConfig,
    *,
    aligned: bool,
    name: str,
    skips: bool = False,
) -> KernelText:
    """The text of a kernel.

    Args:
        rule: what it does to a block.
        sources: where each number comes from.
        config: how the work is divided.
        aligned: whether all tensors begin at multiples of 16 bytes.
        name: of the kernel.
        skips: whether the last argument is a number that says, where it is not 0, to do nothing.
    """
    wide = rule.numbers[1]
    arguments = {"chunks": "*i64", "rows": "*i64", "grads": "*i64"}
    if "row" in sources:
        arguments |= {"found": "*fp64", "stride": "i64"}
    numbers = []
    for i, source in enumerate(sources):
        if source == "value":
            arguments[f"n{i}"] = wide
        elif source == "tensor":
            arguments[f"a{i}"] = "*fp64"
            numbers.append(f"n{i} = tl.load(a{i}).to({_named(wide)})")
        else:
            numbers.append(f"n{i} = tl.load(found + tensor * stride + {i}).to({_named(wide)})")
    if rule.sums:
        arguments["partials"] = "*fp64"
    if skips:
        arguments["skip"] = "*fp32"
    names = [f"n{i}" for i in range(len(sources))]
    inputs = [*[f"x{i}" for i in rule.read], *names, "mask"]
    results = [*[own for _, own in rule.stored], *rule.sums]
    text = HEAD.format(
        inputs=", ".join(inputs),
        lines=_indented(rule.lines),
        results=", ".join(results) or "mask",
        packing="".join([x.functions() for x in rule.packed]),
        name=name,
        arguments=", ".join(arguments),
        width=rule.width(),
        chunk=config.chunk,
        block=config.block,
        pointers=_indented(_pointers(rule, config, aligned=aligned)),
        numbers=_indented(numbers),
        skip=" * (tl.load(skip) == 0).to(tl.int64)" if skips else "",
        zeros=_indented([f"s{i} = tl.full((), 0.0, tl.float64)" for i in range(len(rule.sums))]),
        full=_indented(_block(rule, inputs, config, whole=True), 8),
        rest=_indented(_block(rule, inputs, config, whole=False), 8),
        sums=_indented(
            [
                f"tl.store(partials + program * {len(rule.sums)} + {i}, s{i})"
                for i in range(len(rule.sums))
            ]
        ),
    )
    return KernelText(text, arguments)


def _pointers(rule: RuleSource, config: LaunchConfig, *, aligned: bool) -> list[str]:
    """Where the chunk of each tensor begins."""
    packed = {x.at: x for x in rule.packed}
    found: list[str] = []
    for i, (dtype, place) in enumerate(zip(rule.dtypes, rule.places(), strict=True)):
        if i not in rule.read and i not in dict(rule.stored):
            continue
        if isinstance(place, int):
            address = "grads + tensor" if i == 0 else f"row + {place}"
            found.append(f"p{i} = {_pointer(address, _named(dtype), aligned=aligned)} + start")
            continue
        for j, own in enumerate(place):
            pointer = _pointer(f"row + {own}", packed[i].types[j], aligned=aligned)
            entries = config.chunk // packed[i].block * packed[i].size(j)
            found.append(f"p{i}_{j} = {pointer} + chunk * {entries}")
    return found


def _pointer(address: str, dtype: str, *, aligned: bool) -> str:
    """The pointer that is stored at an address.

    The hint is on the pointer: on the integer that it is made of, it would be lost.
    """
    pointer = f"tl.load({address}).to(tl.pointer_type({dtype}))"
    return f"tl.multiple_of({pointer}, 16)" if aligned else pointer


def _block(rule: RuleSource, inputs: list[str], config: LaunchConfig, *, whole: bool) -> list[str]:
    """The lines of one block, the k-th of its chunk. whole: whether the tensor has all of it."""
    packed = {x.at: x for x in rule.packed}
    at, block = f"k * {config.block} + offsets", config.block
    mask, other = ("", "") if whole else (", mask=mask", ", other=0.0")
    lines: list[str] = []
    for i in rule.read:
        if i in packed:
            lines += packed[i].load(block, whole=whole)
        else:
            lines.append(f"x{i} = tl.load(p{i} + ({at}){mask}{other})")
    results = [f"y{i}" for i, _ in rule.stored] + [f"z{i}" for i in range(len(rule.sums))]
    left = ", ".join(results) or "_"
    lines.append(f"{left} = rule({', '.join(inputs)})")
    for i, _ in rule.stored:
        if i in packed:
            lines += packed[i].store(block, whole=whole)
        else:
            lines.append(f"tl.store(p{i} + ({at}), y{i}{mask})")
    return [*lines, *[f"s{i} += z{i}.to(tl.float64)" for i in range(len(rule.sums))]]


def _named(pointer: str) -> str:
    (dtype,) = [dtype for dtype, own in POINTERS.items() if own == pointer]
    return TYPES[dtype]


def _indented(lines: Sequence[str], by: int = 4) -> str:
    return "\n".join([" " * by + line for line in lines])
