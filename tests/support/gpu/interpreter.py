"""Generated Triton kernels run by Triton's interpreter, on the host's memory.

Triton decides at its import whether `triton.jit` interprets (TRITON_INTERPRET), for the whole
process. Here the interpreter is put together for one launch, so that kernels are also compiled in
the same process. What it gets wrong is replaced: casts to bfloat16, which it cuts off; products and
sums that are fused, which it rounds twice; reductions by functions of a kernel's own, which take
it seconds; and the functions of libdevice, which it lacks and which are torch's here. A false hint
of alignment is an error.
"""

import ctypes
import ctypes.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton", minversion="3.6")  # older ones interpret all that follows, too

import triton.language as tl
from triton.runtime import JITFunction, interpreter

from functional_optim.kernels.triton_compiler import function_of
from functional_optim.kernels.triton_primitives import KernelText

Access = Callable[[np.ndarray, int, bool], None]
"""Raises an error if addresses may not be read, or written to. They get the size of an element."""


class Interpreted:
    """A kernel, which is called with the number of programs and the arguments."""

    def __init__(self, text: KernelText) -> None:
        self.types = [tl.str_to_ty(x, None) for x in text.types.values()]
        self.function = function_of(text).fn
        self.function.__globals__["libdevice"] = Library()
        self.run = interpreter.FunctionRewriter(self.function).rewrite_ast()

    def __call__(self, programs: int, arguments: Sequence[Any], access: Access) -> None:
        pairs = zip(arguments, self.types, strict=True)
        given = [_tensor(np.array([x], _numpy(kind)), kind) for x, kind in pairs]
        builder = interpreter.interpreter_builder
        with _installed(self.function, access):
            builder.set_grid_dim(programs, 1, 1)
            for i in range(programs):
                builder.set_grid_idx(i, 0, 0)
                self.run(*given)


def _numpy(kind: Any) -> Any:
    return np.uint64 if kind.is_ptr() else interpreter._get_np_dtype(kind)


def _tensor(data: np.ndarray, kind: Any) -> tl.tensor:
    return tl.tensor(interpreter.TensorHandle(data, kind.scalar), kind)


@contextmanager
def _installed(function: Any, access: Access) -> Iterator[None]:
    builder = interpreter.InterpreterBuilder
    with ExitStack() as stack:

        def replace(target: Any, name: str, made: Callable[..., Any]) -> None:
            stack.enter_context(mock.patch.object(target, name, made(getattr(target, name))))

        for own in (function, tl.standard.max.fn):  # they see two modules of the language
            scope = interpreter._patch_lang(own)
            stack.callback(scope.restore)
        replace(JITFunction, "__call__", lambda real: _called)
        replace(builder, "cast_impl", _rounding)
        replace(builder, "create_fp_to_fp", _rounding)
        replace(builder, "create_fma", lambda real: _fused)
        replace(builder, "create_masked_load", lambda real: _seen(real, access, 1, writes=False))
        replace(builder, "create_masked_store", lambda real: _seen(real, access, 2, writes=True))
        replace(interpreter.ReduceOps, "apply_impl", _reduced)
        scope.set_attr(tl, "multiple_of", _multiple_of)
        scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
        stack.enter_context(np.errstate(all="ignore"))
        yield


def _called(self: JITFunction, *args: Any, **keywords: Any) -> Any:
    """A function that an interpreted kernel calls, such as `tl.sum`."""
    return interpreter.InterpretedFunction(self.fn).rewrite()(*args, **keywords)


def _rounding(real: Any) -> Any:
    """The builder's method of the same name, right for bfloat16."""

    def cast(self: Any, source: Any, target: Any, *rest: Any) -> Any:
        of, to = source.dtype.scalar, target.scalar
        if tl.bfloat16 not in (of, to):
            return real(self, source, target, *rest)
        x = torch.from_numpy(np.ascontiguousarray(source.data))
        if of == tl.bfloat16:
            x = x.view(torch.bfloat16).float()
        if to != tl.bfloat16:
            return interpreter.TensorHandle(x.numpy().astype(_numpy(to)), to)
        bits = x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits, to)

    return cast


def _fused(self: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z, rounded once."""
    kind = z.dtype.scalar
    if kind == tl.float64:
        exact = _fma()(x.data, y.data, z.data)
        return interpreter.TensorHandle(np.asarray(exact, np.float64), kind)
    product, last = x.data.astype(np.float64) * y.data, z.data.astype(np.float64)
    total = np.asarray(product + last)
    part = total - product
    error = (product - (total - part)) + (last - part)
    bits = total.view(np.int64).copy()  # rounded to odd, so that rounding again does not matter
    even = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    bits += np.where(even, np.where((error > 0) == (total > 0), 1, -1), 0)
    return interpreter.TensorHandle(bits.view(np.float64).astype(np.float32), kind)


@cache
def _fma() -> Any:
    function = ctypes.CDLL(ctypes.util.find_library("m")).fma
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double] * 3
    return np.frompyfunc(function, 3, 1)


def _seen(real: Any, access: Access, at: int, *, writes: bool) -> Any:
    """The builder's method of the same name, behind a look at the addresses. at: of the mask."""

    def moved(self: Any, pointers: Any, *rest: Any) -> Any:
        mask = np.broadcast_to(rest[at - 1].data, pointers.data.shape)
        access(pointers.data[mask], pointers.get_element_ty().primitive_bitwidth // 8 or 1, writes)
        return real(self, pointers, *rest)

    return moved


def _multiple_of(x: Any, values: Any, **more: Any) -> Any:
    if (x.handle.data % int(values)).any():
        raise MemoryError(f"A pointer that is no multiple of {int(values)} is said to be one.")
    return x


def _reduced(real: Any) -> Any:
    """The interpreter's method of the same name, faster for the maxima of kernels."""

    def apply(self: Any, given: Any) -> Any:
        found = {"max_of": np.max, "min_of": np.min}.get(self.combine_fn.fn.__name__)
        return real(self, given) if found is None else self.min_max(given[0], found)

    return apply


def cbrt(x: torch.Tensor) -> torch.Tensor:
    return x.double().abs().pow(1 / 3).copysign(x).to(x.dtype)


class Library:
    """libdevice, computed by torch."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = cbrt if name == "cbrt" else getattr(torch, {"rint": "round"}.get(name, name))

        def call(*given: Any) -> Any:
            data = np.broadcast_arrays(*[x.handle.data for x in given])
            made = function(*[torch.from_numpy(np.ascontiguousarray(x)) for x in data]).numpy()
            return _tensor(made, next((x.type for x in given if x.type.is_block()), given[0].type))

        return call
