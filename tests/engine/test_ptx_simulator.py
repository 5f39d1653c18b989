"""The simulator of PTX against numpy and torch, bit for bit, on kernels that Triton compiled."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from gpu import samples
from gpu.ahead import compile_ahead, facts, forbidden
from gpu.interpreter import interpret
from gpu.ptx import Divergence, Memory, Program
from gpu.trials import KERNEL, floats, integers, run, same
from torch import Tensor

NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
    torch.int64: tl.int64,
}
SIZE = 700
"""Two blocks of 256 and a part of one."""


def pointer(x: Tensor) -> str:
    return f"*{NAMES[x.dtype]}"


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_arithmetic_on_floats(dtype: torch.dtype, capability: int) -> None:
    x, y = floats(SIZE, dtype, 0), floats(SIZE, dtype, 1)
    out = torch.zeros(SIZE, dtype=dtype)
    types = {"x": pointer(x), "y": pointer(x), "out": pointer(x), "size": "i32"}
    compiled = compile_ahead(
        samples.arithmetic, types, {"BLOCK": 256}, capability, enable_fp_fusion=False
    )
    _, memory = run(compiled.asm["ptx"], 3, [x, y, out], [SIZE])
    c = x * y + x - y
    larger = torch.where(c.isnan(), x, torch.where(x.isnan(), c, torch.maximum(c, x)))
    smaller = torch.where(c.isnan(), y, torch.where(y.isnan(), c, torch.minimum(c, y)))
    assert same(out, torch.where(x > y, larger, smaller) + x.abs())
    assert (memory.read, memory.written) == (2 * x.nbytes, x.nbytes)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_bits_of_integers(dtype: torch.dtype) -> None:
    x, y, out = integers(SIZE, dtype), integers(SIZE, dtype, 1), torch.zeros(SIZE, dtype=dtype)
    types = {"x": pointer(x), "y": pointer(x), "out": pointer(x), "size": "i32"}
    run(compile_ahead(samples.bits, types, {"BLOCK": 256}).asm["ptx"], 3, [x, y, out], [SIZE])
    c = (x + y) * x - y
    c = c ^ (x >> 3) | (y << 2) & x
    quotient = torch.div(x, 7, rounding_mode="trunc")  # Triton's // and % are C's
    assert same(out, c + quotient + (x - quotient * 7))


CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.bfloat16),
    (torch.float64, torch.float16),
    (torch.float64, torch.float32),
    (torch.int64, torch.float32),
    (torch.int8, torch.bfloat16),
    (torch.uint8, torch.float64),
    (torch.float16, torch.float64),
]


@pytest.mark.parametrize(("of", "to"), CASTS)
def test_casts(of: torch.dtype, to: torch.dtype) -> None:
    x = floats(SIZE, of) if of.is_floating_point else integers(SIZE, of)
    out = torch.zeros(SIZE, dtype=to)
    types = {"x": pointer(x), "out": pointer(out), "size": "i32"}
    constants = {"TO": TYPES[to], "BLOCK": 256}
    run(compile_ahead(samples.cast, types, constants).asm["ptx"], 3, [x, out], [SIZE])
    # torch goes from float64 to 16 bits by way of float32; numpy's float16 does not
    want = x.to(to)
    if (of, to) == (torch.float64, torch.float16):
        with np.errstate(over="ignore"):
            want = torch.from_numpy(x.numpy().astype(np.float16))
    if (of, to) == (torch.float64, torch.bfloat16):
        exact = x.to(torch.float32).to(torch.float64) == x
        out, want = out[exact], want[exact]
        assert len(out) > 50
    assert same(out, want)


@pytest.mark.parametrize("of", [torch.float64, torch.int64])
def test_casts_to_bfloat16_round_once(of: torch.dtype) -> None:
    """By way of float32, or of float64, all of these would become ties."""
    x = [1 + 2.0**-8 + 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40, 2.0**-133 * (1.5 - 2.0**-40)]
    want = [1 + 2.0**-7, 1 + 2.0**-7, 2.0**-133]
    if of == torch.int64:
        x = [2**62 + 2**54 + 1, 2**62 + 3 * 2**54 - 1, -(2**62) - 2**54 - 1]
        want = [2.0**62 + 2.0**55, 2.0**62 + 2.0**55, -(2.0**62) - 2.0**55]
    given, outs = torch.tensor(x, dtype=of), torch.zeros(2, 3, dtype=torch.bfloat16)
    types = {"x": pointer(given), "out": "*bf16", "size": "i32"}
    constants = {"TO": tl.bfloat16, "BLOCK": 256}
    run(compile_ahead(samples.cast, types, constants).asm["ptx"], 1, [given, outs[0]], [3])
    interpret(samples.cast, (1,), given, outs[1], 3, **constants)
    assert outs.tolist() == [want, want]


def test_floats_become_integers_without_their_fraction() -> None:
    x = torch.tensor([1.5, -1.5, 0.999, -0.999, 127.9, -128.9, 1e30, -1e30, math.nan, 2.0**62])
    out = torch.zeros(10, dtype=torch.int64)
    types = {"x": "*fp32", "out": "*i64", "size": "i32"}
    compiled = compile_ahead(samples.cast, types, {"TO": tl.int64, "BLOCK": 256})
    run(compiled.asm["ptx"], 1, [x, out], [10])
    most, least = 2**63 - 1, -(2**63)
    assert out.tolist() == [1, -1, 0, 0, 127, -128, most, least, least, 2**62]


def test_random_numbers_are_the_interpreters() -> None:
    def made() -> list[Tensor]:
        return [torch.zeros(SIZE, dtype=torch.int32), torch.zeros(SIZE)]

    types = {"words": "*i32", "numbers": "*fp32", "seed": "i32", "size": "i32"}
    compiled = compile_ahead(samples.random, types, {"BLOCK": 256})
    got, want = made(), made()
    run(compiled.asm["ptx"], 3, got, [1234, SIZE])
    interpret(samples.random, (3,), *want, 1234, SIZE, BLOCK=256)
    assert len(want[0].unique()) == SIZE
    assert all(same(x, y) for x, y in zip(got, want, strict=True))


def test_loops_of_different_lengths_end_in_sums_and_maxima() -> None:
    lengths = [0, 1, 255, 256, 257, 1000, 3, 2000] * 9
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    x = torch.randint(-100, 100, (sum(lengths),)).float()  # sums are exact in any order
    sums, largest = torch.full((72,), 7.0), torch.full((72,), 7.0)
    types = {"starts": "*i32", "x": "*fp32", "sums": "*fp32", "largest": "*fp32"}
    compiled = compile_ahead(samples.ragged_sums, types, {"BLOCK": 256})
    program, _ = run(compiled.asm["ptx"], 72, [starts, x, sums, largest])
    rows = x.split(lengths)
    assert sums.tolist() == [row.sum().item() for row in rows]
    assert largest.tolist() == [row.max().item() if len(row) else -math.inf for row in rows]
    # blocks came together again behind the loop
    assert program.executed["bar.sync"] < 20
    assert program.parted == 0


@pytest.mark.parametrize("capability", [80, 90])
def test_sums_over_two_axes(capability: int) -> None:
    x = torch.randint(-50, 50, (16, 64)).float()
    rows, columns, running = torch.zeros(16), torch.zeros(64), torch.zeros(16, 64)
    types = dict.fromkeys(("x", "rows", "columns", "running"), "*fp32")
    compiled = compile_ahead(samples.two_axes, types, {"HEIGHT": 16, "WIDTH": 64}, capability)
    run(compiled.asm["ptx"], 1, [x, rows, columns, running])
    assert same(rows, x.sum(1))
    assert same(columns, x.sum(0))
    assert same(running, x.cumsum(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_of_libdevice(dtype: torch.dtype) -> None:
    """Within 2 units of the last place, also beyond what their fast paths take."""
    x = floats(SIZE, dtype)
    x = x[x.abs() > 1e-30]
    outs = [torch.zeros(len(x), dtype=dtype) for _ in range(5)]
    names = ("x", "exp", "log", "tanh", "sin", "power")
    types = dict.fromkeys(names, pointer(x)) | {"size": "i32"}
    compiled = compile_ahead(samples.functions, types, {"BLOCK": 256}, enable_reflect_ftz=False)
    program, _ = run(compiled.asm["ptx"], 3, [x, *outs], [len(x)])
    assert program.parted > 0
    wide = x.double()
    wants = [wide.exp(), wide.log(), wide.tanh(), wide.sin(), wide.pow(wide * 0.5)]
    for name, got, want in zip(names[1:], outs, wants, strict=True):
        assert units(got, want.to(dtype)) <= 2, name


def units(x: Tensor, y: Tensor) -> int:
    """The largest distance, counted in floats between."""
    kind = {4: torch.int32, 8: torch.int64}[x.element_size()]
    lowest = torch.iinfo(kind).min
    ordered = [torch.where(z < 0, lowest - z, z) for z in (x.view(kind), y.view(kind))]
    assert torch.equal(x.isnan(), y.isnan())
    return int((ordered[0] - ordered[1]).abs()[~x.isnan()].max())


def adam_case(dtype: torch.dtype, offset: int) -> tuple[list[list[Tensor]], Tensor, Tensor]:
    """Tensors that begin `offset` elements behind an aligned address, the table and the rows."""
    sizes = [1, 7, 1023, 1024, 1025, 0, 40, 3000]
    leaves = [[torch.rand(n + offset).to(dtype)[offset:] for _ in range(4)] for n in sizes]
    chunks = [(k << 32) | c for k, n in enumerate(sizes) for c in range(-(-n // 1024))]
    rows = [[len(leaf[0]), *[x.data_ptr() for x in leaf]] for leaf in leaves]
    return leaves, torch.tensor(chunks), torch.tensor(rows)


def adam_program(dtype: torch.dtype, align: int, capability: int = 90) -> str:
    types = {"table": "*i64", "rows": "*i64", "lr": "fp32", "beta": "fp32", "eps": "fp32"}
    constants = {"BLOCK": 1024, "ALIGN": align, "T": TYPES[dtype]}
    compiled = compile_ahead(
        samples.adam,
        types,
        constants,
        capability,
        aligned=("table", "rows"),
        num_warps=8,
        enable_fp_fusion=False,
    )
    return compiled.asm["ptx"]


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_of_tensors(dtype: torch.dtype, offset: int) -> None:
    leaves, table, rows = adam_case(dtype, offset)
    lr, beta, eps = (np.float32(x) for x in (0.1, 0.9, 1e-8))
    wants = [adam_by_hand(leaf, lr, beta, eps) for leaf in leaves]
    memory = Memory()
    for one in (table, rows):
        memory.allow_tensor(one, writable=False)
    for leaf in leaves:
        for i, tensor in enumerate(leaf):
            memory.allow_tensor(tensor, writable=i != 1)
    program = Program(adam_program(dtype, 16 if offset == 0 else 1))
    args = [table.data_ptr(), rows.data_ptr(), 0.1, 0.9, 1e-8]
    program.run(len(table), args, memory)
    for (p, _, m, v), want in zip(leaves, wants, strict=True):
        assert all(same(got, by) for got, by in zip((p, m, v), want, strict=True))
    assert memory.written == 3 * sum(leaf[0].nbytes for leaf in leaves)
    # the table and a row of 5 words are read once for each block
    assert memory.read == 4 * sum(leaf[0].nbytes for leaf in leaves) + len(table) * 6 * 8


def adam_by_hand(leaf: list[Tensor], lr: float, beta: float, eps: float) -> list[Tensor]:
    """By numpy: torch's square root on CPUs is not always the nearest number."""
    p, g, m, v = (x.float().numpy() for x in leaf)
    m = m * beta + g * (1 - beta)
    v = v * beta + g * g * (1 - beta)
    p = p - lr * (m / (np.sqrt(v) + eps))
    return [torch.from_numpy(x).to(leaf[0].dtype) for x in (p, m, v)]


def test_a_false_alignment_is_found() -> None:
    leaves, table, rows = adam_case(torch.float32, 1)
    tensors = [table, rows, *[x for leaf in leaves for x in leaf]]
    before = leaves[3][0].clone()
    with pytest.raises(MemoryError, match=r"16 bytes at 0x\w+ is misaligned"):
        run_adam(tensors, adam_program(torch.float32, 16))
    assert same(leaves[3][0], before)


def run_adam(tensors: list[Tensor], ptx: str) -> None:
    memory = Memory()
    for tensor in tensors:
        memory.allow_tensor(tensor)
    args = [tensors[0].data_ptr(), tensors[1].data_ptr(), 0.1, 0.9, 1e-8]
    Program(ptx).run(len(tensors[0]), args, memory)


def unmasked_program() -> str:
    types = {"x": "*fp32", "out": "*fp32"}
    # one element a thread
    return compile_ahead(samples.unmasked, types, {"BLOCK": 256}, num_warps=8).asm["ptx"]


def test_an_access_outside_is_found() -> None:
    x, out = torch.rand(1000), torch.zeros(1000)
    with pytest.raises(MemoryError, match=r"A read of 4 bytes .* outside of every range"):
        run(unmasked_program(), 4, [x[:999], out])
    with pytest.raises(MemoryError, match=r"A write of 4 bytes .* outside of every range"):
        run(unmasked_program(), 4, [torch.rand(1024), out])
    # what all threads of a block do, they do at once or not at all
    assert same(out[768:], torch.zeros(232))


def test_a_write_into_what_may_only_be_read_is_found() -> None:
    x, out, memory = torch.rand(256), torch.zeros(256), Memory()
    memory.allow_tensor(x)
    memory.allow_tensor(out, writable=False)
    with pytest.raises(MemoryError, match="may only be read"):
        Program(unmasked_program()).run(1, [x.data_ptr(), out.data_ptr()], memory)
    assert same(out, torch.zeros(256))


def test_ranges_do_not_overlap_by_halves() -> None:
    x, memory = torch.zeros(10), Memory()
    whole = memory.allow_tensor(x)
    assert memory.allow_tensor(x[2:5]) is whole
    with pytest.raises(ValueError, match="overlap"):
        memory.allow(x.data_ptr() - 4, 16)
    with pytest.raises(ValueError, match="reading only"):
        memory.allow_tensor(x[1:], writable=False)


def test_threads_that_part_and_meet() -> None:
    """A branch forwards is allowed; not so a loop that is left one by one, nor a lonely barrier."""
    out = torch.full((64,), -1, dtype=torch.int32)
    skip = """
	mov.b32 %r2, 5;
	and.b32 %r3, %r1, 4;
	setp.eq.b32 %p1, %r3, 0;
	@%p1 bra $L__1;
	mov.b32 %r2, %r1;
	{inside}
$L__1:
	mad.wide.u32 %rd3, %r1, 4, %rd1;
	bar.sync 0;
	shfl.sync.bfly.b32 %r4, %r2, 1, 31, -1;
	st.global.b32 [%rd3], %r4;"""
    program, _ = run(KERNEL.format(body=skip.format(inside="")), 1, [out])
    assert out.tolist() == [i ^ 1 if i & 4 else 5 for i in range(64)]
    assert program.parted == 1
    with pytest.raises(Divergence, match=r"Some threads of a block do not reach bar\.sync"):
        run(KERNEL.format(body=skip.format(inside="bar.sync 0;")), 1, [out])
    loop = """
	mov.b32 %r2, 0;
$L__1:
	add.s32 %r2, %r2, 1;
	setp.lt.u32 %p1, %r2, %r1;
	@%p1 bra $L__1;"""
    with pytest.raises(Divergence, match="go back to"):
        run(KERNEL.format(body=loop), 1, [out])


def test_what_is_not_simulated_is_said_before_anything_runs() -> None:
    with pytest.raises(NotImplementedError, match=r"wgmma\.fence is not simulated"):
        Program(KERNEL.format(body="wgmma.fence;"))
    with pytest.raises(ValueError, match="%r5 is read before it is written"):
        run(KERNEL.format(body="add.s32 %r6, %r5, 1;"), 1, [])
    with pytest.raises(TypeError, match="has 2 parameters, got 3"):
        Program(KERNEL.format(body="")).run(1, [0, 0, 0], Memory())


def test_facts_of_machine_code() -> None:
    types = {"table": "*i64", "rows": "*i64", "lr": "fp32", "beta": "fp32", "eps": "fp32"}
    aligned, loose = (
        facts(
            compile_ahead(
                samples.adam,
                types,
                {"BLOCK": 1024, "ALIGN": align, "T": tl.float32},
                num_warps=8,
            )
        )
        for align in (16, 1)
    )
    assert (aligned.loads128, aligned.stores128) == (4, 3)
    assert (loose.loads128, loose.stores128) == (0, 0)
    assert 16 < aligned.registers < 80
    assert aligned.stack == aligned.local_loads == aligned.local_stores == 0
    assert aligned.forbidden == {}
    types = {"x": "*fp32", "out": "*fp32"}
    given = compile_ahead(samples.unmasked, types, {"BLOCK": 1024}, aligned=("x", "out"))
    assert (facts(given).loads128, facts(given).stores128) == (2, 2)
    names = ("x", "exp", "log", "tanh", "sin", "power")
    types = dict.fromkeys(names, "*fp32") | {"size": "i32"}
    of_library = facts(compile_ahead(samples.functions, types, {"BLOCK": 256}))
    assert of_library.stack > 0
    assert of_library.forbidden["ex2.approx.ftz.f32"] == 6
    assert forbidden("\t@%p1 div.full.f32 %r1, %r2, %r3;\n") == {"div.full.f32": 1}


@pytest.mark.parametrize("of", [torch.float32, torch.float64, torch.int64])
def test_the_interpreter_rounds(of: torch.dtype) -> None:
    x = floats(SIZE, of) if of.is_floating_point else integers(SIZE, of) >> 12
    for to in (torch.bfloat16, torch.float16):
        out = torch.zeros(SIZE, dtype=to)
        interpret(samples.cast, (3,), x, out, SIZE, TO=TYPES[to], BLOCK=256)
        exact = x.double() == x.float().double()  # where torch, too, rounds once
        assert same(out[exact], x[exact].to(to))


def test_the_interpreter_reads_bfloat16() -> None:
    x, out = floats(SIZE, torch.bfloat16), torch.zeros(SIZE)
    interpret(samples.cast, (3,), x, out, SIZE, TO=tl.float32, BLOCK=256)
    assert same(out, x.float())
