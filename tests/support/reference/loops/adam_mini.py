"""Zhang et al. 2024, Algorithm 1, as the authors' code has it."""

from __future__ import annotations

import numpy as np


def adam_mini(p, grads, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, maximize=False):
    """Rows of matrices and kernels, whole vectors."""
    axes = tuple(range(1, p.ndim)) if p.ndim > 1 else None
    (b1, b2), m, v = betas, np.zeros_like(p), 0.0
    if not p.size:
        return p
    for t, g in enumerate(grads, start=1):
        g = -g if maximize else g
        p = p * (1 - lr * weight_decay)
        v = b2 * v + (1 - b2) * np.mean(g * g, axes, keepdims=True)
        m = b1 * m + (1 - b1) * g
        p = p - lr * (m / (1 - b1**t)) / (np.sqrt(v) / np.sqrt(1 - b2**t) + eps)
    return p
