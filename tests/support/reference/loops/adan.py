"""Xie et al. 2022, Algorithm 1, with bias corrections and betas as in their code."""

from __future__ import annotations

import numpy as np


def adan(p, grads, lr, betas=(0.98, 0.92, 0.99), eps=1e-8, weight_decay=0.0, no_prox=False):
    b1, b2, b3 = betas
    m, v, n = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    before = grads[0]
    for t, g in enumerate(grads, start=1):
        d, before = g - before, g
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * d
        n = b3 * n + (1 - b3) * (g + b2 * d) ** 2
        eta = lr / (np.sqrt(n / (1 - b3**t)) + eps)
        u = eta * (m / (1 - b1**t) + b2 * v / (1 - b2**t))
        decay = lr * weight_decay
        p = (1 - decay) * p - u if no_prox else (p - u) / (1 + decay)
    return p
