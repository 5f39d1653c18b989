"""You et al. 2020, Algorithm 2, and You et al. 2017, Algorithm 1, as timm has them."""

from __future__ import annotations

import numpy as np


def lamb(
    params,
    steps,
    lr,
    betas=(0.9, 0.999),
    eps=1e-6,
    weight_decay=0.01,
    max_grad_norm=1.0,
    trust_clip=False,
    always_adapt=False,
    maximize=False,
):
    b1, b2 = betas
    m = [np.zeros_like(p) for p in params]
    v = [np.zeros_like(p) for p in params]
    for t, grads in enumerate(steps, start=1):
        grads = [-g if maximize else g for g in grads]
        if max_grad_norm is not None:
            norm = np.sqrt(sum(np.sum(g**2) for g in grads))
            grads = [g * max_grad_norm / norm if norm > max_grad_norm else g for g in grads]
        params = list(params)
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g**2
            r = m[i] / (1 - b1**t) / (np.sqrt(v[i] / (1 - b2**t)) + eps) + weight_decay * p
            w_norm, r_norm = np.linalg.norm(p.ravel()), np.linalg.norm(r.ravel())
            ratio = w_norm / r_norm if w_norm > 0 and r_norm > 0 else 1.0
            if weight_decay == 0 and not always_adapt:
                ratio = 1.0
            params[i] = p - lr * (min(ratio, 1.0) if trust_clip else ratio) * r
    return params


def lars(
    p,
    grads,
    lr=1.0,
    momentum=0.0,
    dampening=0.0,
    weight_decay=0.0,
    nesterov=False,
    trust_coefficient=1e-3,
    eps=1e-8,
    always_adapt=False,
    maximize=False,
):
    b = None
    for g in grads:
        g = -g if maximize else g
        if weight_decay or always_adapt:
            w_norm, g_norm = np.linalg.norm(p.ravel()), np.linalg.norm(g.ravel())
            local = 1.0
            if w_norm > 0 and g_norm > 0:
                local = trust_coefficient * w_norm / (g_norm + weight_decay * w_norm + eps)
            g = local * (g + weight_decay * p)
        b = g if b is None else momentum * b + (1 - dampening) * g
        p = p - lr * (g + momentum * b if nesterov else b)
    return p
