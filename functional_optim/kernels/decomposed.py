"""Operations that are recorded as several simpler ones.

torch computes with half numbers in float32 inside of each and rounds once, so these do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_optim.kernels import ops


def _wide(x: Tensor) -> Tensor:
    wide = ops.opmath(x.dtype)
    return x if x.dtype == wide else x.to(wide)


def _as(found: Tensor, dtype: torch.dtype) -> Tensor:
    return found if found.dtype == dtype else found.to(dtype)


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = _wide(x)
    e = (wide - wide.amax(dim, keepdim=True)).exp()
    return _as(e / e.sum(dim, keepdim=True), wide.dtype if half_to_float else x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = _wide(x)
    shifted = wide - wide.amax(dim, keepdim=True)
    found = shifted - shifted.exp().sum(dim, keepdim=True).log()
    return _as(found, wide.dtype if half_to_float else x.dtype)


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    dims = list(range(x.dim())) if dim is None else dim
    return _as(_norm(_wide(x), ord, dims, keepdim), x.dtype)


def _norm(x: Tensor, ord: float, dims: Any, keepdim: bool) -> Tensor:
    if ord == 2:
        return (x * x).sum(dims, keepdim=keepdim).sqrt()
    if ord == 1:
        return x.abs().sum(dims, keepdim=keepdim)
    if ord == float("inf"):
        return x.abs().amax(dims, keepdim=keepdim)
    if ord == float("-inf"):
        return x.abs().amin(dims, keepdim=keepdim)
    if ord == 0:
        return (x != 0).to(x.dtype).sum(dims, keepdim=keepdim)
    return x.abs().pow(ord).sum(dims, keepdim=keepdim).pow(1.0 / ord)


def _variance(
    x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Tensor:
    return _as(_spread(_wide(x), dim, correction, keepdim), x.dtype)


def _deviation(
    x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Tensor:
    return _as(_spread(_wide(x), dim, correction, keepdim).sqrt(), x.dtype)


def _spread(x: Tensor, dim: Any, correction: Any, keepdim: bool) -> Tensor:
    dims = list(range(x.dim())) if dim is None else dim
    off = x - x.mean(dims, keepdim=True)
    count = x.new_ones(x.shape).sum(dims, keepdim=keepdim)
    free = (count - (1 if correction is None else correction)).clamp(min=0)
    return (off * off).sum(dims, keepdim=keepdim) / free


DECOMPOSED: dict[str, Callable[..., Any]] = {
    "_softmax.default": _softmax,
    "_log_softmax.default": _log_softmax,
    "linalg_vector_norm.default": _vector_norm,
    "norm.Scalar": lambda x, p=2: _vector_norm(x, p),
    "norm.ScalarOpt_dim": lambda x, p, dim, keepdim=False: _vector_norm(
        x, 2 if p is None else p, dim, keepdim
    ),
    "var.correction": _variance,
    "std.correction": _deviation,
}
