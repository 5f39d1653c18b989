"""Quadratic models of quasi-Newton methods for many problems: matrices B that learn from steps.

`Dense` and `DenseInverse` hold a matrix; `Limited` the last pairs of steps s and differences of
gradients y, in the compact form of Byrd, Nocedal, Schnabel, "Representations of quasi-Newton
matrices and their use in limited memory methods", Math. Program. 63 (1994),
https://doi.org/10.1007/BF01582063, section 3. All are float64. The result of a problem does not
depend on the others: matrix products have sizes for which all matrices of a batch have the same
alignment.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_optim.solvers import linear
from functional_optim.solvers.dense import DENSE, Dense, DenseInverse, Explicit
from functional_optim.solvers.linear import PAD, norm, padded

HISTORY = 8
"""Pairs that `Limited` stores: the paper recommends 3 to 20. A multiple of `PAD`."""


class Compact(NamedTuple):
    """A quadratic by B = θ + Vᵀ V − Pᵀ P. theta: (B,). W: V above P, (B, 2 m, n)."""

    theta: Tensor
    W: Tensor

    def _signs(self) -> Tensor:
        half = torch.ones_like(self.W[0, ::2, 0])
        return torch.cat([half, -half])

    def times(self, v: Tensor) -> Tensor:
        """B v: (B, n)."""
        u = self._signs() * _rows(self.W, v)
        return self.theta.unsqueeze(-1) * v + _sums(self.W, u)

    def columns(self, rows: Tensor, index: Tensor) -> Tensor:
        """Of problems `rows`, (k,), the columns `index`, (k,), of B: (k, n)."""
        W = self.W[rows]
        at = index[:, None, None].expand(-1, W.shape[-2], 1)
        column = _sums(W, self._signs() * W.gather(-1, at)[..., 0])
        unit = torch.zeros_like(column).scatter(-1, index.unsqueeze(-1), 1.0)
        return column + unit * self.theta[rows].unsqueeze(-1)

    def solve(self, r: Tensor, free: Tensor | None) -> Tensor:
        """p with B p = r for the free variables, (B, n) or all; 0 for others."""
        theta, W = self.theta.unsqueeze(-1), self.W
        if free is not None:
            m = free.to(r.dtype)
            r, W = r * m, W * m.unsqueeze(-2)
        K = linear.gram(W) + torch.diag_embed(theta * self._signs())
        u, _ = torch.linalg.solve_ex(K, _rows(W, r).unsqueeze(-1))
        return (r - _sums(W, u[..., 0])) / theta


Quadratic: TypeAlias = Explicit | Compact
"""A model that can be minimized within bounds."""


class Limited(NamedTuple):
    """Pairs in a ring of m slots, which are written in place.

    S, Y: pairs, each divided by the length of s, which does not affect B: (B, m, n), padded with
    zeros to a multiple of 8. SS: products of each s with each other. L: of each s with each y that
    is older; both (B, m, m). D: of each s with its y, (B, m). An empty slot has 1 in SS and D.
    theta: (B,). pairs: how many it has learned from, (B,), int64.
    """

    S: Tensor
    Y: Tensor
    SS: Tensor
    L: Tensor
    D: Tensor
    theta: Tensor
    pairs: Tensor

    def quadratic(self, n: int) -> Quadratic:
        """The current model of n variables: θ + Yᵀ D⁻¹ Y − Pᵀ P, where J P = θ S + L D⁻¹ Y.

        J is the Cholesky factor of θ SSᵀ + L D⁻¹ Lᵀ. Only θ if that is singular.
        """
        theta = self.theta[:, None, None]
        half = self.D.rsqrt()
        V, L = self.Y * half.unsqueeze(-1), self.L * half.unsqueeze(-2)
        J, info = torch.linalg.cholesky_ex(theta * self.SS + L @ L.mT)
        P = torch.linalg.solve_triangular(J, theta * self.S + L @ V, upper=False)
        W = torch.cat([V, P], -2)
        if bool(info.any()):
            W = torch.where((info == 0)[:, None, None], W, 0.0)
        if n > 2 * HISTORY:
            return Compact(self.theta, W[..., :n])
        signed = torch.cat([W[:, :HISTORY], -W[:, HISTORY:]], -2)
        B = W.mT @ signed
        B.diagonal(dim1=-2, dim2=-1).add_(self.theta.unsqueeze(-1))
        return Explicit(B[:, :n, :n])

    def learned(self, method: str, s: Tensor, y: Tensor, g: Tensor, useful: Tensor) -> Limited:
        """The model after steps s from gradients g, with differences y of these, for useful
        pairs."""
        size = norm(s).unsqueeze(-1)
        size = torch.where(size > 0, size, 1.0)
        s, y = padded(s / size, -1), padded(y / size, -1)
        rows = useful.nonzero()[:, 0]
        slot = (self.pairs % HISTORY)[rows]
        sy, yy = (s * y).sum(-1)[rows], (y * y).sum(-1)[rows]
        self.S[rows, slot] = s[rows]
        self.Y[rows, slot] = y[rows]
        products = _rows(self.S, s)[rows]
        self.SS[rows, slot] = products
        self.SS[rows, :, slot] = products
        self.L[rows, slot] = _rows(self.Y, s)[rows]
        self.L[rows, :, slot] = 0.0
        self.D[rows, slot] = sy
        self.theta[rows] = yy / sy
        return self._replace(pairs=self.pairs + useful)

    def forgotten(self, which: Tensor) -> Limited:
        """The model, reset for the problems in `which`."""
        rows = which.nonzero()[:, 0]
        for x in (self.S, self.Y, self.L):
            x[rows] = 0.0
        self.SS[rows] = torch.eye(HISTORY, dtype=self.S.dtype, device=self.S.device)
        self.D[rows] = 1.0
        self.theta[rows] = 1.0
        return self._replace(pairs=torch.where(which, 0, self.pairs))


Model: TypeAlias = Dense | DenseInverse | Limited


def fresh(method: str, like: Tensor, *, bounded: bool) -> Model:
    """The initial model: B is 1. like: (B, n), float64."""
    count, n = like.shape
    pairs = torch.zeros_like(like[:, 0], dtype=torch.int64)
    eye = torch.eye(n if method in DENSE else HISTORY, dtype=like.dtype, device=like.device)
    eyes = like.new_zeros(count, *eye.shape) + eye
    if method in DENSE:
        return Dense(eyes, pairs) if bounded else DenseInverse(eyes, pairs)
    S, Y = like.new_zeros(2, count, HISTORY, -(-n // PAD) * PAD)
    ones = torch.ones_like
    return Limited(S, Y, eyes, 0 * eyes, ones(S[..., 0]), ones(like[:, 0]), pairs)


def _rows(A: Tensor, v: Tensor) -> Tensor:
    """A v of each problem: (B, m)."""
    return (A * v.unsqueeze(-2)).sum(-1)


def _sums(A: Tensor, u: Tensor) -> Tensor:
    """Aᵀ u of each problem: (B, n)."""
    return (A * u.unsqueeze(-1)).sum(-2)
