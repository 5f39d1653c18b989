"""Kingma and Ba 2015, Algorithm 1; Loshchilov and Hutter 2019, Algorithm 2; AMSGrad as in torch."""

from __future__ import annotations

import numpy as np


def adam(
    p,
    grads,
    lr,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    amsgrad=False,
    maximize=False,
    decoupled=False,
):
    (b1, b2), m, v, v_max = betas, np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        g = -g if maximize else g
        if decoupled:
            p = p - lr * weight_decay * p
        else:
            g = g + weight_decay * p
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        v_max = np.maximum(v_max, v)
        v_hat = (v_max if amsgrad else v) / (1 - b2**t)
        p = p - lr * m / (1 - b1**t) / (np.sqrt(v_hat) + eps)
    return p


def adamw(p, grads, lr, weight_decay=1e-2, **hyper):
    return adam(p, grads, lr, weight_decay=weight_decay, decoupled=True, **hyper)
