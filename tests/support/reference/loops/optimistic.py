"""Mokhtari et al. 2019; optax's `optimistic_adam_v2`."""

from __future__ import annotations

import numpy as np


def optimistic_gradient_descent(p, grads, lr, alpha=1.0, beta=1.0):
    before = grads[0]
    for g in grads:
        p = p - lr * ((alpha + beta) * g - beta * before)
        before = g
    return p


def optimistic_adam_v2(
    p, grads, lr, alpha=1.0, beta=1.0, betas=(0.9, 0.999), eps=1e-8, nesterov=True
):
    (b1, b2), m, v, directions = betas, np.zeros_like(p), np.zeros_like(p), []
    for t, g in enumerate(grads, start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        m_hat = m / (1 - b1**t)
        if nesterov:
            m_hat = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
        directions.append(m_hat / (np.sqrt(v / (1 - b2**t)) + eps))
    return optimistic_gradient_descent(p, directions, lr, alpha, beta)
