"""Generated Triton kernels run by Triton's interpreter, on addresses of the host's memory.

Triton decides at its import whether `triton.jit` interprets (TRITON_INTERPRET), for the whole
process. Here the interpreter is put together for one launch, so that other kernels are compiled in
the same process. What it gets wrong is replaced: casts to bfloat16, which it cuts off; products and
sums that are fused, which it rounds twice; reductions by functions of a kernel's own, which take it
seconds; and the functions of libdevice, which it lacks and which are torch's here.

An address outside of the memory that a launch may touch, and a false hint of alignment, raise a
MemoryError.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import JITFunction, interpreter

from functional_optim.kernels.triton_builds import function_of
from functional_optim.kernels.triton_primitives import KernelText

Owned = Callable[[np.ndarray], bool]
"""Whether addresses are of memory that a launch may touch."""


class Interpreted:
    """A kernel, which is called with the number of programs and the arguments."""

    def __init__(self, text: KernelText) -> None:
        self.types = [tl.str_to_ty(x, None) for x in text.types.values()]
        kernel = function_of(text)
        space = kernel.fn.__globals__
        space["libdevice"] = Library()
        self.function = kernel.fn
        self.run = interpreter.FunctionRewriter(kernel.fn).rewrite_ast()

    def __call__(self, programs: int, arguments: Sequence[Any], owned: Owned) -> None:
        given = [
            tl.tensor(interpreter.TensorHandle(np.array([x], _numpy(kind)), kind), kind)
            for x, kind in zip(arguments, self.types, strict=True)
        ]
        builder = interpreter.interpreter_builder
        with _installed(self.function, owned):
            builder.set_grid_dim(programs, 1, 1)
            for i in range(programs):
                builder.set_grid_idx(i, 0, 0)
                self.run(*given)


def _numpy(kind: Any) -> Any:
    if kind.is_ptr():
        return np.uint64
    return {"fp64": np.float64, "int64": np.int64}[kind.name]


@contextmanager
def _installed(function: Any, owned: Owned) -> Iterator[None]:
    builder = interpreter.InterpreterBuilder
    with ExitStack() as stack:
        for own in (function, tl.standard.max.fn):  # which see two modules of the language
            scope = interpreter._patch_lang(own)
            stack.callback(scope.restore)
        stack.enter_context(mock.patch.object(JITFunction, "__call__", _called))
        for name in ("cast_impl", "create_fp_to_fp"):
            cast = _rounding(getattr(builder, name))
            stack.enter_context(mock.patch.object(builder, name, cast))
        stack.enter_context(mock.patch.object(builder, "create_fma", _fused))
        for name in ("create_masked_load", "create_masked_store"):
            checked = _checked(getattr(builder, name), owned)
            stack.enter_context(mock.patch.object(builder, name, checked))
        reduced = _reduced(interpreter.ReduceOps.apply_impl)
        stack.enter_context(mock.patch.object(interpreter.ReduceOps, "apply_impl", reduced))
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
            return interpreter.TensorHandle(x.numpy().astype(interpreter._get_np_dtype(to)), to)
        bits = x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits, to)

    return cast


def _fused(self: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z, rounded once."""
    kind = z.dtype.scalar
    if kind == tl.float64:
        return interpreter.TensorHandle(_fma()(x.data, y.data, z.data).astype(np.float64), kind)
    product, z = x.data.astype(np.float64) * y.data, z.data.astype(np.float64)
    total = np.asarray(product + z)
    part = total - product
    error = (product - (total - part)) + (z - part)
    bits = total.view(np.int64).copy()  # to odd, so that another rounding does not matter
    odd = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    bits += np.where(odd, np.where((error > 0) == (total > 0), 1, -1), 0)
    return interpreter.TensorHandle(bits.view(np.float64).astype(np.float32), kind)


@cache
def _fma() -> Any:
    function = ctypes.CDLL(ctypes.util.find_library("m")).fma
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double] * 3
    return np.frompyfunc(function, 3, 1)


def _checked(real: Any, owned: Owned) -> Any:
    """The builder's method of the same name, which looks at addresses before it uses them."""
    stores = "store" in real.__name__

    def access(self: Any, pointers: Any, *rest: Any) -> Any:
        mask = rest[1 if stores else 0]
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        if at.size and not owned(at):
            what = "write" if stores else "read"
            raise MemoryError(f"A {what} between {at.min():#x} and {at.max():#x} is outside.")
        return real(self, pointers, *rest)

    return access


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


class Library:
    """libdevice, computed by torch."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(torch, {"rint": "round"}.get(name, name))

        def call(*given: Any) -> Any:
            data = np.broadcast_arrays(*[x.handle.data for x in given])
            made = function(*[torch.from_numpy(np.ascontiguousarray(x)) for x in data]).numpy()
            kind = next((x.type for x in given if x.type.is_block()), given[0].type)
            return tl.tensor(interpreter.TensorHandle(made, kind.scalar), kind)

        return call
