"""Numbers for tests of kernels, and short ways to run PTX on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gpu.ptx import Memory, Program

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-41, -1e-41, 65520.0, 3e38, 1.0, -1.0]


def floats(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Of all magnitudes, with all pairs of special values in front (`seed`: which of a pair)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator, dtype=torch.float64)
    x *= torch.exp(4 * torch.randn(size, generator=generator, dtype=torch.float64))
    special = torch.tensor(SPECIAL, dtype=torch.float64)
    pairs = torch.cartesian_prod(special, special)[:, seed % 2]
    x[: len(pairs)] = pairs
    return x.to(dtype)


def integers(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator)
    return (wide >> torch.randint(0, 60, (size,), generator=generator)).to(dtype)


def same(x: Tensor, y: Tensor) -> bool:
    """Bit for bit, but any NaN is like any other."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    equal = x.view(kind) == y.view(kind)
    if x.is_floating_point():
        equal |= x.isnan() & y.isnan()
    return bool(equal.all())


def run(
    ptx: str, grid: int, tensors: Sequence[Tensor], numbers: Sequence[float] = ()
) -> tuple[Program, Memory]:
    memory = Memory()
    for tensor in tensors:
        memory.allow_tensor(tensor)
    program = Program(ptx)
    program.run(grid, [*[x.data_ptr() for x in tensors], *numbers], memory)
    return program, memory


KERNEL = """
.visible .entry kernel(.param .u64 .ptr kernel_param_0, .param .u64 .ptr kernel_param_1)
.reqntid 64
{{
	.reg .pred %p<4>;
	.reg .b16 %rs<32>;
	.reg .b32 %r<32>;
	.reg .b64 %rd<32>;
	ld.param.b64 %rd1, [kernel_param_0];
	ld.param.b64 %rd2, [kernel_param_1];
	mov.u32 %r1, %tid.x;
	{body}
	ret;
}}
"""


def one_instruction(name: str, *operands: Tensor, last: str = "") -> Tensor:
    """`name` on every row of the operands, 64 rows a block; `last` is a constant behind them."""
    width = operands[0].element_size()
    register = {2: "%rs", 4: "%r", 8: "%rd"}[width]
    given = torch.stack(operands, 1).contiguous()
    assert len(given) % 64 == 0
    out = torch.zeros(len(given), dtype=operands[0].dtype)
    names = [f"{register}{10 + i}" for i in range(len(operands))]
    loads = [f"ld.global.b{width * 8} {x}, [%rd4+{i * width}];" for i, x in enumerate(names)]
    body = f"""
	mov.u32 %r2, %ctaid.x;
	mad.lo.s32 %r3, %r2, 64, %r1;
	mad.wide.u32 %rd4, %r3, {width * len(operands)}, %rd1;
	mad.wide.u32 %rd5, %r3, {width}, %rd2;
	{" ".join(loads)}
	{name} {register}20, {", ".join([*names, *[last] * bool(last)])};
	st.global.b{width * 8} [%rd5], {register}20;"""
    run(KERNEL.format(body=body), len(given) // 64, [given, out])
    return out
