"""Loops of averages."""

import numpy as np


def _adamw(p, grads, lr, weight_decay, betas, eps):
    """Loshchilov and Hutter 2019, Algorithm 2, for what others leave to AdamW."""
    (b1, b2), m, v = betas, np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        step = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        p = p - lr * (step + weight_decay * p)
    return p


def acprop(p, grads, lr, betas=(0.9, 0.999), eps=1e-16, weight_decay=0.0, rectify=True):
    """Zhuang et al. 2021, with the rectification of Liu et al. 2019."""
    (b1, b2), m, s = betas, np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        p = p - lr * weight_decay * p
        m = b1 * m + (1 - b1) * g
        s = s + eps if t > 1 else s
        if t == 1 or (rectify and _length(t, b2) <= 5):
            p = p - lr * m / (1 - b1**t)
        elif rectify:
            p = p - lr * _factor(t, b2) * g * np.sqrt(1 - b2**t) / (np.sqrt(s) + eps)
        else:
            p = p - lr * g / (np.sqrt(s / (1 - b2 ** (t - 1))) + eps)
        s = b2 * s + (1 - b2) * (g - m) ** 2
    return p


def _length(t, b2):
    """How many gradients the second average amounts to, as RAdam counts."""
    return 2 / (1 - b2) - 1 - 2 * t * b2**t / (1 - b2**t)


def _factor(t, b2):
    r, most = _length(t, b2), 2 / (1 - b2) - 1
    return np.sqrt((r - 4) * (r - 2) * most / ((most - 4) * (most - 2) * r))


def ademamix(
    p, grads, lr, betas=(0.9, 0.999, 0.9999), alpha=2.0, beta3_warmup=None, alpha_warmup=None,
    eps=1e-8, weight_decay=0.0,
):  # fmt: skip
    """Pagliardini et al. 2024, Algorithm 1, as in their code."""
    b1, b2, b3 = betas
    fast, slow, v = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        a = alpha if alpha_warmup is None else alpha * min(t / alpha_warmup, 1)
        b = b3 if beta3_warmup is None else _rising(t, b1, b3, beta3_warmup)
        fast = b1 * fast + (1 - b1) * g
        slow = b * slow + (1 - b) * g
        v = b2 * v + (1 - b2) * g**2
        top = fast / (1 - b1**t) + a * slow
        p = p - lr * (top / (np.sqrt(v / (1 - b2**t)) + eps) + weight_decay * p)
    return p


def simplified_ademamix(
    p, grads, lr, betas=(0.99, 0.95), alpha=0.0, beta1_warmup=None, min_beta1=0.9, eps=1e-8,
    weight_decay=0.0,
):  # fmt: skip
    """Morwani et al. 2025, as in their code."""
    (b1, b2), m, v = betas, np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        b = b1 if beta1_warmup is None else _rising(t, min_beta1, b1, beta1_warmup)
        m = b * m + g
        v = b2 * v + (1 - b2) * g**2
        u = (m + alpha * g) / (np.sqrt(v / (1 - b2**t)) + eps)
        p = p - lr * (u + weight_decay * p)
    return p


def _rising(t, start, end, steps):
    """A rate whose half-life rises linearly: after h + 1 steps, 0.5 is left."""
    if t >= steps:
        return end
    lives = [np.log(0.5) / np.log(beta + 1e-8) - 1 for beta in (start, end)]
    life = lives[0] + (lives[1] - lives[0]) * t / steps
    return np.exp(np.log(0.5) / (life + 1))


def laprop(p, grads, lr, betas=(0.9, 0.999), eps=1e-15, weight_decay=0.0):
    """Ziyin et al. 2020, with the decay of their code."""
    (b1, b2), m, v = betas, np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        v = b2 * v + (1 - b2) * g**2
        m = b1 * m + (1 - b1) * g / (np.sqrt(v / (1 - b2**t)) + eps)
        p = p - lr * m / (1 - b1**t)
        p = p - weight_decay * p
    return p


def mars(
    p, grads, lr, betas=(0.95, 0.99), eps=1e-8, weight_decay=0.0, gamma=0.025, optimize_1d=False,
    lr_1d=3e-3, betas_1d=(0.9, 0.95), weight_decay_1d=0.1,
):  # fmt: skip
    """Yuan et al. 2024, as in their code."""
    if p.ndim != 2 and not optimize_1d:
        return _adamw(p, grads, lr_1d, weight_decay_1d, betas_1d, eps)
    (b1, b2), m, v = betas, np.zeros_like(p), np.zeros_like(p)
    before = np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        c = g + gamma * b1 / (1 - b1) * (g - before)
        c = c / max(np.sqrt(np.sum(c * c)), 1)
        m = b1 * m + (1 - b1) * c
        v = b2 * v + (1 - b2) * c * c
        u = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        p = p - lr * (u + weight_decay * p)
        before = g
    return p


def mars_at_one_rate(p, grads, lr, **hyper):
    return mars(p, grads, lr, lr_1d=lr, **hyper)


def primal_averaged(p, grads, lr, train_interp_coeff, eval_interp_coeff):
    """GPA around Adam, with x, y and z kept apart."""
    (b1, b2), eps = (0.8, 0.95), 1e-3
    x = y = z = p
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        z = z - lr * m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        x = eval_interp_coeff * x + (1 - eval_interp_coeff) * z
        y = train_interp_coeff * x + (1 - train_interp_coeff) * z
    return y


def sophia(
    p, grads, lr, betas=(0.965, 0.99), rho=0.04, weight_decay=0.1, eps=1e-15, maximize=False,
    hessians=None,
):  # fmt: skip
    """Liu et al. 2023, Algorithm 3, with the numbers of the authors' code.

    hessians: the estimate that comes before each step, or None.
    """
    m, h = np.zeros_like(p), np.zeros_like(p)
    for k, g in enumerate(grads):
        if hessians is not None and hessians[k] is not None:
            h = betas[1] * h + (1 - betas[1]) * hessians[k]
        m = betas[0] * m + (1 - betas[0]) * (-g if maximize else g)
        p = p - lr * weight_decay * p
        p = p - lr * np.sign(m) * np.minimum(np.abs(m) / (rho * np.maximum(h, 0) + eps), 1)
    return p
