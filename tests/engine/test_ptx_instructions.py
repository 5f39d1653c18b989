"""Single instructions in the simulator of PTX, against exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from gpu.trials import KERNEL, integers, one_instruction, run, same
from torch import Tensor

FORMATS = {
    torch.float16: (11, -24, 16),
    torch.bfloat16: (8, -133, 128),
    torch.float32: (24, -149, 128),
    torch.float64: (53, -1074, 1024),
}
"""Digits, the exponent of the smallest number, and that of the first which is too large."""


def nearest(exact: Fraction, dtype: torch.dtype) -> float:
    """Rounded to nearest, ties to even; also below the normal numbers, and beyond the largest."""
    if exact == 0:
        return 0.0
    digits, lowest, highest = FORMATS[dtype]
    size = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    size -= abs(exact) < Fraction(2) ** size
    unit = Fraction(2) ** max(size - digits + 1, lowest)
    rounded = round(exact / unit) * unit
    if abs(rounded) >= Fraction(2) ** highest:
        return math.inf if rounded > 0 else -math.inf
    return float(rounded)


def triples(dtype: torch.dtype) -> Iterator[tuple[float, float, float]]:
    """Products at a tie or just beside one, and what cancels them or only tips the scales."""
    digits, lowest, highest = FORMATS[dtype]
    generator = np.random.default_rng(0)
    for _ in range(800):
        # an odd number with one digit too many is a tie
        x, y = (2 * int(n) + 1 for n in generator.integers(2**2, 2 ** ((digits + 1) // 2), 2))
        scales = generator.integers(lowest // 2 - 4, highest // 2 - 2, 2)
        product = Fraction(x * y) * Fraction(2) ** int(scales.sum())
        a, b = (math.ldexp(n, int(scale)) for n, scale in zip((x, y), scales, strict=True))
        near = nearest(product, dtype)
        tiny = math.ldexp(1.0, max(int(scales.sum()) - 60, lowest))
        yield a, b, tiny
        yield a, b, -tiny
        yield a, b, 0.0
        yield a, b, -near
        yield a, b, near * float(generator.choice([1.5, 2**-5, 3 * 2.0**digits]))
    step = 2.0 ** (1 - digits)
    largest = (2 - step) * 2.0 ** (highest - 1)
    for beyond in (0.0, 0.5, 0.5 - step, 0.75):  # in units of the last place; a half is too much
        yield largest, 1.0, beyond * step * 2.0 ** (highest - 1)
    for odd in (1, 3, 5, 7):
        # below the normal numbers: a tie, but for what 53 digits do not hold
        third = odd * 2.0**lowest + 2.0 ** (lowest + digits - 2)
        half = math.ldexp(1.0, lowest // 2 - 1), math.ldexp(1.0, lowest - lowest // 2)
        yield half[0] * (1 + step), half[1] * (1 - step), third
        yield half[0] * (1 + step), half[1] * (1 + step), third


@pytest.mark.parametrize("dtype", list(FORMATS))
def test_fused_multiply_add_rounds_once(dtype: torch.dtype) -> None:
    columns = [torch.tensor(one, dtype=dtype) for one in zip(*triples(dtype), strict=True)]
    given = torch.stack(columns, 1)
    given = given[given.isfinite().all(1)]
    given = torch.cat([given, given[: -len(given) % 64]])
    name = {torch.bfloat16: "bf16"}.get(dtype, f"f{8 * given.element_size()}")
    got = one_instruction(f"fma.rn.{name}", *given.unbind(1))
    exact = [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in given.tolist()]
    want = torch.tensor([nearest(one, dtype) for one in exact], dtype=torch.float64)
    assert want.isinf().any()
    assert torch.equal(got.double(), want)


def test_directed_rounding() -> None:
    """Near 2^24 a float32 has no place for a half: what is left of it depends on the mode."""
    big = torch.tensor([2.0**24, -(2.0**24)] * 32)
    small = torch.tensor([0.5, 0.25, -0.25, -0.5] * 16)
    want = {
        "rn": [2.0**24, -(2.0**24), 2.0**24, -(2.0**24)],
        "rz": [2.0**24, -(2.0**24) + 1, 2.0**24 - 1, -(2.0**24)],
        "rm": [2.0**24, -(2.0**24), 2.0**24 - 1, -(2.0**24) - 2],
        "rp": [2.0**24 + 2, -(2.0**24) + 1, 2.0**24, -(2.0**24)],
    }
    for mode, values in want.items():
        assert one_instruction(f"add.{mode}.f32", big, small).tolist() == values * 16, mode


def test_small_numbers_are_flushed_where_the_instruction_says_so() -> None:
    x = torch.tensor([1e-40, -1e-40, 2e-38, -2e-38] * 16)
    half = torch.full_like(x, 0.5)
    assert same(one_instruction("mul.rn.f32", x, half), x * 0.5)
    flushed = one_instruction("mul.rn.ftz.f32", x, half)
    assert same(flushed, torch.tensor([0.0, -0.0, 0.0, -0.0] * 16))


def test_zeros_are_ordered_by_their_sign() -> None:
    x, y = torch.tensor([0.0, -0.0, -0.0, math.nan] * 16), torch.tensor([-0.0, 0.0, -0.0, 1.0] * 16)
    assert same(one_instruction("max.f32", x, y), torch.tensor([0.0, 0.0, -0.0, 1.0] * 16))
    assert same(one_instruction("min.f32", x, y), torch.tensor([-0.0, -0.0, -0.0, 1.0] * 16))
    assert one_instruction("max.NaN.f32", x, y).isnan().tolist() == [False, False, False, True] * 16


def test_instructions_on_words() -> None:
    x, y, z = (integers(64, torch.int32, seed) for seed in range(3))
    looked_up = one_instruction("lop3.b32", x, y, z, last="0xEA")
    assert same(looked_up, x & y | z)
    low, high, by = ([n & 0xFFFFFFFF for n in one.tolist()] for one in (x, y, z))
    pairs = [h << 32 | n for n, h in zip(low, high, strict=True)]

    def unsigned(name: str, *operands: Tensor) -> list[int]:
        return [n & 0xFFFFFFFF for n in one_instruction(name, *operands).tolist()]

    shifted = [(w << (n & 31) >> 32) & 0xFFFFFFFF for w, n in zip(pairs, by, strict=True)]
    assert unsigned("shf.l.wrap.b32", x, y, z) == shifted
    permuted = [
        sum((w >> 8 * (n >> 4 * i & 7) & 255) << 8 * i for i in range(4))
        for w, n in zip(pairs, by, strict=True)
    ]
    assert unsigned("prmt.b32", x, y, z & 0x7777) == permuted
    begin, length = z & 31, (z >> 8) & 31
    fields = [
        n >> b & (2**c - 1) for n, b, c in zip(low, begin.tolist(), length.tolist(), strict=True)
    ]
    assert unsigned("bfe.u32", x, begin, length) == fields
    quotients = [
        math.trunc(Fraction(n, h | 1)) for n, h in zip(x.tolist(), y.tolist(), strict=True)
    ]
    assert one_instruction("div.s32", x, y | 1).tolist() == quotients
    rests = [n - q * (h | 1) for n, h, q in zip(x.tolist(), y.tolist(), quotients, strict=True)]
    assert one_instruction("rem.s32", x, y | 1).tolist() == rests
    products = [(n * h) >> 32 for n, h in zip(low, high, strict=True)]
    assert unsigned("mul.hi.u32", x, y) == products
    wide = [integers(64, torch.int64, seed) for seed in range(2)]
    both = [(a * b) >> 64 for a, b in zip(wide[0].tolist(), wide[1].tolist(), strict=True)]
    assert one_instruction("mul.hi.s64", *wide).tolist() == both


def test_matrices_pass_through_shared_memory() -> None:
    """Thread t has elements 2 (t % 4) and the next one of row t // 4 of each 8 x 8 matrix."""
    given = torch.arange(64 * 8, dtype=torch.int16)  # a row of 8 elements a thread
    out = torch.zeros(64 * 16, dtype=torch.int16)
    body = """
	mov.b32 %r2, global_smem;
	shl.b32 %r3, %r1, 4;
	add.s32 %r4, %r2, %r3;
	mad.wide.u32 %rd3, %r1, 16, %rd1;
	mad.wide.u32 %rd4, %r1, 32, %rd2;
	ld.global.v4.b32 {%r5, %r6, %r7, %r8}, [%rd3];
	st.shared.v4.b32 [%r4], {%r5, %r6, %r7, %r8};
	bar.sync 0;
	ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r9, %r10, %r11, %r12}, [%r4];
	stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r4+1024], {%r12, %r11, %r10, %r9};
	bar.sync 0;
	ld.shared.v4.b32 {%r13, %r14, %r15, %r16}, [%r4+1024];
	st.global.v4.b32 [%rd4], {%r9, %r10, %r11, %r12};
	st.global.v4.b32 [%rd4+16], {%r13, %r14, %r15, %r16};"""
    run(KERNEL.format(body=body), 1, [given, out])
    matrices = given.view(2, 4, 8, 4, 2)  # of each warp: matrix, row, thread of the row, element
    loaded, stored = out.view(64, 2, 8).unbind(1)
    assert torch.equal(loaded, matrices.permute(0, 2, 3, 1, 4).reshape(64, 8))
    assert torch.equal(stored, matrices.flip(1).reshape(64, 8))


@pytest.mark.parametrize("kind", ["s32", "u32"])
@pytest.mark.parametrize("name", ["add", "min", "max"])
def test_reductions_of_a_warp(name: str, kind: str) -> None:
    given = integers(128, torch.int32)
    found = one_instruction(f"redux.sync.{name}.{kind}", given, last="-1")
    wide = given.to(torch.int64) & 0xFFFFFFFF if kind == "u32" else given.to(torch.int64)
    warps = wide.reshape(-1, 32)
    results = {"add": warps.sum(1), "min": warps.amin(1), "max": warps.amax(1)}
    assert (found.reshape(-1, 32) == results[name].to(torch.int32)[:, None]).all()
