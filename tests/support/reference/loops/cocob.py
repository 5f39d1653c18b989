"""Orabona and Tommasi 2017, Algorithm 2: parameters from their start and the bets."""

from __future__ import annotations

import numpy as np


def cocob(p, grads, lr=1.0, alpha=100.0, eps=1e-8, weight_decay=0.0, maximize=False):
    start, w = p, p
    L, G = np.full_like(p, eps), np.zeros_like(p)
    reward, theta = np.zeros_like(p), np.zeros_like(p)
    for g in grads:
        g = (-g if maximize else g) + weight_decay * (start + lr * (w - start))
        L = np.maximum(L, np.abs(g))
        G = G + np.abs(g)
        reward = np.maximum(reward - (w - start) * g, 0)
        theta = theta - g
        w = start + theta / (L * np.maximum(G + L, alpha * L)) * (L + reward)
    return start + lr * (w - start)
