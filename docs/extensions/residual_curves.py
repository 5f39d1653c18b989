"""Loss curves of methods that use residuals: a small network fits a surface."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trainings import Losses, Params

import functional_optim as fo

STEPS = 60


@functools.cache
def surface() -> tuple[Params, Any]:
    """Where training begins, and the residuals of 200 points: 65 parameters."""
    g = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(200, 2, generator=g, dtype=torch.float64) - 1
    y = torch.sin(3 * x[:, 0]) * torch.cos(2 * x[:, 1])

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    params = {"w": drawn(16, 2), "b": drawn(16), "v": drawn(16) / 4, "c": drawn()}

    def one(p: Params, x: Tensor, y: Tensor) -> Tensor:
        return (p["v"] @ torch.tanh(p["w"] @ x + p["b"]) + p["c"] - y) / 200**0.5

    return params, fo.per_sample(one, x, y)


def fitted(tx: fo.GradientTransformation, *, residuals: bool) -> Losses:
    """The loss, half the mean square, after each step."""
    params, fn = surface()

    def loss(p: Params) -> Tensor:
        return 0.5 * fn(p).square().sum()

    state, losses = tx.init(params), [float(loss(params))]
    for _ in range(STEPS):
        more = {"residual_fn": fn} if residuals else {}
        grads = None if residuals else torch.func.grad(loss)(params)
        updates, state = tx.update(grads, state, params, **more)
        params = fo.apply_updates(params, updates)
        losses.append(float(loss(params)))
    return list(range(STEPS + 1)), losses


class FitCurve(NamedTuple):
    """What a picture shows. runs: recipes by their labels; the second is the suggested start."""

    runs: dict[str, Callable[[], fo.GradientTransformation]]
    axis: str = "step"
    steps: int = STEPS

    @property
    def what(self) -> str:
        """The caption."""
        return "A network of 65 parameters fits a surface through 200 points; grey: AdamW at 0.03."

    def follow(self, recipe: Callable[[], fo.GradientTransformation]) -> Losses:
        """The losses of one run."""
        return fitted(recipe(), residuals=True)

    def reference(self) -> tuple[str, Losses]:
        """The baseline, and its label."""
        return "AdamW, lr=0.03", fitted(fo.adamw(0.03), residuals=False)


FITS = {
    "dogleg": FitCurve(
        {
            "radius=0.1": lambda: fo.dogleg(0.1),
            "radius=None": fo.dogleg,
            "scaling=None": lambda: fo.dogleg(scaling=None),
        }
    ),
    "gauss_newton": FitCurve(
        {
            "damping=0.1": lambda: fo.gauss_newton(damping=0.1),
            "damping=0.01": lambda: fo.gauss_newton(damping=0.01),
            "damping=0.001": lambda: fo.gauss_newton(damping=0.001),
        }
    ),
    "levenberg_marquardt": FitCurve(
        {
            "damping=1": lambda: fo.levenberg_marquardt(1.0),
            "damping=0.001": fo.levenberg_marquardt,
            "geodesic": lambda: fo.levenberg_marquardt(geodesic=True),
        }
    ),
}
