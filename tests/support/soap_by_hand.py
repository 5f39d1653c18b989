"""SOAP for matrices, as a user would write it: https://arxiv.org/abs/2409.11321, without its first
step, which only looks."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import functional_optim as fo
from functional_optim import numeric


class SoapSlots(NamedTuple):
    exp_avg: Tensor
    exp_avg_sq: Tensor
    left: Tensor
    right: Tensor
    left_basis: Tensor
    right_basis: Tensor


class SoapScalars(NamedTuple):
    weight: Any
    weight_sq: Any
    step_size: Any
    correction_sq: Any
    eps: Any


def soap(
    lr: Any = 3e-3,
    betas: Any = (0.95, 0.95),
    eps: Any = 1e-8,
    every: Any = 2,
    *,
    batched: bool = True,
    refresh: Literal["together", "spread"] = "together",
) -> Any:
    """Adam in the eigenbases of the averages of u uᵀ and uᵀ u, renewed `every` so many steps: all
    in one of them, or some in each."""

    def init(p: Tensor) -> SoapSlots:
        def square(k: int) -> tuple[Tensor, Tensor]:
            like = {"dtype": p.dtype, "device": p.device}
            return torch.zeros(k, k, **like), torch.eye(k, **like)

        (left, left_basis), (right, right_basis) = map(square, p.shape)
        zero = torch.zeros_like(p)
        return SoapSlots(zero, zero.clone(), left, right, left_basis, right_basis)

    def scalars(t: Any, *, lr: Any, betas: Any, eps: Any) -> SoapScalars:
        a, b = betas
        c = 1 - numeric.power(b, t)
        return SoapScalars(1 - a, 1 - b, -lr / (1 - numeric.power(a, t)), numeric.sqrt(c), eps)

    def step(u: Tensor, x: SoapSlots, s: SoapScalars) -> tuple[Tensor, SoapSlots]:
        left, right = x.left.lerp(u @ u.mT, s.weight_sq), x.right.lerp(u.mT @ u, s.weight_sq)
        m = x.exp_avg.lerp(u, s.weight)
        seen = x.left_basis.mT @ u @ x.right_basis
        v = x.exp_avg_sq.lerp(seen * seen, s.weight_sq)
        turned = x.left_basis.mT @ m @ x.right_basis / (v.sqrt() / s.correction_sq + s.eps)
        step = s.step_size * (x.left_basis @ turned @ x.right_basis.mT)
        return step, x._replace(exp_avg=m, exp_avg_sq=v, left=left, right=right)

    def plain(u: Tensor, x: SoapSlots, p: Any, s: SoapScalars) -> tuple[Tensor, SoapSlots]:
        return step(u, x, s)

    def renew(u: Tensor, x: SoapSlots, p: Any, s: SoapScalars) -> tuple[Tensor, SoapSlots]:
        u, x = step(u, x, s)
        left, _ = torch.linalg.qr(x.left @ x.left_basis)
        right, _ = torch.linalg.qr(x.right @ x.right_basis)
        return u, x._replace(left_basis=left, right_basis=right)

    def choose(t: Any, *, every: Any, turn: int = 0) -> Any:
        return numeric.where(t % every == turn, 1, 0)

    hyper = {"lr": lr, "betas": betas, "eps": eps, "every": every}
    return fo.leafwise(
        init,
        [plain, renew],
        scalars,
        hyper=hyper,
        runs=fo.Runs(
            choose=choose,
            turns=every if refresh == "spread" else None,
            batched=batched,
            dense_only=True,
        ),
        name="soap",
    )
