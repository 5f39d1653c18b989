"""Zhuang et al. 2020, Algorithm 2, and 2021, with the rectification of Liu et al. 2019."""

from __future__ import annotations

import numpy as np


def adabelief(p, grads, lr, betas=(0.9, 0.999), eps=1e-16, weight_decay=0.0, rectify=True):
    (b1, b2), m, s = betas, np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        p = p - lr * weight_decay * p
        m = b1 * m + (1 - b1) * g
        s = b2 * s + (1 - b2) * (g - m) ** 2 + eps
        m_hat = m / (1 - b1**t)
        if not rectify:
            p = p - lr * m_hat / (np.sqrt(s / (1 - b2**t)) + eps)
        elif _length(t, b2) > 5:
            p = p - lr * _factor(t, b2) * m_hat * np.sqrt(1 - b2**t) / (np.sqrt(s) + eps)
        else:
            p = p - lr * m_hat
    return p


def acprop(p, grads, lr, betas=(0.9, 0.999), eps=1e-16, weight_decay=0.0, rectify=True):
    (b1, b2), m, s = betas, np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        p = p - lr * weight_decay * p
        m = b1 * m + (1 - b1) * g
        s = s + eps if t > 1 else s
        if t == 1 or (rectify and _length(t, b2) <= 5):
            p = p - lr * m / (1 - b1**t)
        elif rectify:
            p = p - lr * _factor(t, b2) * g * np.sqrt(1 - b2**t) / (np.sqrt(s) + eps)
        else:
            p = p - lr * g / (np.sqrt(s / (1 - b2 ** (t - 1))) + eps)
        s = b2 * s + (1 - b2) * (g - m) ** 2
    return p


def _length(t, b2):
    """How many gradients the second average amounts to, as RAdam counts."""
    return 2 / (1 - b2) - 1 - 2 * t * b2**t / (1 - b2**t)


def _factor(t, b2):
    r, most = _length(t, b2), 2 / (1 - b2) - 1
    return np.sqrt((r - 4) * (r - 2) * most / ((most - 4) * (most - 2) * r))
