"""Ziyin et al. 2020, with the decay of their code."""

from __future__ import annotations

import numpy as np


def laprop(p, grads, lr, betas=(0.9, 0.999), eps=1e-15, weight_decay=0.0):
    (b1, b2), m, v = betas, np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        v = b2 * v + (1 - b2) * g**2
        m = b1 * m + (1 - b1) * g / (np.sqrt(v / (1 - b2**t)) + eps)
        p = p - lr * m / (1 - b1**t)
        p = p - weight_decay * p
    return p
