"""Li 2018, for one tensor, as kron_torch has it; its random numbers are those of the library."""

from __future__ import annotations

import numpy as np
import torch

from functional_optim.core import draws, randomness


def psgd_kron(
    p,
    grads,
    lr,
    b1=0.9,
    weight_decay=0.0,
    preconditioner_update_probability=None,
    memory_save_mode=None,
    precond_lr=0.1,
    clip_rms=1.1,
    seed=0,
):
    flat = (p.shape[0], -1) if p.ndim > 2 else p.shape or (1,)
    if p.size == 0:
        return p
    shape = p.reshape(flat).shape
    sides = len(shape)
    triangular = [sides > 1 and n > 1 and memory_save_mode != "all_diag" for n in shape]
    if memory_save_mode == "one_diag":
        triangular[np.argsort(shape, kind="stable")[-1]] = False
    Q = [np.eye(n) for n in shape]
    m, waited = np.zeros(shape), 0
    for t, g in enumerate(grads, start=1):
        m = b1 * m + (1 - b1) * g.reshape(shape)
        mu = m / (1 - b1**t)
        share = preconditioner_update_probability
        if share is None:
            share = np.clip(np.exp(-0.001 * (t - 501)), 0.03, 1.0)
        waited += 1
        if waited >= 1 / share:
            waited = 0
            V = _drawn(seed, t, shape)
            G = mu + np.sqrt(np.finfo(np.float32).eps) * np.abs(mu).mean() * V
            A, B = G, V
            for i, q in enumerate(Q):
                A = _along(q, A, i)
                B = _along(np.linalg.inv(q).T, B, i)
            if np.any(mu):
                Q = [_learned(q, A, B, i, precond_lr, triangular[i]) for i, q in enumerate(Q)]
        u = mu
        for i, q in enumerate(Q):
            u = _along(q.T @ q, u, i)
        u = u * min(1.0, clip_rms / (np.sqrt(np.mean(u**2)) + 1e-12))
        p = p - lr * (u.reshape(p.shape) + (weight_decay * p if p.ndim > 1 else 0.0))
    return p


def _drawn(seed, t, shape):
    rows, columns = (*shape, 1)[:2]
    key = draws.stream(torch.tensor(seed), t, rows, columns)
    drawn = randomness.normal(key, (rows, columns), torch.float64, torch.device("cpu"))
    return drawn.numpy().reshape(shape)


def _along(q, X, i):
    """A matrix times each of the vectors along one dimension."""
    return np.moveaxis(np.tensordot(q, X, axes=(1, i)), 0, i)


def _learned(q, A, B, i, precond_lr, triangular):
    a, b = [np.moveaxis(X, i, 0).reshape(len(q), -1) for X in (A, B)]
    aa, bb = a @ a.T, b @ b.T
    if not triangular:
        d, s = np.diag(aa - bb), np.diag(aa + bb)
        return q - precond_lr * np.diag(d / s.max()) @ q
    S = aa + bb
    x = S[:, np.argmax(np.sum((S / np.abs(S).max()) ** 2, axis=0))] @ S
    x = S @ (x / np.linalg.norm(x))
    return q - precond_lr * np.triu(aa - bb) @ q / np.linalg.norm(x)
