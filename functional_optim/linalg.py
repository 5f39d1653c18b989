"""Kernels on one matrix."""

from __future__ import annotations

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
) -> Tensor:
    """Bring all singular values of a matrix near 1: about U Vᵀ of its decomposition U S Vᵀ.

    Repeats X ← a X + (b A + c A²) X with A = X Xᵀ, in bfloat16. Every rank gathers the whole of a
    sharded matrix (a DTensor), so that the result is that of a single process, and keeps its shard.

    Args:
        G: a matrix (m, n), or a batch of them.
        coefficients: (a, b, c) of the quintic.
        steps: repetitions, 0 to 99.
        eps: least Frobenius norm to divide by.

    Returns:
        bfloat16, shaped like G; singular values in about [0.7, 1.2].

    Source: Keller Jordan et al., "Muon", https://kellerjordan.github.io/posts/muon/.

    Example::

        >>> import torch
        >>> from functional_optim.linalg import newton_schulz
        >>> X = newton_schulz(torch.diag(torch.tensor([1.0, 100.0])))
        >>> bool((torch.linalg.svdvals(X.float()) > 0.6).all())
        True
    """
    if hasattr(G, "full_tensor"):
        X = newton_schulz(sharding.whole(G), coefficients, steps, eps)
        return sharding.placed_like(X, G)
    a, b, c = coefficients
    product = torch.addmm if G.dim() == 2 else torch.baddbmm
    X = G.to(torch.bfloat16)
    tall = G.shape[-2] > G.shape[-1]
    if tall:
        X = X.mT
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp(min=eps)
    for _ in range(steps):
        A = X @ X.mT
        B = product(A, A, A, beta=b, alpha=c)
        X = product(X, B, X, beta=a)
    return X.mT if tall else X
