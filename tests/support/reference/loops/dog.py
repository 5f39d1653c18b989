"""Ivgi et al. 2023; Khaled et al. 2023. Both step a list of arrays."""

from __future__ import annotations

import numpy as np


def _norm(arrays):
    return np.sqrt(sum(np.sum(x**2) for x in arrays))


def dog(params, grads, lr=1.0, reps_rel=1e-6, weight_decay=0.0, eps=1e-8, init_eta=None):
    start, params = params, list(params)
    far, squares = reps_rel * (1 + _norm(start)) if init_eta is None else 0.0, eps
    for t, gs in enumerate(grads):
        gs = [g + weight_decay * p for g, p in zip(gs, params, strict=True)]
        far = max(far, _norm([p - q for p, q in zip(params, start, strict=True)]))
        squares += _norm(gs) ** 2
        eta = far / np.sqrt(squares) if t or init_eta is None else init_eta
        params = [p - lr * eta * g for p, g in zip(params, gs, strict=True)]
    return params


def dowg(params, grads, lr=1.0, eps=1e-4):
    start, params = params, list(params)
    far, weighted = eps, 0.0
    for gs in grads:
        far = max(far, _norm([p - q for p, q in zip(params, start, strict=True)]) ** 2)
        weighted += far * _norm(gs) ** 2
        params = [
            p - lr * far * g / (np.sqrt(weighted) + eps) for p, g in zip(params, gs, strict=True)
        ]
    return params
