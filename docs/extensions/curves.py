"""What the loss curves of algorithms show: three runs each; the second is to begin with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pages import pages
from torch import Tensor
from trainings import STEPS, Curve, Params, logits_of_layers

import functional_optim as fo


def rates(recipe: Callable[[float], Any], *values: float, name: str = "lr", **more: Any) -> Curve:
    """A curve for each value of one number."""
    runs = {f"{name}={value:g}": functools.partial(recipe, value) for value in values}
    return Curve(runs, **more)


def observed(state: Any, params: Params, x: Tensor, step: int) -> Any:
    """The state of Sophia with an estimate of the Hessian's diagonal at every tenth step."""
    if step % 10 != 1:
        return state
    diagonal = fo.estimators.gauss_newton_bartlett(logits_of_layers)
    return fo.estimators.observe_hessian(state, diagonal(params, step, x))


def of_matrix(recipe: Callable[..., Any], *values: float, **hyper: Any) -> Curve:
    """Of an algorithm for the hidden layer's matrix, with AdamW for the rest."""

    def run(lr: float) -> fo.GradientTransformation:
        parts = {"matrix": recipe(lr, **hyper), "rest": fo.adamw(1e-2, weight_decay=0.0)}
        return fo.partition(parts, {"hidden.weight": "matrix", "*": "rest"})

    return rates(run, *values)


def lbfgs(**hyper: Any) -> Callable[[], fo.GradientTransformation]:
    """Four iterations at a time."""
    return functools.partial(fo.lbfgs, max_iter=4, history_size=10, **hyper)


AVERAGING = {"schedule_free_adamw", "schedule_free_sgd"}
"""Algorithms of which the average is evaluated."""


def of_page(name: str, says: str) -> Curve:
    """Of an algorithm whose page names an argument and three values."""
    argument, *values = says.split()

    def run(value: float) -> fo.GradientTransformation:
        return getattr(fo, name)(**{argument: value})

    return rates(run, *map(float, values), name=argument, averages=name in AVERAGING)


SPECIAL = {
    "adamuon": of_matrix(fo.adamuon, 0.02, 0.15, 0.5, weight_decay=0.0),
    "asgd": rates(
        lambda lr: fo.asgd(lr, lambd=0.0, t0=STEPS / 2),
        *(0.1, 1.0, 10.0),
        shown=lambda state: state.slots["ax"],
    ),
    "dion2": of_matrix(fo.dion2, 0.01, 0.1, 1.0, weight_decay=0.0),
    "dpsgd": rates(fo.dpsgd, 0.1, 1.0, 10.0, examples=True),
    "lars": rates(
        lambda lr: fo.lars(lr, momentum=0.9, weight_decay=1e-4), *(0.3, 3.0, 30.0), beside=0.9
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
    "muon": of_matrix(fo.muon, 0.005, 0.05, 0.5, weight_decay=0.0),
    "muon_adamw": rates(lambda lr: fo.muon_adamw(lr, adamw_lr=1e-2), 0.005, 0.05, 0.5),
    "kl_shampoo": of_matrix(fo.kl_shampoo, 0.03, 0.3, 3.0, weight_decay=0.0),
    "kl_soap": of_matrix(fo.kl_soap, 0.01, 0.1, 1.0, weight_decay=0.0),
    "noisy_sgd": rates(lambda lr: fo.noisy_sgd(lr, eta=0.1), *(0.03, 0.3, 3.0), beside=0.0),
    "normuon": of_matrix(fo.normuon, 0.005, 0.05, 0.5),
    "polyak_sgd": rates(
        lambda most: fo.polyak_sgd(most), 0.1, 1.0, 10.0, name="max_learning_rate", asks=("value",)
    ),
    "rprop": rates(fo.rprop, 1e-4, 1e-2, 1.0, on="whole", steps=120),
    "scion": rates(lambda radius: fo.scion(0.01, radius=radius), 1.0, 10.0, 100.0, name="radius"),
    "sgd": rates(lambda lr: fo.sgd(lr, momentum=0.9), 0.03, 0.3, 3.0, beside=0.0),
    "sophia": rates(fo.sophia, 1e-3, 1e-2, 1e-1, before=observed),
    "sparse_adam": rates(fo.sparse_adam, 0.01, 0.1, 1.0, on="tokens"),
}
"""Of algorithms that need more than one argument, or another task."""

CURVES = SPECIAL | {
    name: of_page(name, page["curve"]) for name, page in pages().items() if "curve" in page
}
