"""Jordan et al. 2024 for arrays of two dimensions or more; Loshchilov, Hutter 2019 for others."""

from __future__ import annotations

import numpy as np

from reference.loops.adam import adamw as _adamw


def _orthogonal(x, steps=5):
    """The article's quintic, on the smaller side of a matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / max(np.linalg.norm(x), 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + b * (gram @ x) + c * (gram @ gram @ x)
    return x.T if tall else x


def muon_adamw(
    p,
    grads,
    lr,
    adamw_lr,
    weight_decay,
    adamw_weight_decay,
    momentum,
    betas,
    eps,
    ns_dtype,
    muon,
):
    if p.ndim < 2:
        return _adamw(p, grads, adamw_lr, adamw_weight_decay, betas=betas, eps=eps)
    if p.size == 0:
        return p
    m = np.zeros_like(p)
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g
        o = _orthogonal(u.reshape(len(p), -1))
        o = o * np.sqrt(max(1, o.shape[0] / o.shape[1]))
        p = (1 - lr * weight_decay) * p - lr * o.reshape(p.shape)
    return p


def muon_adamw_at_one_rate(p, grads, lr, **hyper):
    return muon_adamw(p, grads, lr, adamw_lr=lr, **hyper)
