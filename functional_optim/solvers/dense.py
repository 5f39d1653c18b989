"""Quasi-Newton models that hold a whole matrix: BFGS, and its self-scaled relatives.

Broyden's family, with a scale τ of what is known and a share θ: Al-Baali, "Numerical experience
with a class of self-scaling quasi-Newton algorithms", J. Optim. Theory Appl. 96 (1998),
https://doi.org/10.1023/A:1022608410710. τ and θ are those of Urbán, Stefanou, Pons, "Unveiling the
optimization process of physics informed neural networks" (2024), https://arxiv.org/abs/2405.04230,
section 3. All is float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.solvers import linear

DENSE = ("bfgs", "ssbfgs", "ssbroyden")
"""Methods that keep a matrix."""


class Dense(NamedTuple):
    """A quadratic by its matrices B: (B, n, n). pairs: how many B has learned from, (B,), int64."""

    B: Tensor
    pairs: Tensor

    def times(self, v: Tensor) -> Tensor:
        """B v: (B, n)."""
        return product(self.B, v)

    def columns(self, rows: Tensor | None, index: Tensor) -> Tensor:
        """Of problems `rows`, (k,), or all, the columns `index`, (k,), of B: (k, n)."""
        if rows is not None:
            return self.B[rows, index]
        at = index[:, None, None].expand(-1, 1, self.B.shape[-1])
        return self.B.gather(-2, at)[:, 0]

    def solve(self, r: Tensor, free: Tensor | None) -> Tensor:
        """p with B p = r among the variables that are free, (B, n) or all; 0 for others. NaN where
        B is not positive definite."""
        if free is None:
            return linear.spd_solve(self.B, r)
        m = free.to(r.dtype)
        A = self.B * m.unsqueeze(-1) * m.unsqueeze(-2) + torch.diag_embed(1 - m)
        return linear.spd_solve(A, r * m)

    def quadratic(self, n: int) -> Dense:
        """Itself."""
        return self

    def learned(self, method: str, s: Tensor, y: Tensor, g: Tensor, useful: Tensor) -> Dense:
        """The model after steps s from gradients g, with differences y of these, where useful.

        The first pair also gives the scale of B: Nocedal, Wright, "Numerical Optimization", 2nd
        ed. (2006), (6.20).
        """
        sy = torch.where(useful, _dot(s, y), 1.0)
        first = useful & (self.pairs == 0)
        B = self.B * torch.where(first, _dot(y, y) / sy, 1.0)[:, None, None]
        Bs = product(B, s)
        b = _dot(s, Bs) / sy
        h = _dot(y, linear.spd_solve(B, y)) / sy if method == "ssbroyden" else b
        mix = mixture(method, b, h, s.shape[-1])
        known = useful & (b > 0)
        return Dense(updated(B, Bs, b, y, sy, mix.tau, mix.theta, known), self.pairs + known)

    def forgotten(self, which: Tensor) -> Dense:
        """The model without what it has learned, where `which` says so."""
        return Dense(_reset(self.B, which), torch.where(which, 0, self.pairs))


class DenseInverse(NamedTuple):
    """H, the inverse of B: (B, n, n), for problems without bounds. pairs: as those of `Dense`."""

    H: Tensor
    pairs: Tensor

    def quadratic(self, n: int) -> DenseInverse:
        """Itself."""
        return self

    def learned(self, method: str, s: Tensor, y: Tensor, g: Tensor, useful: Tensor) -> DenseInverse:
        """The same model after the same pairs. s lies along −H g, so B s along g."""
        sy = torch.where(useful, _dot(s, y), 1.0)
        first = useful & (self.pairs == 0)
        H = self.H * torch.where(first, sy / _dot(y, y), 1.0)[:, None, None]
        Hy, p = product(H, y), product(H, g)
        h = _dot(y, Hy) / sy
        along = _dot(s, p) / _dot(p, p)
        mix = mixture(method, along * along * _dot(g, p) / sy, h, s.shape[-1])
        known = useful & (h > 0)
        H = updated(H, Hy, h, s, sy, 1 / mix.tau, mix.phi, known)
        return DenseInverse(H, self.pairs + known)

    def forgotten(self, which: Tensor) -> DenseInverse:
        """The model without what it has learned, where `which` says so."""
        return DenseInverse(_reset(self.H, which), torch.where(which, 0, self.pairs))


class Mixture(NamedTuple):
    """Of an update, each (B,). tau: the scale of B. theta: the share of DFP in B; phi: that of BFGS
    in H, which is the same update."""

    tau: Tensor
    theta: Tensor
    phi: Tensor


def mixture(method: str, b: Tensor, h: Tensor, n: int) -> Mixture:
    """τ, θ and φ of a method, from b = sᵀBs / sᵀy and h = yᵀHy / sᵀy.

    Where they are no positive numbers, as after rounding, those of BFGS.
    """
    one, zero = torch.ones_like(b), torch.zeros_like(b)
    usual = Mixture(one, zero, one)
    if method == "bfgs":
        return usual
    scale = torch.where(b > 1, 1 / b, 1.0)
    if method == "ssbfgs":
        return usual._replace(tau=scale)
    a = (h * b - 1).clamp(min=1e-12)  # 0 or more, by Cauchy and Schwarz
    lower = (h * (1 - (a / (a + 1)).sqrt())).clamp(max=1.0)
    theta = ((1 - b) / b).minimum(1 / lower).maximum((lower - 1) / a)
    sigma = 1 + a * theta
    root = sigma.abs() ** (1 / (1 - max(n, 2)))
    tau = torch.where(theta > 0, scale * root.minimum(1 / theta), (scale * root).minimum(sigma))
    phi = (1 - theta) / sigma
    good = (tau > 0) & tau.isfinite() & phi.isfinite() & (b > 0) & (h > 0)
    return Mixture(
        *[torch.where(good, x, y) for x, y in zip((tau, theta, phi), usual, strict=True)]
    )


def updated(
    M: Tensor, Ms: Tensor, b: Tensor, y: Tensor, sy: Tensor, scale: Tensor, share: Tensor,
    known: Tensor,
) -> Tensor:  # fmt: skip
    """scale · (M − M s sᵀ M / sᵀMs + share · w wᵀ) + y yᵀ / sᵀy, with w = √sᵀMs (y / sᵀy − M s /
    sᵀMs), where known; else M.

    M s and b = sᵀMs / sᵀy are given. With s and y exchanged it is the update of the inverse.
    """
    scale, share = torch.where(known, scale, 1.0), torch.where(known, share, 0.0)
    b = torch.where(known, b, 1.0)
    mask = known.to(M.dtype)
    unit = mask / sy
    pp = scale * (share - 1) * unit / b
    py = -scale * share * unit
    yy = (scale * share * b + 1) * unit
    left = pp.unsqueeze(-1) * Ms + py.unsqueeze(-1) * y
    right = py.unsqueeze(-1) * Ms + yy.unsqueeze(-1) * y
    M = M * scale[:, None, None]
    if len(M) == 1:
        return M + torch.stack([Ms, y], -1) @ torch.stack([left, right], -2)
    return M + Ms.unsqueeze(-1) * left.unsqueeze(-2) + y.unsqueeze(-1) * right.unsqueeze(-2)


def product(A: Tensor, v: Tensor) -> Tensor:
    """A v of each problem: (B, m). Of many, with no product of torch, which would take other ways
    in batches of other sizes."""
    if len(A) == 1:
        return v @ A[0].mT
    return (A * v.unsqueeze(-2)).sum(-1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)


def _reset(M: Tensor, which: Tensor) -> Tensor:
    eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    return torch.where(which[:, None, None], eye, M)
