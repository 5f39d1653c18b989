"""Pagliardini et al. 2024, Algorithm 1; Morwani et al. 2025, as in their code."""

from __future__ import annotations

import numpy as np


def ademamix(
    p,
    grads,
    lr,
    betas=(0.9, 0.999, 0.9999),
    alpha=2.0,
    beta3_warmup=None,
    alpha_warmup=None,
    eps=1e-8,
    weight_decay=0.0,
):
    b1, b2, b3 = betas
    fast, slow, v = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        a = alpha if alpha_warmup is None else alpha * min(t / alpha_warmup, 1)
        b = b3 if beta3_warmup is None else _rising(t, b1, b3, beta3_warmup)
        fast = b1 * fast + (1 - b1) * g
        slow = b * slow + (1 - b) * g
        v = b2 * v + (1 - b2) * g**2
        top = fast / (1 - b1**t) + a * slow
        p = p - lr * (top / (np.sqrt(v / (1 - b2**t)) + eps) + weight_decay * p)
    return p


def simplified_ademamix(
    p,
    grads,
    lr,
    betas=(0.99, 0.95),
    alpha=0.0,
    beta1_warmup=None,
    min_beta1=0.9,
    eps=1e-8,
    weight_decay=0.0,
):
    (b1, b2), m, v = betas, np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        b = b1 if beta1_warmup is None else _rising(t, min_beta1, b1, beta1_warmup)
        m = b * m + g
        v = b2 * v + (1 - b2) * g**2
        u = (m + alpha * g) / (np.sqrt(v / (1 - b2**t)) + eps)
        p = p - lr * (u + weight_decay * p)
    return p


def _rising(t, start, end, steps):
    """A rate whose half-life rises linearly: after h + 1 steps, 0.5 is left."""
    if t >= steps:
        return end
    lives = [np.log(0.5) / np.log(beta + 1e-8) - 1 for beta in (start, end)]
    life = lives[0] + (lives[1] - lives[0]) * t / steps
    return np.exp(np.log(0.5) / (life + 1))
