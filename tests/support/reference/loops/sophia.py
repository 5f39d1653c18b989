"""Liu et al. 2023, Algorithm 3, with the numbers of the authors' code."""

from __future__ import annotations

import numpy as np


def sophia(
    p,
    grads,
    lr,
    betas=(0.965, 0.99),
    rho=0.04,
    weight_decay=0.1,
    eps=1e-15,
    maximize=False,
    hessians=None,
):
    """hessians: the estimate that comes before each step, or None."""
    m, h = np.zeros_like(p), np.zeros_like(p)
    for k, g in enumerate(grads):
        if hessians is not None and hessians[k] is not None:
            h = betas[1] * h + (1 - betas[1]) * hessians[k]
        m = betas[0] * m + (1 - betas[0]) * (-g if maximize else g)
        p = p - lr * weight_decay * p
        p = p - lr * np.sign(m) * np.minimum(np.abs(m) / (rho * np.maximum(h, 0) + eps), 1)
    return p
