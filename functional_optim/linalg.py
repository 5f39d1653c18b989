"""Kernels on one matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from functional_optim.core import sharding

MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic with the steepest slope at 0, https://kellerjordan.github.io/posts/muon/."""


def newton_schulz(
    G: Tensor,
    coefficients: tuple[float, float, float] = MUON_COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Bring all singular values of a matrix near 1: about U Vᵀ of its decomposition U S Vᵀ.

    Repeats X ← a X + (b A + c A²) X with A = X Xᵀ, where X is G or its transpose, whichever is
    wide. Every rank gathers the whole of a sharded matrix (a DTensor), so that the result is that
    of a single process, and keeps its shard.

    Args:
        G: a matrix (m, n), or a batch of them.
        coefficients: (a, b, c) of the quintic.
        steps: repetitions, 0 to 99.
        eps: least Frobenius norm to divide by.
        dtype: in which X, A and A² are kept. Default: the source's and torch.optim.Muon's. In
            float32 and float64 matrices wider than 1.5 times their height take less work.

    Returns:
        A matrix of this dtype, shaped like G; singular values in about [0.7, 1.2].

    Source: Keller Jordan et al., "Muon", https://kellerjordan.github.io/posts/muon/.

    Example::

        >>> import torch
        >>> from functional_optim.linalg import newton_schulz
        >>> X = newton_schulz(torch.diag(torch.tensor([1.0, 100.0])))
        >>> bool((torch.linalg.svdvals(X.float()) > 0.6).all())
        True
    """
    if hasattr(G, "full_tensor"):
        X = newton_schulz(sharding.whole(G), coefficients, steps, eps, dtype)
        return sharding.placed_like(X, G)
    X = G.to(dtype)
    tall = G.shape[-2] > G.shape[-1]
    if tall:
        X = X.mT
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp(min=eps)
    if _in_software(X):
        X = X.float()
    most = _together(coefficients[0], dtype) if 2 * X.shape[-1] > 3 * X.shape[-2] else 1
    for done in range(0, steps, most):
        X = _repeated(X, coefficients, min(most, steps - done), dtype)
    return (X.mT if tall else X).to(dtype)


IN_HARDWARE = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
"""Whether this processor multiplies bfloat16."""

SMALL = 1 << 10
"""Entries of a matrix up to which ATen's own products in bfloat16 take no longer."""


def _in_software(X: Tensor) -> bool:
    """Whether products in X's dtype are far slower than in float32: bfloat16 on most CPUs.

    They sum in float32 anyway, and round the sum, as `_repeated` does.
    """
    here = X.device.type == "cpu" and X.dtype is torch.bfloat16 and not IN_HARDWARE
    return here and X.shape[-2] * X.shape[-1] > SMALL


def _together(a: float, dtype: torch.dtype) -> int:
    """The number of repetitions for which X Xᵀ may be carried along instead of multiplied anew.

    Each one multiplies its rounding error by up to a²; in the end that must stay below 0.05.
    """
    growth = max(a * a, math.e)
    return max(1, int(math.log(0.05 / torch.finfo(dtype).eps) / math.log(growth)))


def _repeated(
    X: Tensor, coefficients: tuple[float, float, float], steps: int, dtype: torch.dtype
) -> Tensor:
    """Some repetitions at once. All but the first and the last products are those of small squares:

    the steps multiply X by polynomials in A = X Xᵀ, which commute, so that A becomes A Q² under a
    step that makes X to Q X. From a width of 1.5 times the height on this is less work. dtype: to
    which results are rounded.
    """
    a, b, c = coefficients
    product = torch.addmm if X.dim() == 2 else torch.baddbmm

    def rounded(Y: Tensor) -> Tensor:
        return Y.to(dtype).to(X.dtype)

    A = rounded(X @ X.mT)
    Q = rounded(product(A, A, A, beta=b, alpha=c))  # without its a I
    if steps == 1:
        return rounded(product(X, Q, X, beta=a))
    P = Q + a * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    for _ in range(steps - 1):
        AQ = product(A, A, Q, beta=a)
        A = product(AQ, AQ, Q, beta=a)
        Q = product(A, A, A, beta=b, alpha=c)
        P = product(P, Q, P, beta=a)
    return P @ X
