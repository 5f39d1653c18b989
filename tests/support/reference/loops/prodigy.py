"""Mishchenko and Defazio 2023; Defazio and Mishchenko 2023. Both step a list of arrays."""

from __future__ import annotations

import math

import numpy as np


def prodigy(
    params,
    grads,
    lr=1.0,
    betas=(0.9, 0.999),
    beta3=None,
    eps=1e-8,
    weight_decay=0.0,
    decouple=True,
    use_bias_correction=False,
    safeguard_warmup=False,
    d0=1e-6,
    d_coef=1.0,
    growth_rate=math.inf,
):
    (b1, b2), b3 = betas, math.sqrt(betas[1]) if beta3 is None else beta3
    start, params = params, list(params)
    m, v, s = ([np.zeros_like(p) for p in params] for _ in range(3))
    d = d_max = d0
    numerator = 0.0
    for t, gs in enumerate(grads, start=1):
        bias = math.sqrt(1 - b2**t) / (1 - b1**t) if use_bias_correction else 1.0
        rate = d * lr * bias
        numerator, denominator = b3 * numerator, 0.0
        if not decouple:
            gs = [g + weight_decay * p for g, p in zip(gs, params, strict=True)]
        for i, g in enumerate(gs):
            numerator += d / d0 * rate * np.sum(g * (start[i] - params[i]))
            m[i] = b1 * m[i] + (1 - b1) * d * g
            v[i] = b2 * v[i] + (1 - b2) * (d * g) ** 2
            s[i] = b3 * s[i] + d / d0 * (d if safeguard_warmup else rate) * g
            denominator += np.sum(np.abs(s[i]))
        d_hat = d_coef * numerator / denominator
        if d == d0:
            d = max(d, d_hat)
        d_max = max(d_max, d_hat)
        d = min(d_max, d * growth_rate)
        for i, p in enumerate(params):
            decayed = p * (1 - rate * weight_decay) if decouple else p
            params[i] = decayed - rate * m[i] / (np.sqrt(v[i]) + d * eps)
    return params


def dadapt_adam(
    params,
    grads,
    lr=1.0,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    decouple=False,
    use_bias_correction=False,
    d0=1e-6,
    growth_rate=math.inf,
):
    (b1, b2), params, d = betas, list(params), d0
    root, weighted = math.sqrt(b2), 0.0
    m, v, s = ([np.zeros_like(p) for p in params] for _ in range(3))
    for t, gs in enumerate(grads, start=1):
        bias = math.sqrt(1 - b2**t) / (1 - b1**t) if use_bias_correction else 1.0
        rate = d * lr * bias
        if not decouple:
            gs = [g + weight_decay * p for g, p in zip(gs, params, strict=True)]
        product = size = 0.0
        for i, g in enumerate(gs):
            product += rate * np.sum(g * s[i] / (np.sqrt(v[i]) + eps))
            m[i] = b1 * m[i] + (1 - b1) * rate * g
            v[i] = b2 * v[i] + (1 - b2) * g**2
            s[i] = root * s[i] + (1 - root) * rate * g
            size += np.sum(np.abs(s[i]))
        weighted = root * weighted + (1 - root) * product
        d = max(d, min(weighted / ((1 - root) * size), d * growth_rate))
        for i, p in enumerate(params):
            decayed = p * (1 - rate * weight_decay) if decouple else p
            params[i] = decayed - m[i] / (np.sqrt(v[i]) + eps)
    return params
