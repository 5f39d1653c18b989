"""Loops that see a matrix in a basis, or with factors for its sides."""

from __future__ import annotations

import numpy as np
import torch

from functional_optim.algorithms.apollo import projection
from functional_optim.core import draws, randomness
from reference.loops.averages import _adamw


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
    """Vyas et al. 2024, with the first step, the decay and the sorting of their code."""
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


class Basis:
    """The factors, as in `update_2d_preconditioner`: what is kept of eigenvalues is 1 / √λ."""

    def __init__(self, g, beta, init_factor, max_clamp_value):
        m, n = g.shape
        self.beta = beta
        self.factors = [(1 - beta) / n * g @ g.T, (1 - beta) / m * g.T @ g]
        self.q = [np.linalg.eigh(x)[1][:, ::-1] for x in self.factors]
        self.s = [np.full(k, init_factor**-0.5) for k in g.shape]
        self.most = [max(10, min(k, max_clamp_value)) for k in g.shape]

    def rotate(self, x):
        return self.q[0].T @ x @ self.q[1]

    def back(self, x):
        return self.q[0] @ x @ self.q[1].T

    def see(self, g):
        m, n = g.shape
        inverse = [q @ np.diag(s**2) @ q.T for q, s in zip(self.q, self.s, strict=True)]
        h = self.rotate(g)
        new = [
            np.mean((h * self.s[1][None, :]) ** 2, axis=1),
            np.mean((h * self.s[0][:, None]) ** 2, axis=0),
        ]
        grams = [g @ inverse[1] @ g.T / n, g.T @ inverse[0] @ g / m]
        for i in range(2):
            self.factors[i] = self.beta * self.factors[i] + (1 - self.beta) * grams[i]
            value = self.beta / self.s[i] ** 2 + (1 - self.beta) * new[i]
            self.s[i] = np.minimum(value**-0.5, self.most[i])

    def renew(self):
        self.q = [np.linalg.qr(x @ q)[0] for x, q in zip(self.factors, self.q, strict=True)]


def kl_soap(
    p,
    grads,
    lr,
    betas=(0.9, 0.98),
    shampoo_beta=None,
    eps=1e-8,
    weight_decay=0.01,
    precondition_frequency=10,
    init_factor=0.1,
    max_clamp_value=4000,
):
    """Lin et al. 2025, with the first step, the decay and the bounds of their code."""
    b1, b2 = betas
    m, v = np.zeros_like(p), np.zeros_like(p)
    bs = b2 if shampoo_beta is None else shampoo_beta
    basis = Basis(grads[0], bs, init_factor, max_clamp_value)
    for t, g in enumerate(grads[1:], start=1):
        h = basis.rotate(g)
        m = b1 * m + (1 - b1) * h
        v = b2 * v + (1 - b2) * h**2
        p = (1 - lr * weight_decay) * (p - lr * basis.back(m / (np.sqrt(v) + eps)))
        basis.see(g)
        if t % precondition_frequency == 0:
            plain = basis.back(m)
            basis.renew()
            m = basis.rotate(plain)
    return p


def kl_shampoo(
    p,
    grads,
    lr,
    momentum=0.9,
    shampoo_beta=0.98,
    eps=1e-8,
    weight_decay=0.01,
    precondition_frequency=10,
    init_factor=0.1,
    max_clamp_value=4000,
):
    """Likewise."""
    m = np.zeros_like(p)
    basis = Basis(grads[0], shampoo_beta, init_factor, max_clamp_value)
    for t, g in enumerate(grads[1:], start=1):
        m = momentum * m + (1 - momentum) * g
        s = np.outer(*basis.s)
        p = p - lr * basis.back(basis.rotate(m) * (s / (1 + eps * s)))
        p = p - lr * weight_decay * p
        basis.see(g)
        if t % precondition_frequency == 0:
            basis.renew()
    return p


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
    """Gupta et al. 2018, Algorithm 1, with the additions of Shi et al. 2023."""
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
    """Li 2018, as kron_torch has it; its random numbers are those of the library."""
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
    """As the authors have it; a kernel is a matrix."""
    if p.ndim < 2:
        return _adamw(p, grads, lr, weight_decay, betas, eps)
    if not p.size:
        return p
    shape, p, grads = p.shape, p.reshape(len(p), -1), [g.reshape(len(p), -1) for g in grads]
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
    return p.reshape(shape)


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
    """As the authors have it; its random numbers are those of the library. A kernel is a matrix."""
    if p.ndim < 2:
        return _adamw(p, grads, lr, weight_decay, betas, eps)
    if not p.size:
        return p
    shape, p, grads = p.shape, p.reshape(len(p), -1), [g.reshape(len(p), -1) for g in grads]
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
    return p.reshape(shape)
