"""Each recipe on the device against the pure transformation in float64 on the CPU."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from gpu_check.platform import Platform
from gpu_check.recipes import CheckedRecipe, known
from gpu_check.results import Check, Figures, expect
from gpu_check.training import (
    SHAPES,
    WAYS,
    Warned,
    by_operations,
    check_executors,
    drawn,
    error_of_all,
    error_of_each,
    executors_of,
    gaps,
    launches,
    moved,
)

CPU = torch.device("cpu")
STEPS = 5


class Dtypes(NamedTuple):
    """Dtypes, and how far results may be off, as a part of the way that tensors went.

    far: all tensors, from float64. apart: each one, from the CPU's in the same dtypes, which rounds
    alike.
    """

    weight: torch.dtype
    grad: torch.dtype
    far: float
    apart: float


KINDS = {
    "float32": Dtypes(torch.float32, torch.float32, 1e-4, 1e-4),
    "bfloat16": Dtypes(torch.bfloat16, torch.bfloat16, 0.3, 0.05),
    "mixed": Dtypes(torch.float32, torch.bfloat16, 1e-4, 1e-4),
}

LOOSE = 0.3
"""Both, for recipes whose results depend on rounding."""

QUICK = ("adamw", "nadam", "clip")
"""The recipes of a quick run."""


def checks(quick: bool) -> list[Check]:
    """A check for each recipe in each kind of dtypes."""
    chosen = [x for x in known() if x.name in QUICK] if quick else known()
    return [
        Check(f"recipes/{recipe.name}/{name}", partial(compare, recipe, kind))
        for name, kind in KINDS.items()
        for recipe in chosen
    ]


def compare(recipe: CheckedRecipe, kind: Dtypes, platform: Platform, figures: Figures) -> None:
    """Step a recipe in both ways, and compare the parameters."""
    shapes = {k: x for k, x in SHAPES.items() if len(x) == 2 or not recipe.matrices}
    start = drawn(0, kind.weight, shapes)
    grads = [drawn(1 + k, kind.grad, shapes) for k in range(STEPS)]
    wide = torch.float64
    exact = by_operations(
        recipe.tx(), moved(start, CPU, wide), [moved(g, CPU, wide) for g in grads]
    )
    alike = by_operations(recipe.tx(), moved(start, CPU), grads)
    far, apart = (kind.far, kind.apart) if recipe.exact else (LOOSE, LOOSE)
    for name, made in WAYS.items():
        with Warned() as warned:
            way = made(recipe, moved(start, platform.device))
            *first, last = [moved(g, platform.device) for g in grads]
            for g in first:
                way.step(g)
            names = launches(platform, partial(way.step, last))
        figures.setdefault("executors", []).extend(executors_of(way.plan()))
        if names is not None:
            figures[f"launches, {name}"] = len(names)
        if warned.texts:
            figures[f"warnings, {name}"] = warned.texts
        exactly = error_of_all(gaps(way.params, exact, start, STEPS))
        likewise = error_of_each(gaps(way.params, alike, start, STEPS))
        figures["error"] = max(figures.get("error", 0.0), exactly)
        figures[f"error, {name}"] = {"float64": exactly, "the CPU": likewise}
        for what, error, bound in (
            ("all tensors are", exactly, far),
            ("a tensor is, other than on the CPU,", likewise, apart),
        ):
            expect(
                error <= bound,
                f"by the {name} {what} {error:.2e} of the way off, and {bound:g} is allowed.",
            )
        check_executors(way.plan(), platform)
