"""A `triton.jit` function run by Triton's interpreter, in a process that also compiles some.

Triton decides at its import whether `triton.jit` interprets (TRITON_INTERPRET), for the whole
process. Here the interpreter is put together for one call, and every function that the kernel calls
is interpreted too. Its casts are replaced: they cut bfloat16 off instead of rounding it, and take
integers and float64 for the bits of bfloat16. Arithmetic on bfloat16 itself is not mended: kernels
cast to float32 first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import JITFunction, interpreter

from gpu.kinds import KINDS
from gpu.rounding import bfloat16_bits, odd_integers

FLOATS = (tl.float64, tl.float32, tl.float16, tl.bfloat16)


def interpret(function: JITFunction, grid: tuple[int, ...], *args: Any, **keywords: Any) -> None:
    """Runs the function over the grid. Tensors are of the CPU; numbers become what Triton makes of
    them: a float is float32."""
    with _installed():
        interpreter.InterpretedFunction(function.fn)[grid](*args, **keywords)


@contextmanager
def _installed() -> Iterator[None]:
    builder = interpreter.InterpreterBuilder
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "__call__", _call))
        for name in ("cast_impl", "create_fp_to_fp"):
            replaced = _rounding(getattr(builder, name))
            stack.enter_context(mock.patch.object(builder, name, replaced))
        indexed = _indexed(interpreter._patch_lang_tensor)
        stack.enter_context(mock.patch.object(interpreter, "_patch_lang_tensor", indexed))
        stack.enter_context(np.errstate(all="ignore"))
        yield


def _call(self: JITFunction, *args: Any, **keywords: Any) -> Any:
    """A function that an interpreted kernel calls, such as `tl.sum`."""
    scope = interpreter._patch_lang(self.fn)
    try:
        return interpreter.InterpretedFunction(self.fn).rewrite()(*args, **keywords)
    finally:
        scope.restore()


def _indexed(real: Any) -> Any:
    """Triton's function that patches tensors, so that one number is an index. Triton 3.6 hands
    numpy an array of one entry, which numpy 2.4 takes for no number."""

    def patched(tensor: Any, scope: Any) -> None:
        real(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


def _rounding(real: Any) -> Any:
    """The builder's method of the same name, right for floats of 16 bits."""

    def cast(self: Any, source: Any, target: Any, *rest: Any) -> Any:
        of, to = source.dtype.scalar, target.scalar
        known = all(one in FLOATS or one.is_int() for one in (of, to))
        if rest not in ((), (None,)) or not known or tl.bfloat16 not in (of, to):
            return real(self, source, target, *rest)
        values = np.ascontiguousarray(source.data)
        if of == tl.bfloat16:
            values = KINDS["bf16"].decode(values.view(np.uint16))
        return interpreter.TensorHandle(_encoded(values, to), to)

    return cast


def _encoded(values: np.ndarray, to: tl.dtype) -> np.ndarray:
    if to != tl.bfloat16:
        return values.astype(interpreter._get_np_dtype(to))
    if values.dtype.kind in "iu" and values.itemsize == 8:
        values = odd_integers(values)
    elif values.dtype.kind != "f" or values.itemsize == 2:
        values = values.astype(np.float64)
    return bfloat16_bits(values)
