"""Operations that are recorded as several simpler ones.

torch computes with half numbers in float32 inside of each and rounds once, so these do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim.kernels import ops


def _wide(x: Tensor) -> Tensor:
    wide = ops.opmath(x.dtype)
    return x if x.dtype == wide else x.to(wide)


def _as(found: Tensor, dtype: torch.dtype) -> Tensor:
    return found if found.dtype == dtype else found.to(dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same as the operation that kernels have: inside of an operation `to` is none."""
    return x if x.dtype == dtype else attrgetter(ops.CAST)(torch.ops.aten)(x, dtype=dtype)


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
    x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False, root: bool = False
) -> Tensor:
    wide = _cast(x, torch.float64)  # squares of small numbers are 0 in float32
    dims = list(range(x.dim())) if dim is None else dim
    off = wide - wide.mean(dims, keepdim=True)
    count = wide.new_ones(x.shape).sum(dims, keepdim=keepdim)
    free = (count - (1 if correction is None else correction)).clamp(min=0)
    found = (off * off).sum(dims, keepdim=keepdim) / free
    return _cast(found.sqrt() if root else found, x.dtype)


def _noise(key: Tensor, low: Tensor, high: Tensor, like: Tensor) -> Tensor:
    count = math.prod(like.shape)
    place = torch.arange(count, dtype=torch.int64, device=like.device).reshape(like.shape)
    return torch.ops.functional_optim.noise_at(key, low, high, place, like.dtype)


DECOMPOSED: dict[str, Callable[..., Any]] = {
    "_softmax.default": _softmax,
    "_log_softmax.default": _log_softmax,
    "linalg_vector_norm.default": _vector_norm,
    "norm.Scalar": lambda x, p=2: _vector_norm(x, p),
    "norm.ScalarOpt_dim": lambda x, p, dim, keepdim=False: _vector_norm(
        x, 2 if p is None else p, dim, keepdim
    ),
    "functional_optim.noise.default": _noise,
    "var.correction": _variance,
    "std.correction": partial(_variance, root=True),
}


def _softmax_backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    g = grad * out
    return _as(g - out * g.sum(dim, keepdim=True), dtype)


def _log_softmax_backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return _as(grad - out.exp() * grad.sum(dim, keepdim=True), dtype)


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    z = x * beta
    return torch.where(z > threshold, x, z.exp().log1p() / beta)


def _softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    z = (x * beta).exp()
    return torch.where(x * beta > threshold, grad, grad * z / (z + 1))


def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    s = x.sigmoid()
    return grad * s * (1 + x * (1 - s))


def _addmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = {1: torch.mv, 2: torch.mm, 3: torch.bmm}[b.dim()]
    return x * beta + product(a, b) * alpha


def _repeat(x: Tensor, counts: Any) -> Tensor:
    x = x.reshape(*[1] * (len(counts) - x.dim()), *x.shape)
    wide = x.reshape([k for size in x.shape for k in (1, size)])
    pairs = zip(counts, x.shape, strict=True)
    wide = wide.expand([k for pair in zip(counts, x.shape, strict=True) for k in pair])
    return wide.reshape([count * size for count, size in pairs])


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    most = x.amax(dim, keepdim=True)
    most = torch.where(most.abs() == float("inf"), 0.0, most)
    found = (x - most).exp().sum(dim, keepdim=True).log() + most
    return found if keepdim else found.squeeze(dim)


OF_DERIVATIVES: dict[str, Callable[..., Any]] = {
    "_softmax_backward_data.default": _softmax_backward,
    "_log_softmax_backward_data.default": _log_softmax_backward,
    "sigmoid_backward.default": lambda grad, out: grad * (out * (1 - out)),
    "tanh_backward.default": lambda grad, out: grad * (1 - out * out),
    "threshold_backward.default": lambda grad, x, at: torch.where(x > at, grad, 0.0),
    "softplus.default": _softplus,
    "softplus_backward.default": _softplus_backward,
    "silu.default": lambda x: x * x.sigmoid(),
    "silu_backward.default": _silu_backward,
    "addmm.default": _addmm,
    "addmv.default": _addmm,
    "baddbmm.default": _addmm,
    "repeat.default": _repeat,
    "logsumexp.default": _logsumexp,
}
"""Those of functions that a solver differentiates, besides."""
