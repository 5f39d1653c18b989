"""Defazio and Jelassi 2021, Algorithm 1, with ε added to the learning rate, as in their code."""

from __future__ import annotations

import numpy as np


def madgrad(p, grads, lr, momentum=0.9, weight_decay=0.0, eps=1e-6):
    start, s, v = p, np.zeros_like(p), np.zeros_like(p)
    for k, g in enumerate(grads):
        g = g + weight_decay * p
        weight = (lr + eps) * np.sqrt(k + 1)
        s = s + weight * g
        v = v + weight * g * g
        z = start - s / (np.cbrt(v) + eps)
        p = momentum * p + (1 - momentum) * z
    return p
