"""The recipes that are checked, with hyperparameters by which a few steps go far."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from cases import CASES, of_kernels

import functional_optim as fo
from functional_optim import warmup
from functional_optim.core.base import GradientTransformation


class CheckedRecipe(NamedTuple):
    """A recipe to check.

    make: from hyperparameters to the transformation. matrices: it takes nothing else. exact: its
    results in float32 are as near to those in float64 as rounding allows; a rule that goes through
    bfloat16 or eigenvectors is not.
    """

    name: str
    make: Callable[..., GradientTransformation]
    hyper: dict[str, Any]
    matrices: bool = False
    exact: bool = True

    def tx(self) -> GradientTransformation:
        return self.make(**self.hyper)


def clipped(lr: float, max_norm: float, decay: float) -> GradientTransformation:
    """Clip, AdamW, and an average."""
    return fo.chain(fo.clip_by_global_norm(max_norm), fo.adamw(lr), fo.params_ema(decay))


def accumulated(lr: float) -> GradientTransformation:
    """A step with every second gradient."""
    return fo.accumulate(fo.adamw(lr), 2)


def parted(lr: float) -> GradientTransformation:
    """Two rules for two kinds of tensors."""
    rules = {"matrices": fo.adamw(lr), "others": fo.sgd(lr, momentum=0.9)}
    return fo.partition(rules, {"matrix*": "matrices", "*": "others"})


def packed(lr: float) -> GradientTransformation:
    """Slots in 8 bits, rounded at random by a seed."""
    return fo.stored(fo.adamw(lr), "int8")


INEXACT = frozenset(
    {"muon", "muon_adamw", "shampoo", "soap", "kl_soap", "kl_shampoo", "scion-sign", "signum"}
)
"""Algorithms and rows that go through bfloat16, through bases that rounding can turn, or through
signs of sums that cancel."""

MATRICES = ("kl_soap", "kl_shampoo")
"""Algorithms without a row that take no vectors."""

WITHOUT = {
    "dpsgd": "needs a gradient of each sample",
    "gauss_newton": "needs the residuals",
    "lbfgs": "needs the loss as a function",
    "momo": "needs the loss",
    "momo_adam": "needs the loss",
}
"""Algorithms that gradients alone do not step, and why."""


def known() -> list[CheckedRecipe]:
    """The recipes of the tests' table, with its numbers; a public algorithm without a row there
    has its defaults."""
    table = [
        _checked(case.name, case.recipe, case.hyper, matrices=case.dim == 2)
        for case in CASES
        if hasattr(fo, name_of(case.recipe))
    ]
    table += [
        _checked("muon_adamw", fo.muon_adamw, MIXED),
        CheckedRecipe("clip", clipped, {"lr": 0.02, "max_norm": 0.5, "decay": 0.9}),
        CheckedRecipe("accumulate", accumulated, {"lr": 0.02}),
        CheckedRecipe("partition", parted, {"lr": 0.02}),
        CheckedRecipe("stored", packed, {"lr": 0.02}, exact=False),
    ]
    named = {name_of(recipe.make) for recipe in table}
    others = {name: make for name, make in warmup.known().items() if name not in named}
    return table + [
        _checked(x, make, {}, matrices=x in MATRICES)
        for x, make in others.items()
        if x not in WITHOUT
    ]


MIXED: dict[str, Any] = {"lr": 0.05, "adamw_lr": 0.02, "muon": "matrix*"}


def _checked(
    name: str, make: Callable[..., Any], hyper: dict[str, Any], *, matrices: bool = False
) -> CheckedRecipe:
    """Where a recipe has views, a tensor of three dimensions is a kernel."""
    exact = INEXACT.isdisjoint((name, name_of(make)))
    parameters = inspect.signature(make).parameters
    if "views" in parameters:
        make, hyper = of_kernels(make), {"lr": parameters["lr"].default, **hyper}
    return CheckedRecipe(name, make, hyper, matrices, exact)


def name_of(recipe: Callable[..., Any]) -> str:
    """That of an algorithm, also where tensors of three dimensions are kernels for it."""
    return recipe.__name__.removesuffix("_of_kernels")
