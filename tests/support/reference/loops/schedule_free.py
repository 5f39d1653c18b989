"""Defazio et al. 2024, with x, y and z kept apart; GPA in the same way."""

from __future__ import annotations

import numpy as np


def schedule_free_sgd(
    p, grads, lr, momentum, weight_decay=0.0, warmup_steps=0, r=0.0, weight_lr_power=2.0
):
    def step(g, y, rate):
        return -rate * (g + weight_decay * y)

    weights = (r, weight_lr_power)
    return _averaged(p, grads, lr, momentum, warmup_steps, weights, step)


def schedule_free_adamw(
    p,
    grads,
    lr,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    warmup_steps=0,
    r=0.0,
    weight_lr_power=2.0,
):
    seen = []

    def step(g, y, rate):
        seen.append(g**2)
        t = len(seen)
        v = sum((1 - betas[1]) * betas[1] ** (t - 1 - i) * s for i, s in enumerate(seen))
        return -rate * (g / (np.sqrt(v / (1 - betas[1] ** t)) + eps) + weight_decay * y)

    weights = (r, weight_lr_power)
    return _averaged(p, grads, lr, betas[0], warmup_steps, weights, step)


def _averaged(p, grads, lr, beta, warmup_steps, weights, step):
    x = y = z = p
    top = total = 0.0
    for t, g in enumerate(grads, start=1):
        rate = lr * min(1, t / warmup_steps) if warmup_steps else lr
        top = max(top, rate)
        w = t ** weights[0] * top ** weights[1]
        total += w
        z = z + step(g, y, rate)
        x = x + w / total * (z - x)
        y = beta * x + (1 - beta) * z
    return y


def primal_averaged(p, grads, lr, train_interp_coeff, eval_interp_coeff):
    """GPA around Adam."""
    (b1, b2), eps = (0.8, 0.95), 1e-3
    x = y = z = p
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        z = z - lr * m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        x = eval_interp_coeff * x + (1 - eval_interp_coeff) * z
        y = train_interp_coeff * x + (1 - train_interp_coeff) * z
    return y
