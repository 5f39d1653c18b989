"""Vyas et al. 2024, with the first step, the decay and the sorting of their code."""

from __future__ import annotations

import numpy as np


def soap(
    p,
    grads,
    lr,
    betas=(0.95, 0.95),
    shampoo_beta=None,
    eps=1e-8,
    weight_decay=0.01,
    precondition_frequency=10,
    max_precond_dim=10000,
):
    b1, b2 = betas
    bs = b2 if shampoo_beta is None else shampoo_beta
    one_dim = p.ndim < 2
    m, v = np.zeros_like(p), np.zeros_like(p)
    shape = (1, p.size) if one_dim else p.shape
    used = [not one_dim and n <= max_precond_dim for n in shape]
    factors = [np.zeros((n, n)) for n in shape]
    bases = [np.eye(n) for n in shape]
    for t, g in enumerate(grads):
        g = g.reshape(shape)
        if t > 0:
            ql, qr = bases
            h = ql.T @ g @ qr
            m, v = m.reshape(shape), v.reshape(shape)
            m = b1 * m + (1 - b1) * h
            v = b2 * v + (1 - b2) * h**2
            rate = lr * np.sqrt(1 - b2**t) / (1 - b1**t)
            p = p - rate * (ql @ (m / (np.sqrt(v) + eps)) @ qr.T).reshape(p.shape)
            p = p - lr * weight_decay * p
        factors[0] = bs * factors[0] + (1 - bs) * g @ g.T
        factors[1] = bs * factors[1] + (1 - bs) * g.T @ g
        if t == 0:
            for i in range(2):
                if used[i]:
                    bases[i] = np.linalg.eigh(factors[i])[1][:, ::-1]
        elif t % precondition_frequency == 0:
            plain = bases[0] @ m @ bases[1].T
            for i in range(2):
                if used[i] and factors[i].any():
                    order = np.argsort(-np.diag(bases[i].T @ factors[i] @ bases[i]))
                    v = np.take(v, order, axis=i)
                    bases[i] = np.linalg.qr(factors[i] @ bases[i][:, order])[0]
            m = bases[0].T @ plain @ bases[1]
    return p
