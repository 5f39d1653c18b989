"""Zaheer et al. 2018, Algorithm 2, with Adam's bias corrections, as optax has it."""

from __future__ import annotations

import numpy as np


def yogi(
    p,
    grads,
    lr,
    betas=(0.9, 0.999),
    eps=1e-3,
    weight_decay=0.0,
    initial_accumulator_value=1e-6,
):
    b1, b2 = betas
    m, v = (np.full_like(p, initial_accumulator_value) for _ in range(2))
    for t, g in enumerate(grads, start=1):
        m = b1 * m + (1 - b1) * g
        v = v - (1 - b2) * np.sign(v - g**2) * g**2
        u = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        p = p - lr * (u + weight_decay * p)
    return p
