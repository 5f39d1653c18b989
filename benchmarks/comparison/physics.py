"""Smooth problems without noise, where L-BFGS belongs: physics and logistic regression."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vmap
from torch.nn.functional import cross_entropy

import functional_optim as fo
from comparison.networks import digits
from comparison.tasks import Model, Params, Task, always

PENALTY = 1e-3


class Field(nn.Module):
    """A number to a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 24), nn.Linear(24, 24)])
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)[0]


def physics_informed() -> Task:
    """−u'' = f on (0, 1) with u = 0 at both ends, where u = sin(2πx) + ½ sin(6πx)."""
    model = Model(Field)
    points = (torch.arange(48) + 0.5) / 48
    exact = torch.sin(2 * math.pi * points) + 0.5 * torch.sin(6 * math.pi * points)
    parts = torch.sin(2 * math.pi * points), 9 * 0.5 * torch.sin(6 * math.pi * points)
    source = (2 * math.pi) ** 2 * (parts[0] + parts[1])

    def solution(params: Params, x: Tensor) -> Tensor:
        """Zero at both ends by its form."""
        return x * (1 - x) * model(params, x)

    def residual(params: Params, x: Tensor, f: Tensor) -> Tensor:
        second = grad(grad(solution, 1), 1)(params, x)
        return (second + f) / ((2 * math.pi) ** 2 * len(points) ** 0.5)

    residuals = fo.per_sample(residual, points, source)

    def loss(params: Params) -> Tensor:
        return residuals(params).square().sum()

    def score(params: Params) -> Tensor:
        found = vmap(solution, (None, 0))(params, points)
        return (found - exact).square().mean() / exact.square().mean()

    return Task(
        "physics", "physics-informed network, Poisson's equation", 800, model.init, loss, always,
        score, "relative squared error of the solution", residuals=residuals,
    )  # fmt: skip


def regression() -> Task:
    """Softmax regression on digits with a penalty: convex, with one minimum."""
    x, y, _, _ = digits()
    wide = x.double()

    def init(seed: int) -> Params:
        generator = torch.Generator().manual_seed(seed)
        return {"head.weight": 0.1 * torch.randn(10, 65, generator=generator)}

    def objective(params: Params) -> Tensor:
        weight = params["head.weight"]
        seen = wide if weight.dtype == torch.float64 else x
        logits = seen @ weight[:, 1:].T + weight[:, 0]
        return cross_entropy(logits, y) + 0.5 * PENALTY * weight.square().sum()

    def evaluated(params: Params) -> tuple[Tensor, Params]:
        slopes, value = grad_and_value(objective)(params)
        return value, slopes

    tx = fo.lbfgs(max_iter=500, tolerance_change=0.0, line_search_fn="strong_wolfe")
    best = {"head.weight": torch.zeros(10, 65, dtype=torch.float64)}
    value, slopes = evaluated(best)
    updates, _ = tx.update(slopes, tx.init(best), best, value=value, value_and_grad=evaluated)
    least = float(objective(fo.apply_updates(best, updates)))

    def score(params: Params) -> Tensor:
        """In float64: the remainder is small compared with the objective."""
        return objective({name: p.double() for name, p in params.items()}) - least

    return Task(
        "regression", "softmax regression on digits", 200, init, objective, always,
        score, "objective less its minimum", reach=10.0,
    )  # fmt: skip


def tasks() -> list[Task]:
    return [physics_informed(), regression()]
