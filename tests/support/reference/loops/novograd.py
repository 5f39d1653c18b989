"""Ginsburg et al. 2019, Algorithm 1, as NVIDIA's Jasper has it: v starts anew from 0."""

from __future__ import annotations

import numpy as np


def novograd(p, grads, lr, betas=(0.95, 0.98), eps=1e-8, weight_decay=0.0, maximize=False):
    v, m = 0.0, np.zeros_like(p)
    for g in grads:
        g = -g if maximize else g
        square = np.sum(g**2)
        v = square if v == 0 else betas[1] * v + (1 - betas[1]) * square
        m = betas[0] * m + g / (np.sqrt(v) + eps) + weight_decay * p
        p = p - lr * m
    return p
