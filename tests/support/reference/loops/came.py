"""Luo et al. 2023, Algorithm 2, as the authors' code has it."""

from __future__ import annotations

import numpy as np


def _mean(x, axis):
    return x.sum(axis, keepdims=True) / max(x.shape[axis], 1)


def _rsqrt_of_product(row, col):
    return 1 / np.sqrt(row / _mean(row, -2)) * (1 / np.sqrt(col))


def came(
    p,
    grads,
    lr,
    betas=(0.9, 0.999, 0.9999),
    eps=(1e-30, 1e-16),
    clip_threshold=1.0,
    weight_decay=0.0,
):
    (b1, b2, b3), m, v = betas, np.zeros_like(p), np.zeros_like(p)
    if not p.size:
        return p
    if p.ndim > 1:
        row, col = _mean(np.zeros_like(p), -1), _mean(np.zeros_like(p), -2)
        row_res, col_res = np.zeros_like(row), np.zeros_like(col)
    for g in grads:
        square = g**2 + eps[0]
        if p.ndim > 1:
            row = b2 * row + (1 - b2) * _mean(square, -1)
            col = b2 * col + (1 - b2) * _mean(square, -2)
            u = g * _rsqrt_of_product(row, col)
        else:
            v = b2 * v + (1 - b2) * square
            u = g / np.sqrt(v)
        u = u / max(1.0, np.sqrt(np.mean(u**2)) / clip_threshold)
        m = b1 * m + (1 - b1) * u
        step = m
        if p.ndim > 1:
            residual = (u - m) ** 2 + eps[1]
            row_res = b3 * row_res + (1 - b3) * _mean(residual, -1)
            col_res = b3 * col_res + (1 - b3) * _mean(residual, -2)
            step = m * _rsqrt_of_product(row_res, col_res)
        p = p - lr * weight_decay * p
        p = p - lr * step
    return p
