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
    dtype: torch.dtype | None = None,
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
        dtype: in which to compute. None: G's own on the CPU, where few processors multiply
            bfloat16 in hardware, and bfloat16, the source's, elsewhere.

    Returns:
        A matrix of this dtype, shaped like G; singular values in about [0.7, 1.2].

    Source: Keller Jordan et al., "Muon", https://kellerjordan.github.io/posts/muon/.

    Example::

        >>> import torch
        >>> from functional_optim.linalg import newton_schulz
        >>> X = newton_schulz(torch.diag(torch.tensor([1.0, 100.0])))
        >>> bool((torch.linalg.svdvals(X) > 0.6).all())
        True
    """
    if hasattr(G, "full_tensor"):
        X = newton_schulz(sharding.whole(G), coefficients, steps, eps, dtype)
        return sharding.placed_like(X, G)
    if dtype is None:
        dtype = G.dtype if G.device.type == "cpu" else torch.bfloat16
    X = G.to(dtype)
    tall = G.shape[-2] > G.shape[-1]
    if tall:
        X = X.mT
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp(min=eps)
    most = _together(coefficients[0], dtype) if 2 * X.shape[-1] > 3 * X.shape[-2] else 1
    for done in range(0, steps, most):
        X = _repeated(X, coefficients, min(most, steps - done))
    return X.mT if tall else X


def _together(a: float, dtype: torch.dtype) -> int:
    """The number of repetitions for which X Xᵀ may be carried along instead of multiplied anew.

    Each one multiplies its rounding error by up to a²; in the end that must stay below 0.05.
    """
    growth = max(a * a, math.e)
    return max(1, int(math.log(0.05 / torch.finfo(dtype).eps) / math.log(growth)))


def _repeated(X: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Some repetitions at once. All but the first and the last products are those of small squares:

    the steps multiply X by polynomials in A = X Xᵀ, which commute, so that A becomes A Q² under a
    step that makes X to Q X. From a width of 1.5 times the height on this is less work.
    """
    a, b, c = coefficients
    product = torch.addmm if X.dim() == 2 else torch.baddbmm
    A = X @ X.mT
    Q = product(A, A, A, beta=b, alpha=c)  # without its a I
    if steps == 1:
        return product(X, Q, X, beta=a)
    P = Q + a * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    for _ in range(steps - 1):
        AQ = product(A, A, Q, beta=a)
        A = product(AQ, AQ, Q, beta=a)
        Q = product(A, A, A, beta=b, alpha=c)
        P = product(P, Q, P, beta=a)
    return P @ X
