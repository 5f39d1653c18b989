"""Loops that see a tensor with a basis, or a factor, for each of its dimensions."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def along(x: Tensor, i: int, A: Tensor) -> Tensor:
    """Aᵀ times the i-th dimension."""
    return torch.tensordot(x, A, dims=([i], [0])).movedim(-1, i)


def unfolded(x: Tensor, i: int) -> Tensor:
    return x.movedim(i, 0).reshape(x.shape[i], -1)


def gram(x: Tensor, i: int) -> Tensor:
    return unfolded(x, i) @ unfolded(x, i).T


def every(x: Tensor, bases: list) -> Tensor:
    for i, q in enumerate(bases):
        x = x if q is None else along(x, i, q)
    return x


def back(x: Tensor, bases: list) -> Tensor:
    return every(x, [None if q is None else q.T for q in bases])


def eigenvectors(A: Tensor) -> Tensor:
    return torch.linalg.eigh(A)[1].flip(-1)


def soap_of_tensors(p, grads, lr, shape, b1=0.9, b2=0.95, often=2, max_precond_dim=10000):
    """https://github.com/nikhilvyas/SOAP, with its decay of 0.01. shape: with merged dimensions."""
    m, v = torch.zeros(shape, dtype=p.dtype), torch.zeros(shape, dtype=p.dtype)
    used = [n <= max_precond_dim for n in shape]
    factors = [torch.zeros(n, n, dtype=p.dtype) for n in shape]
    bases: list = [None] * len(shape)
    for t, g in enumerate(grads):
        g = g.reshape(shape)
        if t:
            h = every(g, bases)
            m, v = b1 * m + (1 - b1) * h, b2 * v + (1 - b2) * h * h
            rate = lr * math.sqrt(1 - b2**t) / (1 - b1**t)
            p = p - rate * back(m / (v.sqrt() + 1e-8), bases).reshape(p.shape)
            p = p - lr * 0.01 * p
        factors = [b2 * A + (1 - b2) * gram(g, i) for i, A in enumerate(factors)]
        if not t:
            pairs = zip(used, factors, strict=True)
            bases = [eigenvectors(A) if use else None for use, A in pairs]
        elif t % often == 0:
            plain = back(m, bases)
            for i, (A, q) in enumerate(zip(factors, bases, strict=True)):
                if q is not None:
                    order = (q.T @ A @ q).diagonal().argsort(descending=True)
                    v = v.index_select(i, order)
                    bases[i] = torch.linalg.qr(A @ q[:, order])[0]
            m = every(plain, bases)
    return p


def kl_of_tensors(p, grads, lr, soap, b1=0.9, b2=0.95, often=2):
    """https://github.com/yorkerlin/KL-Methods, where all eigenvalues of a step are of the last."""
    whole, p = p.shape, p.squeeze()
    n = p.dim()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    factors, bases, roots = [], [], []
    for t, g in enumerate(grads):
        g = g.reshape(p.shape)
        others = [g.numel() / k for k in g.shape]
        if not t:
            factors = [0.05 * gram(g, i) / k for i, k in enumerate(others)]
            bases = [eigenvectors(A) for A in factors]
            roots = [torch.full((k,), 0.1**-0.5, dtype=p.dtype) for k in g.shape]
            continue
        shaped = [r.reshape([-1 if j == i else 1 for j in range(n)]) for i, r in enumerate(roots)]
        scale = math.prod(shaped)
        if soap:
            h = every(g, bases)
            m, v = m.lerp(h, 1 - b1), v.lerp(h * h, 1 - b2)
            u = m / (v.sqrt() + 1e-8)
        else:
            m = m.lerp(g, 1 - b1)
            u = every(m, bases) * scale / (1 + 1e-8 * scale)
        p = p - lr * back(u, bases)
        p = p - lr * 0.01 * p
        plain = back(m, bases)
        new = []
        for i in range(n):
            white = g
            for j in range(n):
                white = white if i == j else along(white, j, bases[j]) * shaped[j]
            factors[i] = b2 * factors[i] + (1 - b2) * gram(white, i) / others[i]
            seen = unfolded(along(white, i, bases[i]), i).square().mean(1)
            most = max(10, min(len(seen), 4000))
            new.append((b2 * roots[i] ** -2 + (1 - b2) * seen).rsqrt().clamp(max=most))
        roots = new
        if t % often == 0:
            bases = [torch.linalg.qr(A @ q)[0] for A, q in zip(factors, bases, strict=True)]
            m = every(plain, bases) if soap else m
    return p.reshape(whole)


def shampoo_of_tensors(p, grads, lr, shape, b1=0.9, b2=0.95, eps=1e-6):
    """https://github.com/facebookresearch/optimizers. shape: after the merging of dimensions."""
    n = len([k for k in shape if k > 1])
    m, factors = 0.0, [0.0] * len(shape)
    for t, g in enumerate(grads, start=1):
        g = g.reshape(shape)
        m = b1 * m + (1 - b1) * g
        factors = [b2 * A + (1 - b2) * gram(g, i) for i, A in enumerate(factors)]
        u = m / (1 - b1**t)
        for i, A in enumerate(factors):
            if shape[i] > 1:
                values, q = torch.linalg.eigh(A / (1 - b2**t) + eps * torch.eye(shape[i]))
                values = values - values.min() + values.min().clamp(min=eps)
                u = along(u, i, q @ torch.diag(values ** (-0.5 / n)) @ q.T)
        p = p - lr * u.reshape(p.shape)
    return p
