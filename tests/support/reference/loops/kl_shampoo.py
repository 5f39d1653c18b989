"""Lin et al. 2025, with the first step, the decay and the bounds of their code."""

from __future__ import annotations

import numpy as np


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
