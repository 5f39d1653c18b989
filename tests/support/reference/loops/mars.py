"""Yuan et al. 2024, as in their code."""

from __future__ import annotations

import numpy as np

from reference.loops.adam import adamw as _adamw


def mars(
    p,
    grads,
    lr,
    betas=(0.95, 0.99),
    eps=1e-8,
    weight_decay=0.0,
    gamma=0.025,
    optimize_1d=False,
    lr_1d=3e-3,
    betas_1d=(0.9, 0.95),
    weight_decay_1d=0.1,
):
    if p.ndim != 2 and not optimize_1d:
        return _adamw(p, grads, lr_1d, weight_decay_1d, betas=betas_1d, eps=eps)
    (b1, b2), m, v = betas, np.zeros_like(p), np.zeros_like(p)
    before = np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        c = g + gamma * b1 / (1 - b1) * (g - before)
        c = c / max(np.sqrt(np.sum(c * c)), 1)
        m = b1 * m + (1 - b1) * c
        v = b2 * v + (1 - b2) * c * c
        u = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        p = p - lr * (u + weight_decay * p)
        before = g
    return p


def mars_at_one_rate(p, grads, lr, **hyper):
    return mars(p, grads, lr, lr_1d=lr, **hyper)
