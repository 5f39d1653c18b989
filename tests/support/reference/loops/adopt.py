"""Taniguchi et al. 2024, as in their code."""

from __future__ import annotations

import numpy as np


def adopt(
    p,
    grads,
    lr,
    betas=(0.9, 0.9999),
    eps=1e-6,
    weight_decay=0.0,
    clip_exponent=0.25,
    decoupled_weight_decay=False,
):
    (b1, b2), m = betas, np.zeros_like(p)
    v = None
    for n, g in enumerate(grads):
        if not decoupled_weight_decay:
            g = g + weight_decay * p
        if n == 0:
            v = g * g
            continue
        ratio = g / np.maximum(np.sqrt(v), eps)
        ratio = np.clip(ratio, -(n**clip_exponent), n**clip_exponent)
        m = b1 * m + (1 - b1) * ratio
        p = p - lr * (m + (weight_decay * p if decoupled_weight_decay else 0))
        v = b2 * v + (1 - b2) * g * g
    return p
