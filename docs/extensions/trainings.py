"""What the loss curves train: a small network on scikit-learn's digits, by each algorithm."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import functional_optim as fo

STEPS, BATCH, EVERY = 200, 128, 4

Params = dict[str, Tensor]
Losses = tuple[list[int], list[float]]
"""Steps or evaluations, and the losses after them."""


class Task(NamedTuple):
    """What is trained.

    params: the initial ones. loss: of parameters, on some of the pictures. x, y: all pictures.
    batch: how many pictures a step sees. what: a caption.
    """

    params: Params
    loss: Callable[[Params, Tensor, Tensor], Tensor]
    x: Tensor
    y: Tensor
    batch: int
    what: str


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1,797 handwritten digits, 8 × 8 pixels from 0 to 16."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    return torch.from_numpy(data.data).float(), torch.from_numpy(data.target)


def logits_of_layers(params: Params, x: Tensor) -> Tensor:
    """What a network with one hidden layer predicts."""
    hidden = torch.tanh(x @ params["hidden.weight"] + params["hidden.bias"])
    return hidden @ params["head.weight"] + params["head.bias"]


def of_layers(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """Its cross-entropy."""
    return F.cross_entropy(logits_of_layers(params, x), y)


def of_tokens(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of a sum of embeddings: one row for each pixel and each of its values."""
    return F.cross_entropy(F.embedding_bag(x, params["embedding"], mode="sum", sparse=True), y)


@functools.cache
def task(name: str) -> Task:
    """By name: the network on batches or on all pictures, or the embeddings on batches."""
    x, y = digits()
    g = torch.Generator().manual_seed(0)
    if name == "tokens":
        rows = torch.arange(64) * 17 + x.long()
        params = {"embedding": torch.zeros(64 * 17, 10)}
        return Task(
            params,
            of_tokens,
            rows,
            y,
            BATCH,
            f"embeddings, sparse gradients, batch {BATCH}",
        )
    params = {
        "hidden.weight": torch.randn(64, 32, generator=g) / 8,
        "hidden.bias": torch.zeros(32),
        "head.weight": torch.randn(32, 10, generator=g) / 32**0.5,
        "head.bias": torch.zeros(10),
    }
    if name == "whole":
        return Task(params, of_layers, x / 16, y, len(y), "full batches")
    return Task(params, of_layers, x / 16, y, BATCH, f"batch {BATCH}")


def value_and_grad(fn: Callable[[Params], Tensor]) -> Callable[[Params], tuple[Tensor, Params]]:
    """By a backward pass, which computes sparse gradients if embeddings are sparse."""

    def both(params: Params) -> tuple[Tensor, Params]:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        value = fn(leaves)
        grads = torch.autograd.grad(value, list(leaves.values()))
        return value.detach(), dict(zip(leaves, grads, strict=True))

    return both


def each_gradient(on: Task, params: Params, x: Tensor, y: Tensor) -> Params:
    """The gradients of single examples, which come first in their shapes."""
    one = torch.func.grad(lambda p, x, y: on.loss(p, x[None], y[None]))
    return torch.vmap(one, in_dims=(None, 0, 0))(params, x, y)


def train(recipe: Callable[[], fo.GradientTransformation], on: Task, run: Curve) -> Losses:
    """The loss on all pictures, every few steps; training stops if it is not finite."""
    tx, g = recipe(), torch.Generator().manual_seed(1)
    params, state = on.params, tx.init(on.params)
    counts, losses = [0], [float(on.loss(params, on.x, on.y))]
    for step in range(1, run.steps + 1):
        at = torch.randint(len(on.y), (on.batch,), generator=g) if on.batch < len(on.y) else ...
        x, y = on.x[at], on.y[at]
        fn = value_and_grad(lambda p, x=x, y=y: on.loss(p, x, y))
        if run.before:
            state = run.before(state, params, x, step)
        value, grads = fn(params)
        if run.examples:
            grads = each_gradient(on, params, x, y)
        more = {"value": value, "value_and_grad": fn}
        updates, state = tx.update(grads, state, params, **{k: more[k] for k in run.asks})
        params = fo.apply_updates(params, updates)
        count = run.count(state) if run.count else step
        if count > run.steps:
            break
        if run.count or step % EVERY == 0:
            shown = run.shown(state) if run.shown else params
            shown = fo.eval_params(state, params) if run.averages else shown
            counts.append(count)
            losses.append(float(on.loss(shown, on.x, on.y)))
        if not losses[-1] < 1e3:
            break
    return counts, losses


class Curve(NamedTuple):
    """What a picture shows.

    runs: recipes by their labels; the second is the suggested start. on: the task. asks: extra
    arguments of `update`. shown: from the state, the parameters to evaluate. averages: whether
    these are what `eval_params` returns. count: from the state, the place of a step on the axis.
    axis: its label. steps: how many. beside: the momentum of the SGD baseline. examples:
    whether it takes the gradients of single examples. before: from the state, the parameters, the
    pictures and the number of a step to the state with which it begins.
    """

    runs: dict[str, Callable[[], fo.GradientTransformation]]
    on: str = "batches"
    asks: tuple[str, ...] = ()
    shown: Callable[[Any], Params] | None = None
    averages: bool = False
    count: Callable[[Any], int] | None = None
    axis: str = "step"
    steps: int = STEPS
    beside: float = 0.9
    examples: bool = False
    before: Callable[[Any, Params, Tensor, int], Any] | None = None

    @property
    def what(self) -> str:
        """The caption of the task."""
        kind = "SGD with momentum" if self.beside else "SGD without momentum"
        return f"Digits classifier, {task(self.on).what}; grey: {kind} at the best of three rates."

    def follow(self, recipe: Callable[[], fo.GradientTransformation]) -> Losses:
        """The losses of one run."""
        return train(recipe, task(self.on), self)

    def reference(self) -> tuple[str, Losses]:
        """The baseline, and its label."""
        return best_sgd(self.on, self.beside)


@functools.cache
def best_sgd(name: str, momentum: float) -> tuple[str, Losses]:
    """SGD on a task, at the best of three rates."""
    kind = "SGD, momentum" if momentum else "SGD"
    tried = {
        f"{kind}, lr={lr:g}": train(
            lambda lr=lr: fo.sgd(lr, momentum=momentum), task(name), Curve({})
        )
        for lr in (0.1, 0.3, 1.0)
    }
    best = min(tried, key=lambda label: tried[label][1][-1])
    return best, tried[best]
