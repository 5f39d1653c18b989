"""Gupta et al. 2018, Algorithm 1, with the additions of Shi et al. 2023, for one tensor."""

from __future__ import annotations

import numpy as np


def shampoo(
    p,
    grads,
    lr,
    betas=(0.9, 1.0),
    eps=1e-12,
    weight_decay=0.0,
    weight_decay_type="decoupled",
    peak_lr=None,
    momentum=0.0,
    max_preconditioner_dim=1024,
    precondition_frequency=1,
    grafting=None,
    grafting_eps=1e-10,
):
    if p.size == 0:
        return p
    shape = p.shape
    p = p.reshape(shape[0], -1) if p.ndim > 1 else p.reshape(-1, 1)
    grads = [g.reshape(p.shape) for g in grads]
    decay = {
        "decoupled": weight_decay,
        "corrected": weight_decay * lr / (peak_lr or 1.0),
        "independent": weight_decay / (peak_lr or 1.0),
    }[weight_decay_type]
    d, new = max_preconditioner_dim, np.empty_like(p)
    for i in range(0, p.shape[0], d):
        for j in range(0, p.shape[1], d):
            here = np.s_[i : i + d, j : j + d]
            new[here] = _block(
                *(p[here], [g[here] for g in grads], lr, betas, eps, decay, momentum),
                *(precondition_frequency, grafting, grafting_eps),
            )
    return new.reshape(shape)


def _block(p, grads, lr, betas, eps, decay, momentum, every, grafting, grafting_eps):
    b1, b2 = betas
    weight = 1.0 if b2 == 1 else 1 - b2
    sides = [k for k in (0, 1) if p.shape[k] > 1] or [0]
    factors = {k: np.zeros((p.shape[k],) * 2) for k in sides}
    roots = {k: np.eye(p.shape[k]) for k in sides}
    m, v, b = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        m = b1 * m + (1 - b1) * g
        v = 0.999 * v + 0.001 * g**2
        M = m / (1 - b1**t)
        adam = M / (np.sqrt(v / (1 - 0.999**t)) + grafting_eps)
        for k in sides:
            factors[k] = b2 * factors[k] + weight * (g @ g.T if k == 0 else g.T @ g)
            if t % every == 0:
                A = factors[k] / (1.0 if b2 == 1 else 1 - b2**t)
                values, Q = np.linalg.eigh(A)
                values = np.maximum(values, 0.0) + eps
                roots[k] = Q @ np.diag(values ** (-1 / (2 * len(sides)))) @ Q.T
        W = M
        for k in sides:
            W = roots[k] @ W if k == 0 else W @ roots[k]
        if grafting:
            W = W * np.linalg.norm(adam) / (np.linalg.norm(W) + 1e-16)
            W = adam if t < every else W
        b = momentum * b + W + decay * p
        p = p - lr * b
    return p
