"""Wortsman et al. 2023, Algorithm 2, with the averages and the ε of optimi."""

from __future__ import annotations

import numpy as np


def stable_adamw(p, grads, lr, betas=(0.9, 0.99), eps=1e-6, weight_decay=1e-2, maximize=False):
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        g = -g if maximize else g
        b1, b2 = [b * (1 - b ** (t - 1)) / (1 - b**t) for b in betas]
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        rms = np.sqrt(np.mean(g**2 / np.maximum(v, eps**2))) if p.size else 0.0
        rate = lr / max(1.0, rms)
        p = p - rate * weight_decay * p - rate * m / (np.sqrt(v) + eps)
    return p
