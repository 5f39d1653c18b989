"""Kingma and Ba 2015, Algorithm 2, with torch's ε; decay as in Loshchilov and Hutter 2019."""

from __future__ import annotations

import numpy as np


def adamax(p, grads, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=False):
    (b1, b2), m, u = betas, np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        if decoupled:
            p = p - lr * weight_decay * p
        else:
            g = g + weight_decay * p
        m = b1 * m + (1 - b1) * g
        u = np.maximum(b2 * u, np.abs(g) + eps)
        p = p - lr / (1 - b1**t) * m / u
    return p


def adamaxw(p, grads, lr, weight_decay=1e-4, **hyper):
    return adamax(p, grads, lr, weight_decay=weight_decay, decoupled=True, **hyper)
