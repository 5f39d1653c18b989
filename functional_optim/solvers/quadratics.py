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

from functional_optim.core import modes
from functional_optim.solvers import linear
from functional_optim.solvers.dense import DENSE, Dense, DenseInverse
from functional_optim.solvers.linear import norm, padded

HISTORY = 8
"""Pairs that `Limited` stores: the paper recommends 3 to 20. A power of 2 and multiple of `PAD`."""


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

    def columns(self, rows: Tensor | None, index: Tensor) -> Tensor:
        """Of problems `rows`, (k,), or all, the columns `index`, (k,), of B: (k, n)."""
        W, theta = (self.W, self.theta) if rows is None else (self.W[rows], self.theta[rows])
        at = index[:, None, None].expand(-1, W.shape[-2], 1)
        column = _sums(W, self._signs() * W.gather(-1, at)[..., 0])
        unit = torch.zeros_like(column).scatter(-1, index.unsqueeze(-1), 1.0)
        return column + unit * theta.unsqueeze(-1)

    def solve(self, r: Tensor, free: Tensor | None) -> Tensor:
        """p with B p = r for the free variables, (B, n) or all; 0 for others."""
        theta, W = self.theta.unsqueeze(-1), self.W
        if free is not None:
            m = free.to(r.dtype)
            r, W = r * m, W * m.unsqueeze(-2)
        K = linear.gram(W) + torch.diag_embed(theta * self._signs())
        u, _ = torch.linalg.solve_ex(K, _rows(W, r).unsqueeze(-1))
        return (r - _sums(W, u[..., 0])) / theta


Quadratic: TypeAlias = Dense | Compact
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
        if not linear.none_of(info > 0):
            W = torch.where((info == 0)[:, None, None], W, 0.0)
        if n > 2 * HISTORY:
            return Compact(self.theta, W[..., :n])
        signed = torch.cat([W[:, :HISTORY], -W[:, HISTORY:]], -2)
        B = (W.mT @ signed)[:, :n, :n]
        return Dense(B + torch.diag_embed(self.theta.unsqueeze(-1).expand(-1, n)), self.pairs)

    def learned(self, method: str, s: Tensor, y: Tensor, g: Tensor, useful: Tensor) -> Limited:
        """The model after steps s from gradients g, with differences y of these, for useful
        pairs."""
        size = norm(s).unsqueeze(-1)
        size = torch.where(size > 0, size, 1.0)
        s, y = padded(s / size, -1), padded(y / size, -1)
        slot = self.pairs.bitwise_and(HISTORY - 1)
        S, Y = _put(self.S, useful, slot, s), _put(self.Y, useful, slot, y)
        sy, yy = (s * y).sum(-1), (y * y).sum(-1)
        products = _rows(S, s)
        SS = _put(_put(self.SS, useful, slot, products).mT, useful, slot, products).mT
        L = _put(self.L, useful, slot, _rows(Y, s))
        L = _put(L.mT, useful, slot, torch.zeros_like(products)).mT
        D = _put(self.D, useful, slot, sy)
        theta = torch.where(useful, yy / sy, self.theta)
        return Limited(S, Y, SS, L, D, theta, self.pairs + useful)

    def forgotten(self, which: Tensor) -> Limited:
        """The model, reset for the problems in `which`."""
        out, eye = (
            which[:, None, None],
            torch.eye(HISTORY, dtype=self.S.dtype, device=self.S.device),
        )
        S, Y, L = [torch.where(out, 0.0, x) for x in (self.S, self.Y, self.L)]
        return Limited(
            S, Y, torch.where(out, eye, self.SS), L, torch.where(out[..., 0], 1.0, self.D),
            torch.where(which, 1.0, self.theta), torch.where(which, 0, self.pairs),
        )  # fmt: skip


def _put(target: Tensor, which: Tensor, slot: Tensor, value: Tensor) -> Tensor:
    """The values, (B, ...), in the slots, (B,), of the problems in a mask: in place, unless it is
    recorded."""
    if modes.recorded():
        here = torch.arange(HISTORY, device=target.device) == slot.unsqueeze(-1)
        mask = (here & which.unsqueeze(-1)).reshape(*here.shape, *[1] * (target.dim() - 2))
        return torch.where(mask, value.unsqueeze(1), target)
    rows = which.nonzero()[:, 0]
    target[rows, slot[rows]] = value[rows]
    return target


Model: TypeAlias = Dense | DenseInverse | Limited


def fresh(method: str, like: Tensor, *, bounded: bool) -> Model:
    """The initial model: B is 1. like: (B, n), float64."""
    count, n = like.shape
    pairs = torch.zeros_like(like[:, 0], dtype=torch.int64)
    eye = torch.eye(n if method in DENSE else HISTORY, dtype=like.dtype, device=like.device)
    eyes = like.new_zeros(count, *eye.shape) + eye
    if method in DENSE:
        return Dense(eyes, pairs) if bounded else DenseInverse(eyes, pairs)
    S, Y = [padded(like.new_zeros(count, HISTORY, n), -1) for _ in range(2)]
    ones = torch.ones_like
    return Limited(S, Y, eyes, 0 * eyes, ones(S[..., 0]), ones(like[:, 0]), pairs)


def _rows(A: Tensor, v: Tensor) -> Tensor:
    """A v of each problem: (B, m)."""
    return (A * v.unsqueeze(-2)).sum(-1)


def _sums(A: Tensor, u: Tensor) -> Tensor:
    """Aᵀ u of each problem: (B, n)."""
    return (A * u.unsqueeze(-1)).sum(-2)
