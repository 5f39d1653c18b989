"""Small kernels for tests of the simulator."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def arithmetic(x, y, out, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    a = tl.load(x + i, mask=inside, other=0)
    b = tl.load(y + i, mask=inside, other=0)
    c = (a * b + a - b).to(a.dtype)
    c = tl.where(a > b, tl.maximum(c, a), tl.minimum(c, b))
    tl.store(out + i, (c + tl.abs(a)).to(a.dtype), mask=inside)


@triton.jit
def bits(x, y, out, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    a = tl.load(x + i, mask=inside, other=1)
    b = tl.load(y + i, mask=inside, other=1)
    c = (a + b) * a - b
    c = c ^ (a >> 3) | (b << 2) & a
    tl.store(out + i, c + a // 7 + a % 7, mask=inside)


@triton.jit
def cast(x, out, size, TO: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    tl.store(out + i, tl.load(x + i, mask=inside, other=0).to(TO), mask=inside)


@triton.jit
def unmasked(x, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) + 1)


@triton.jit
def random(words, numbers, seed, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    tl.store(words + i, tl.randint(seed, i), mask=inside)
    tl.store(numbers + i, tl.rand(seed, i), mask=inside)


@triton.jit
def ragged_sums(starts, x, sums, largest, BLOCK: tl.constexpr):
    """Of each row, whose length is its own: blocks leave the loop at different times."""
    row = tl.program_id(0)
    start = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    for at in range(start, end, BLOCK):
        i = at + tl.arange(0, BLOCK)
        total += tl.load(x + i, mask=i < end, other=0)
        most = tl.maximum(most, tl.load(x + i, mask=i < end, other=float("-inf")))
    tl.store(sums + row, tl.sum(total))
    tl.store(largest + row, tl.max(most))


@triton.jit
def two_axes(x, rows, columns, running, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    i = tl.arange(0, HEIGHT)
    j = tl.arange(0, WIDTH)
    block = tl.load(x + i[:, None] * WIDTH + j[None, :])
    tl.store(rows + i, tl.sum(block, 1))
    tl.store(columns + j, tl.sum(block, 0))
    tl.store(running + i[:, None] * WIDTH + j[None, :], tl.cumsum(block, 1))


@triton.jit
def functions(x, exp, log, tanh, sin, power, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    a = tl.load(x + i, mask=inside, other=1)
    tl.store(exp + i, libdevice.exp(a), mask=inside)
    tl.store(log + i, libdevice.log(a), mask=inside)
    tl.store(tanh + i, libdevice.tanh(a), mask=inside)
    tl.store(sin + i, libdevice.sin(a), mask=inside)
    tl.store(power + i, libdevice.pow(a, a * 0.5), mask=inside)


@triton.jit
def _adam(p, g, m, v, lr, beta, eps):
    m = m * beta + g * (1 - beta)
    v = v * beta + g * g * (1 - beta)
    return p - lr * tl.div_rn(m, tl.sqrt_rn(v) + eps), m, v


@triton.jit
def adam(table, rows, lr, beta, eps, BLOCK: tl.constexpr, ALIGN: tl.constexpr, T: tl.constexpr):
    """A table of chunks: (tensor << 32) | chunk. A row has the size and the addresses."""
    at = tl.load(table + tl.program_id(0))
    row = rows + (at >> 32) * 5
    start = (at & 0xFFFFFFFF) * BLOCK
    left = tl.load(row) - start
    p = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(T)), ALIGN) + start
    g = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(T)), ALIGN) + start
    m = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(T)), ALIGN) + start
    v = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(T)), ALIGN) + start
    i = tl.arange(0, BLOCK)
    if left >= BLOCK:
        new_p, new_m, new_v = _adam(
            tl.load(p + i).to(tl.float32),
            tl.load(g + i).to(tl.float32),
            tl.load(m + i).to(tl.float32),
            tl.load(v + i).to(tl.float32),
            lr,
            beta,
            eps,
        )
        tl.store(p + i, new_p.to(T))
        tl.store(m + i, new_m.to(T))
        tl.store(v + i, new_v.to(T))
    else:
        inside = i < left
        new_p, new_m, new_v = _adam(
            tl.load(p + i, mask=inside, other=0).to(tl.float32),
            tl.load(g + i, mask=inside, other=0).to(tl.float32),
            tl.load(m + i, mask=inside, other=0).to(tl.float32),
            tl.load(v + i, mask=inside, other=0).to(tl.float32),
            lr,
            beta,
            eps,
        )
        tl.store(p + i, new_p.to(T), mask=inside)
        tl.store(m + i, new_m.to(T), mask=inside)
        tl.store(v + i, new_v.to(T), mask=inside)
