"""Schaipp et al. 2023. Both step a list of arrays, and take the losses of all steps."""

from __future__ import annotations

import numpy as np


def _dot(a, b):
    return sum(np.sum(x * y) for x, y in zip(a, b, strict=True))


def _bound(f, gamma, dot, size, lr, decay, rho, low, least):
    """The step size, and the estimate of the least loss: `low` before, `least` at least."""
    wide = 1 + lr * decay
    if low is not None:
        cap = wide * f + dot - wide * gamma
        if cap < wide * rho * low:
            low = max(cap / (2 * wide * rho), least)
    used = least if low is None else low
    height = wide * (f - rho * used) + dot - wide * gamma
    rate = min(lr / rho, max(height, 0.0) / size)
    if low is not None:
        low = max((f + dot - gamma - rate * size / 2) / rho, least)
    return rate, low


def momo(
    params, grads, losses, lr=1.0, weight_decay=0.0, beta=0.9, lb=0.0,
    bias_correction=False, use_fstar=False,
):  # fmt: skip
    params, low = list(params), lb if use_fstar else None
    f, gamma, d = 0.0, 0.0, [np.zeros_like(p) for p in params]
    for t, (gs, loss) in enumerate(zip(grads, losses, strict=True), start=1):
        if t == 1 and not bias_correction:
            f, gamma, d = loss, _dot(gs, params), list(gs)
        f = beta * f + (1 - beta) * loss
        gamma = beta * gamma + (1 - beta) * _dot(gs, params)
        d = [beta * x + (1 - beta) * g for x, g in zip(d, gs, strict=True)]
        rho = 1 - beta**t if bias_correction else 1.0
        given = (_dot(d, params), _dot(d, d), lr, weight_decay, rho, low, lb)
        rate, low = _bound(f, gamma, *given)
        params = [(p - rate * x) / (1 + lr * weight_decay) for p, x in zip(params, d, strict=True)]
    return params


def momo_adam(
    params, grads, losses, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, lb=0.0,
    use_fstar=False,
):  # fmt: skip
    (b1, b2), params, low = betas, list(params), lb if use_fstar else None
    f, gamma, d, v = 0.0, 0.0, *([np.zeros_like(p) for p in params] for _ in range(2))
    for t, (gs, loss) in enumerate(zip(grads, losses, strict=True), start=1):
        f = b1 * f + (1 - b1) * loss
        gamma = b1 * gamma + (1 - b1) * _dot(gs, params)
        d = [b1 * x + (1 - b1) * g for x, g in zip(d, gs, strict=True)]
        v = [b2 * x + (1 - b2) * g**2 for x, g in zip(v, gs, strict=True)]
        u = [x / (np.sqrt(y / (1 - b2**t)) + eps) for x, y in zip(d, v, strict=True)]
        given = (_dot(d, params), _dot(d, u), lr, weight_decay, 1 - b1**t, low, lb)
        rate, low = _bound(f, gamma, *given)
        params = [(p - rate * x) / (1 + lr * weight_decay) for p, x in zip(params, u, strict=True)]
    return params
