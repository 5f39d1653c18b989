"""Curvature for an optimizer: Hessian-vector products that feed a transformation.

    python examples/hessian_vector.py

A Hessian-vector product is the derivative of the gradient along a direction: `jvp` of `grad`. Along
random signs z, the mean of z · Hz is the Hessian's diagonal (Hutchinson). It reaches the
transformation as an extra argument of `update`, as in AdaHessian, https://arxiv.org/abs/2006.00719.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
from torch import Tensor

import functional_optim as fo


def hessian_vector(loss: Any, params: Any, v: Any) -> Any:
    """H v at these parameters."""
    return torch.func.jvp(torch.func.grad(loss), (params,), (v,))[1]


def hessian_diagonal(loss: Any, params: Any, random: torch.Generator, probes: int = 1) -> Any:
    """An unbiased estimate of the Hessian's diagonal; exact where the Hessian is diagonal."""

    def signs(p: Tensor) -> Tensor:
        return torch.randint(0, 2, (probes, *p.shape), generator=random).to(p.dtype) * 2 - 1

    z = fo.tree.map(signs, params)
    products = torch.vmap(lambda z: hessian_vector(loss, params, z))(z)
    return fo.tree.map(lambda z, hz: (z * hz).mean(0), z, products)


class CurvatureState(NamedTuple):
    step: Tensor  # 0-dim int64, finished steps
    hessian_sq: Any  # the average of h², like the parameters


def scale_by_curvature(beta: float = 0.9, eps: float = 1e-8) -> fo.GradientTransformation:
    """Divide by the root of an average of h²; `update` takes `hessian_diagonal=`."""

    def init(params: Any) -> CurvatureState:
        return CurvatureState(torch.tensor(0), fo.tree.map(torch.zeros_like, params))

    def update(
        grads: Any, state: CurvatureState, params: Any = None, *, hessian_diagonal: Any
    ) -> tuple[Any, CurvatureState]:
        step = state.step + 1
        part = 1 - beta ** step.to(torch.float64)

        def divided(g: Tensor, v: Tensor) -> Tensor:
            return g / ((v / part.to(v.dtype)).sqrt() + eps)

        hessian_sq = fo.tree.map(
            lambda v, h: v + (1 - beta) * (h * h - v), state.hessian_sq, hessian_diagonal
        )
        return fo.tree.map(divided, grads, hessian_sq), CurvatureState(step, hessian_sq)

    return fo.GradientTransformation(init, update)


def valley(params: dict[str, Tensor]) -> Tensor:
    """A bowl, 10,000 times steeper along some axes than along others, which are coupled."""
    x = params["x"]
    steep = torch.logspace(0, 4, len(x), dtype=x.dtype)
    return 0.5 * (steep * (x - 1).square()).sum() + 0.1 * (x[1:] * x[:-1]).sum()


def descend(tx: fo.GradientTransformation, steps: int, curved: bool) -> float:
    """The norm of the gradient after some steps, with or without the diagonal."""
    params, random = {"x": torch.zeros(5).double()}, torch.Generator().manual_seed(0)
    state = tx.init(params)
    for _ in range(steps):
        grads = torch.func.grad(valley)(params)
        extra = {"hessian_diagonal": hessian_diagonal(valley, params, random)} if curved else {}
        updates, state = tx.update(grads, state, params, **extra)
        params = fo.apply_updates(params, updates)
    return float(fo.tree.global_norm(torch.func.grad(valley)(params)))


RECIPES = {
    "sgd": (fo.sgd(1e-4), False),
    "adam": (fo.adam(0.1), False),
    "curvature": (fo.chain(scale_by_curvature(), fo.scale_by_lr(0.5)), True),
}


def main(argv: list[str] | None = None) -> None:
    """The same bowl with and without curvature."""
    argparse.ArgumentParser(description="Hessian-vector products that scale.").parse_args(argv)
    for name, (tx, curved) in RECIPES.items():
        print(f"{name:10} gradient after 100 steps: {descend(tx, 100, curved):.1e}")


if __name__ == "__main__":
    main()
