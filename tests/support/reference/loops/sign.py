"""Chen et al. 2023, Algorithm 2; Bernstein et al. 2018, Algorithms 1 and 2."""

from __future__ import annotations

import numpy as np


def lion(p, grads, lr, betas=(0.9, 0.99), weight_decay=0.0):
    (b1, b2), m = betas, np.zeros_like(p)
    for g in grads:
        c = b1 * m + (1 - b1) * g
        p = p - lr * (np.sign(c) + weight_decay * p)
        m = b2 * m + (1 - b2) * g
    return p


def signum(p, grads, lr, momentum=0.9, weight_decay=0.0):
    m = np.zeros_like(p)
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        p = (1 - lr * weight_decay) * p - lr * np.sign(m)
    return p


def sign_sgd(p, grads, lr, weight_decay=0.0):
    for g in grads:
        p = (1 - lr * weight_decay) * p - lr * np.sign(g)
    return p
