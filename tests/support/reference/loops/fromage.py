"""Bernstein et al. 2020, Algorithm 1, with the bound of the authors' code."""

from __future__ import annotations

import numpy as np


def fromage(p, grads, lr=0.01, p_bound=None, maximize=False):
    most = None if p_bound is None else p_bound * np.linalg.norm(p.ravel())
    for g in grads:
        g = -g if maximize else g
        p_norm, g_norm = np.linalg.norm(p.ravel()), np.linalg.norm(g.ravel())
        step = g * (p_norm / g_norm) if p_norm > 0 and g_norm > 0 else g
        p = (p - lr * step) / np.sqrt(1 + lr**2)
        norm = np.linalg.norm(p.ravel())
        if most is not None and norm > most:
            p = p * (most / norm)
    return p
