"""Loops that see a matrix in a basis, or with factors for its sides."""

import math

import numpy as np
import torch

from functional_optim.algorithms.apollo import projection
from functional_optim.core import draws, randomness
from reference.loops.averages import _adamw


def _along(q, X, i):
    """A matrix times each of the vectors along one dimension."""
    return np.moveaxis(np.tensordot(q, X, axes=(1, i)), 0, i)


def _rows(X, i):
    return np.moveaxis(X, i, 0).reshape(X.shape[i], -1)


def _gram(X, i):
    return _rows(X, i) @ _rows(X, i).T


def _into(bases, X):
    """In the basis of each dimension; None: as it is."""
    for i, q in enumerate(bases):
        X = X if q is None else _along(q.T, X, i)
    return X


def _back(bases, X):
    return _into([None if q is None else q.T for q in bases], X)


def _eigenvectors(A):
    return np.linalg.eigh(A)[1][:, ::-1]


def soap(p, grads, lr, betas, eps, precondition_frequency, weight_decay=0.01, **more):
    """Vyas et al. 2024, with the first step, the decay and the sorting of their code.

    shape: with merged dimensions.
    """
    if p.size == 0:
        return p
    (b1, b2), whole = betas, p.shape
    shape = more.get("shape") or (p.shape if p.ndim > 1 else (1, p.size))
    m, v, factors = np.zeros(shape), np.zeros(shape), [np.zeros((n, n)) for n in shape]
    used = [p.ndim > 1 and n <= more.get("max_precond_dim", 10000) for n in shape]
    bases = [None] * len(shape)
    for t, g in enumerate(grads):
        g = g.reshape(shape)
        if t > 0:
            h = _into(bases, g)
            m, v = b1 * m + (1 - b1) * h, b2 * v + (1 - b2) * h**2
            rate = lr * np.sqrt(1 - b2**t) / (1 - b1**t)
            p = p - rate * _back(bases, m / (np.sqrt(v) + eps)).reshape(whole)
            p = p - lr * weight_decay * p
        factors = [b2 * A + (1 - b2) * _gram(g, i) for i, A in enumerate(factors)]
        if t == 0:
            pairs = zip(used, factors, strict=True)
            bases = [_eigenvectors(A) if use else None for use, A in pairs]
        elif t % precondition_frequency == 0:
            plain = _back(bases, m)
            for i, (A, q) in enumerate(zip(factors, bases, strict=True)):
                if q is not None and A.any():
                    order = np.argsort(-np.diag(q.T @ A @ q))
                    v = np.take(v, order, axis=i)
                    bases[i] = np.linalg.qr(A @ q[:, order])[0]
            m = _into(bases, plain)
    return p


def kl_soap(p, grads, lr, betas, **more):
    """Lin et al. 2025, with the first step, the decay and the bounds of their code."""
    return _kl(p, grads, lr, *betas, **more)


def kl_shampoo(p, grads, lr, momentum, **more):
    """The same, but all roots of the factors divide the average of the gradients."""
    return _kl(p, grads, lr, momentum, None, **more)


def _kl(
    p, grads, lr, b1, b2, shampoo_beta, precondition_frequency, eps=1e-8, weight_decay=0.01,
    init_factor=0.1, max_clamp_value=4000,
):  # fmt: skip
    """What is kept of eigenvalues is 1 / √λ; all of a step are of the last."""
    whole, p, b3, n = p.shape, p.squeeze(), shampoo_beta, p.squeeze().ndim
    grads = [g.reshape(p.shape) for g in grads]
    m, v = np.zeros_like(p), np.zeros_like(p)
    others = [p.size / k for k in p.shape]
    factors = [(1 - b3) * _gram(grads[0], i) / k for i, k in enumerate(others)]
    bases = [_eigenvectors(A) for A in factors]
    roots = [np.full(k, init_factor**-0.5) for k in p.shape]
    for t, g in enumerate(grads[1:], start=1):
        shaped = [r.reshape([-1 if j == i else 1 for j in range(n)]) for i, r in enumerate(roots)]
        if b2 is None:
            m, scale = b1 * m + (1 - b1) * g, math.prod(shaped)
            u = _into(bases, m) * scale / (1 + eps * scale)
        else:
            h = _into(bases, g)
            m, v = b1 * m + (1 - b1) * h, b2 * v + (1 - b2) * h**2
            u = m / (np.sqrt(v) + eps)
        p = p - lr * _back(bases, u)
        p = p - lr * weight_decay * p
        plain = _back(bases, m)
        for i, k in enumerate(others):
            white = g
            for j in range(n):
                white = white if i == j else _along(bases[j].T, white, j) * shaped[j]
            factors[i] = b3 * factors[i] + (1 - b3) * _gram(white, i) / k
            seen = np.mean(_rows(_along(bases[i].T, white, i), i) ** 2, axis=1)
            most = max(10, min(len(seen), max_clamp_value))
            roots[i] = np.minimum((b3 * roots[i] ** -2 + (1 - b3) * seen) ** -0.5, most)
        if t % precondition_frequency == 0:
            bases = [np.linalg.qr(A @ q)[0] for A, q in zip(factors, bases, strict=True)]
            m = m if b2 is None else _into(bases, plain)
    return p.reshape(whole)


def shampoo(p, grads, lr, *, max_preconditioner_dim=1024, shape=None, **more):
    """Gupta et al. 2018, Algorithm 1, with the additions of Shi et al. 2023.

    shape: with merged dimensions, all of them within the limit.
    """
    whole, d = p.shape, max_preconditioner_dim
    if p.size == 0:
        return p
    if shape is not None:
        found = _block(p.reshape(shape), [g.reshape(shape) for g in grads], lr, **more)
        return found.reshape(whole)
    p = p.reshape(whole[0], -1) if p.ndim > 1 else p.reshape(-1, 1)
    grads, new = [g.reshape(p.shape) for g in grads], np.empty_like(p)
    for i in range(0, p.shape[0], d):
        for j in range(0, p.shape[1], d):
            here = np.s_[i : i + d, j : j + d]
            new[here] = _block(p[here], [g[here] for g in grads], lr, **more)
    return new.reshape(whole)


def _block(p, grads, lr, betas, eps, momentum=0.0, precondition_frequency=1, **more):
    (b1, b2), peak_lr, every = betas, more.get("peak_lr") or 1.0, precondition_frequency
    decay = {"decoupled": 1.0, "corrected": lr / peak_lr, "independent": 1 / peak_lr}
    decay = more.get("weight_decay", 0.0) * decay[more.get("weight_decay_type", "decoupled")]
    weight = 1.0 if b2 == 1 else 1 - b2
    sides = [k for k in range(p.ndim) if p.shape[k] > 1] or [0]
    factors = {k: np.zeros((p.shape[k],) * 2) for k in sides}
    roots = {k: np.eye(p.shape[k]) for k in sides}
    m, v, b = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        m = b1 * m + (1 - b1) * g
        v = 0.999 * v + 0.001 * g**2
        W = m / (1 - b1**t)
        adam = W / (np.sqrt(v / (1 - 0.999**t)) + more.get("grafting_eps", 1e-10))
        for k in sides:
            factors[k] = b2 * factors[k] + weight * _gram(g, k)
            if t % every == 0:
                values, Q = np.linalg.eigh(factors[k] / (1.0 if b2 == 1 else 1 - b2**t))
                values = np.maximum(values, 0.0) + eps
                roots[k] = Q @ np.diag(values ** (-1 / (2 * len(sides)))) @ Q.T
            W = _along(roots[k], W, k)
        if more.get("grafting"):
            W = W * np.linalg.norm(adam) / (np.linalg.norm(W) + 1e-16)
            W = adam if t < every else W
        b = momentum * b + W + decay * p
        p = p - lr * b
    return p


def psgd_kron(
    p, grads, lr, b1=0.9, weight_decay=0.0, preconditioner_update_probability=None,
    memory_save_mode=None, precond_lr=0.1, clip_rms=1.1, seed=0,
):  # fmt: skip
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
    p, grads, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, rank=128, update_proj_gap=200,
    scale=0.25,
):  # fmt: skip
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
    p, grads, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, rank=256, update_proj_gap=200,
    scale=1.0, scale_type="channel", growth=1.01, seed=0,
):  # fmt: skip
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
