"""Adam on a few directions of the gradient, as the authors of GaLore and APOLLO have it."""

from __future__ import annotations

import numpy as np
import torch

from functional_optim.algorithms.apollo import projection


def _adam(p, grads, lr, betas, eps, weight_decay):
    (b1, b2), m, v = betas, np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        step = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        p = p - lr * (step + weight_decay * p)
    return p


def galore(
    p,
    grads,
    lr,
    betas=(0.9, 0.999),
    eps=1e-6,
    weight_decay=0.0,
    rank=128,
    update_proj_gap=200,
    scale=0.25,
):
    if p.ndim != 2:
        return _adam(p, grads, lr, betas, eps, weight_decay)
    if not p.size:
        return p
    (b1, b2), m, v, basis = betas, 0.0, 0.0, None
    right = p.shape[0] >= p.shape[1]
    for t, g in enumerate(grads, start=1):
        if (t - 1) % update_proj_gap == 0:
            u, _, vh = np.linalg.svd(g, full_matrices=False)
            found = vh[:rank].T if right else u[:, :rank]
            signs = np.sign((found * (found if basis is None else basis)).sum(0))
            basis = found * signs
        low = g @ basis if right else basis.T @ g
        m = b1 * m + (1 - b1) * low
        v = b2 * v + (1 - b2) * low**2
        step = m / (np.sqrt(v) + eps)
        step = step @ basis.T if right else basis @ step
        size = np.sqrt(1 - b2**t) / (1 - b1**t)
        p = p - lr * (size * scale * step + weight_decay * p)
    return p


def apollo(
    p,
    grads,
    lr,
    betas=(0.9, 0.999),
    eps=1e-6,
    weight_decay=0.0,
    rank=256,
    update_proj_gap=200,
    scale=1.0,
    scale_type="channel",
    growth=1.01,
    seed=0,
):
    if p.ndim != 2:
        return _adam(p, grads, lr, betas, eps, weight_decay)
    if not p.size:
        return p
    (b1, b2), m, v, before = betas, 0.0, 0.0, None
    wide = p.shape[0] < p.shape[1]
    short = min(p.shape)
    for t, g in enumerate(grads, start=1):
        if (t - 1) % update_proj_gap == 0:
            like = torch.zeros((), dtype=torch.float64)
            drawn = projection(seed, (t - 1) // update_proj_gap, short, min(rank, short), like)
            basis = drawn.numpy()
        low = basis.T @ g if wide else g @ basis
        m = b1 * m + (1 - b1) * low
        v = b2 * v + (1 - b2) * low**2
        normed = m / (np.sqrt(v) + eps)
        axis = None if scale_type == "tensor" else 0 if wide else 1
        above, below = [np.sqrt(np.sum(x**2, axis, keepdims=True)) for x in (normed, low)]
        step = g * (above / (below + 1e-8))
        norm = np.linalg.norm(step)
        limit = 1.0 if not before else max(norm / (before + 1e-8), growth) / growth
        before = norm / limit
        size = np.sqrt(1 - b2**t) / (1 - b1**t)
        p = p - lr * (size * scale**0.5 * step / limit + weight_decay * p)
    return p
