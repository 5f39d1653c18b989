"""Muon and its relatives, from their authors' code, with Newton–Schulz in float64."""

import numpy as np

from reference.loops.averages import _adamw


def _jordan(G, steps=5):
    """https://kellerjordan.github.io/posts/muon/, as torch clamps the norm."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.T if G.shape[0] > G.shape[1] else G
    X = X / max(np.linalg.norm(X), 1e-7)
    for _ in range(steps):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if G.shape[0] > G.shape[1] else X


def _polar_express(G):
    """https://arxiv.org/abs/2505.16932, five steps."""
    triples = (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    )
    X = G.T if G.shape[0] > G.shape[1] else G
    X = X / max(1.02 * np.linalg.norm(X), 1e-8)
    for a, b, c in triples:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if G.shape[0] > G.shape[1] else X


def normuon(p, grads, lr, weight_decay=0.0, momentum=0.95, beta2=0.95, eps=1e-10, ns_dtype=None):
    """https://arxiv.org/abs/2510.05491, with Nesterov's momentum."""
    m, v = np.zeros_like(p), np.zeros((len(p), 1))
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        u = _jordan(momentum * m + (1 - momentum) * g)
        norm = np.linalg.norm(u)
        rows = (u * u).sum(1, keepdims=True) / max(p.shape[1], 1)
        v = beta2 * v + (1 - beta2) * rows
        u = u / (np.sqrt(v) + eps)
        u = u * norm / (np.linalg.norm(u) + eps)
        u = u * max(1.0, p.shape[0] / max(p.shape[1], 1)) ** 0.5
        p = p * (1 - lr * weight_decay) - lr * u
    return p


def adamuon(p, grads, lr, weight_decay=0.01, momentum=0.95, eps=1e-8, ns_dtype=None):
    """https://arxiv.org/abs/2507.11005, with Nesterov's momentum."""
    m, v = np.zeros_like(p), np.zeros_like(p)
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        u = _jordan(np.sign(momentum * m + (1 - momentum) * g))
        v = momentum * v + (1 - momentum) * u * u
        u = u / (np.sqrt(v) + eps)
        u = u * (0.2 * p.size**0.5 / (np.linalg.norm(u) + eps))
        p = p * (1 - lr * weight_decay) - lr * u
    return p


def dion2(p, grads, lr, fraction=0.25, ef_decay=0.95, weight_decay=0.01, ns_dtype=None):
    """https://arxiv.org/abs/2512.16928, on the shorter side."""
    if p.shape[0] > p.shape[1]:
        flipped = [g.T for g in grads]
        out = _by_rows(p.T, flipped, lr, fraction, ef_decay, weight_decay, p.shape)
        return out.T
    return _by_rows(p, grads, lr, fraction, ef_decay, weight_decay, p.shape)


def _by_rows(p, grads, lr, fraction, ef_decay, weight_decay, shape):
    p = p.copy()
    if not p.size:
        return p
    M = np.zeros_like(p)
    k = max(1, int(np.ceil(fraction * len(p))))
    for g in grads:
        M = M + g
        rows = np.argsort(-np.abs(M).sum(1), kind="stable")[:k]
        p = p * (1 - lr * weight_decay)
        p[rows] -= lr * (shape[0] / shape[1]) ** 0.5 * _polar_express(M[rows])
        M[rows] *= ef_decay
    return p


def _farthest(g, norm, normalized):
    """https://github.com/LIONS-EPFL/scion/blob/main/scion.py."""
    if norm == "auto":
        norm = "bias_rms" if g.ndim < 2 else "spectral" if g.ndim == 2 else "spectral_conv"
    if normalized is None:
        normalized = norm != "col"
    if norm == "bias_rms":
        return g / (np.sqrt(np.mean(g**2)) + 1e-8)
    m, n = g.shape[:2]
    if norm == "spectral":
        return _jordan(g) * (m / n if normalized else m) ** 0.5
    if norm == "spectral_conv":
        window = g[0, 0].size
        return _jordan(g.reshape(m, -1)).reshape(g.shape) * (m / n) ** 0.5 / window
    if norm == "sign":
        return np.sign(g) / (n if normalized else 1)
    if norm == "col":
        size = np.sqrt(np.sum(g**2, 0, keepdims=True)) / m**0.5
        return g / (size * (n if normalized else 1) + 1e-8)
    size = np.sqrt(np.sum(g**2, 1, keepdims=True))
    return g / (size * (n**0.5 if normalized else 1) + 1e-8)


def scion(
    p, grads, lr, momentum=0.9, norm="auto", normalized=None, radius=1.0, unconstrained=False,
    ns_dtype=None,
):  # fmt: skip
    """https://arxiv.org/abs/2502.07529, Algorithms 1 and 2."""
    d = np.zeros_like(p)
    for g in grads:
        d = momentum * d + (1 - momentum) * g
        if not unconstrained:
            p = (1 - lr) * p
        if p.size:
            p = p - lr * radius * _farthest(d, norm, normalized)
    return p


def muon_adamw(
    p, grads, lr, adamw_lr, weight_decay, adamw_weight_decay, momentum, betas, eps, ns_dtype, muon,
):  # fmt: skip
    """Jordan et al. 2024 for arrays of two dimensions or more; AdamW for others."""
    if p.ndim < 2:
        return _adamw(p, grads, adamw_lr, adamw_weight_decay, betas, eps)
    if p.size == 0:
        return p
    m = np.zeros_like(p)
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g
        o = _jordan(u.reshape(len(p), -1))
        o = o * np.sqrt(max(1, o.shape[0] / o.shape[1]))
        p = (1 - lr * weight_decay) * p - lr * o.reshape(p.shape)
    return p


def muon_adamw_at_one_rate(p, grads, lr, **hyper):
    return muon_adamw(p, grads, lr, adamw_lr=lr, **hyper)
