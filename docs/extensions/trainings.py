"""What the loss curves train: a small network on scikit-learn's digits, by each algorithm."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from pages import pages
from torch import Tensor
from torch.nn import functional as F

import functional_optim as fo

STEPS, BATCH, EVERY = 200, 128, 4

Params = dict[str, Tensor]
Losses = tuple[list[int], list[float]]
"""Steps or evaluations, and the losses after them."""


class Task(NamedTuple):
    """What is trained.

    params: where training begins. loss: of parameters, on some of the pictures. x, y: all pictures.
    batch: how many pictures a step sees. what: in words.
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


def of_layers(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of a network with one hidden layer."""
    hidden = torch.tanh(x @ params["hidden.weight"] + params["hidden.bias"])
    return F.cross_entropy(hidden @ params["head.weight"] + params["head.bias"], y)


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
        return Task(params, of_tokens, rows, y, BATCH, "embeddings of pixels, sparse gradients")
    params = {
        "hidden.weight": torch.randn(64, 32, generator=g) / 8,
        "hidden.bias": torch.zeros(32),
        "head.weight": torch.randn(32, 10, generator=g) / 32**0.5,
        "head.bias": torch.zeros(10),
    }
    if name == "whole":
        return Task(params, of_layers, x / 16, y, len(y), "a network, full batches")
    return Task(params, of_layers, x / 16, y, BATCH, f"a network, batches of {BATCH}")


def value_and_grad(fn: Callable[[Params], Tensor]) -> Callable[[Params], tuple[Tensor, Params]]:
    """By a backward pass, which makes sparse gradients where they are asked for."""

    def both(params: Params) -> tuple[Tensor, Params]:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        value = fn(leaves)
        grads = torch.autograd.grad(value, list(leaves.values()))
        return value.detach(), dict(zip(leaves, grads, strict=True))

    return both


def train(recipe: Callable[[], fo.GradientTransformation], on: Task, run: Curve) -> Losses:
    """The loss on all pictures, every few steps; it ends where that is no number."""
    tx, g = recipe(), torch.Generator().manual_seed(1)
    params, state = on.params, tx.init(on.params)
    counts, losses = [0], [float(on.loss(params, on.x, on.y))]
    for step in range(1, run.steps + 1):
        at = torch.randint(len(on.y), (on.batch,), generator=g) if on.batch < len(on.y) else ...
        x, y = on.x[at], on.y[at]
        fn = value_and_grad(lambda p, x=x, y=y: on.loss(p, x, y))
        value, grads = fn(params)
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

    runs: recipes by their labels; the second is the one to begin with. on: the task. asks: extra
    arguments of `update`. shown: from the state, the parameters to evaluate. averages: whether
    these are what `eval_params` returns. count: from the state, where on the axis a step stands.
    axis: its label. steps: how many. beside: the momentum of the SGD to compare with.
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

    @property
    def what(self) -> str:
        """What is trained, in words."""
        kind = "SGD with momentum" if self.beside else "SGD without momentum"
        return f"Digits by {task(self.on).what}; grey: {kind} at the best of three rates."

    def follow(self, recipe: Callable[[], fo.GradientTransformation]) -> Losses:
        """The losses of one run."""
        return train(recipe, task(self.on), self)

    def reference(self) -> tuple[str, Losses]:
        """The run to compare with, and its label."""
        return best_sgd(self.on, self.beside)


def rates(recipe: Callable[[float], Any], *values: float, name: str = "lr", **more: Any) -> Curve:
    """A curve for each value of one number."""
    runs = {f"{name}={value:g}": functools.partial(recipe, value) for value in values}
    return Curve(runs, **more)


def muon(lr: float) -> fo.GradientTransformation:
    """Muon for the hidden layer's matrix, AdamW for the rest."""
    parts = {"matrix": fo.muon(lr, weight_decay=0.0), "rest": fo.adamw(1e-2, weight_decay=0.0)}
    return fo.partition(parts, {"hidden.weight": "matrix", "*": "rest"})


def lbfgs(**hyper: Any) -> Callable[[], fo.GradientTransformation]:
    """Four iterations at a time."""
    return functools.partial(fo.lbfgs, max_iter=4, history_size=10, **hyper)


def of_page(name: str, says: str) -> Curve:
    """Of an algorithm whose page names an argument and three values."""
    argument, *values = says.split()

    def run(value: float) -> fo.GradientTransformation:
        return getattr(fo, name)(**{argument: value})

    return rates(run, *map(float, values), name=argument, averages=name in AVERAGING)


AVERAGING = {"schedule_free_adamw", "schedule_free_sgd"}
"""Algorithms of which the average is evaluated."""


CURVES = {name: of_page(name, page["curve"]) for name, page in pages().items() if "curve" in page}
CURVES |= {
    "asgd": rates(
        lambda lr: fo.asgd(lr, lambd=0.0, t0=STEPS / 2),
        *(0.1, 1.0, 10.0),
        shown=lambda state: state.slots["ax"],
    ),
    "lbfgs": Curve(
        {
            "lr=0.3": lbfgs(lr=0.3),
            "strong Wolfe": lbfgs(line_search_fn="strong_wolfe"),
            "lr=1": lbfgs(lr=1.0),
        },
        on="whole",
        asks=("value", "value_and_grad"),
        count=lambda state: int(state.func_evals),
        axis="evaluation",
        steps=100,
    ),
    "momo": rates(lambda lr: fo.momo(lr), 0.1, 10.0, 1000.0, asks=("value",)),
    "momo_adam": rates(lambda lr: fo.momo_adam(lr), 0.001, 0.1, 10.0, asks=("value",)),
    "muon": rates(muon, 0.005, 0.05, 0.5),
    "polyak_sgd": rates(
        lambda most: fo.polyak_sgd(most), 0.1, 1.0, 10.0, name="max_learning_rate", asks=("value",)
    ),
    "rprop": rates(fo.rprop, 1e-4, 1e-2, 1.0, on="whole", steps=120),
    "sgd": rates(lambda lr: fo.sgd(lr, momentum=0.9), 0.03, 0.3, 3.0, beside=0.0),
    "sparse_adam": rates(fo.sparse_adam, 0.01, 0.1, 1.0, on="tokens"),
}


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
