"""Who is compared: a recipe each, the space of its trials, and its defaults."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import functional_optim as fo
from comparison.tasks import Task
from functional_optim.combinators.hidden_matrices import is_hidden_matrix

WARMUP = 0.05
"""The share of a run in which the rate rises."""

Recipe = Callable[..., fo.GradientTransformation]

DECOUPLED = (1e-3, 10.0)


class Numbers(NamedTuple):
    """What a trial chooses. other_lr: of AdamW, where a recipe of matrices leaves it the rest."""

    lr: float
    decay: float = 0.0
    other_lr: float | None = None


@dataclass(frozen=True)
class Contender:
    """An optimizer.

    recipe: from a rate (a schedule), the decay, AdamW's rate or None, and the steps of a run. lr,
    decay: the ends of the ranges, four decades each; decay None: it has none. default: the default
    hyperparameters of the function. other: whether AdamW has a separate rate.
    annealed: whether its rate falls to 0. exact: whether it has a line search, which needs losses
    without noise. averages: whether its result is an average of the parameters. squares: whether it
    needs the residuals of a sum of squares. batched: whether it runs many searches at once. only:
    its tasks; empty: any.
    free: whether the size of its steps is the learning rate, independent of the size of gradients.
    """

    name: str
    title: str
    recipe: Recipe
    lr: tuple[float, float]
    decay: tuple[float, float] | None
    default: Numbers
    other: bool = False
    annealed: bool = True
    exact: bool = False
    averages: bool = False
    squares: bool = False
    batched: bool = True
    only: tuple[str, ...] = ()
    free: bool = True

    def transformation(
        self, numbers: Numbers, steps: int, **more: Any
    ) -> fo.GradientTransformation:
        """For a run of so many steps. more: arguments of the recipe."""
        rate = self.rate(numbers.lr, steps)
        other = None if numbers.other_lr is None else self.rate(numbers.other_lr, steps)
        return self.recipe(rate, numbers.decay, other, steps, **more)

    def rate(self, peak: float, steps: int) -> Any:
        """Up for a twentieth of the run, then down a cosine to 0, or constant; a line search has
        no schedule."""
        if self.exact:
            return peak
        warmup = max(1, round(WARMUP * steps))
        if not self.annealed:
            return fo.schedules.warmup_constant(0.0, peak, warmup)
        return fo.schedules.warmup_cosine(0.0, peak, warmup, steps, 0.0)

    def fits(self, task: Task) -> bool:
        """Whether it is made for such a task: line searches for losses without noise, Muon for
        networks with matrices in hidden layers."""
        matrices = any(is_hidden_matrix(*item) for item in task.init(0).items())
        meant = not self.only or task.name in self.only
        return meant and not (self.exact and task.noisy) and (matrices or not self.other)

    @property
    def page(self) -> str:
        """The name of the page of its algorithm: a variant of AdamW is on AdamW's."""
        return "adamw" if self.name == "cautious" else self.name

    def rates(self, task: Task) -> tuple[float, float]:
        """The ends of the range of rates on a task."""
        reach = task.reach if self.free else 1.0
        return self.lr[0] * reach, self.lr[1] * reach

    def trials(self, count: int, task: Task) -> list[Numbers]:
        """Points of a Sobol sequence, scrambled with seed 0, on logarithmic scales."""
        points = torch.quasirandom.SobolEngine(3, scramble=True, seed=0).draw(count).tolist()
        decays = self.decay if task.decay else None
        return [
            Numbers(
                between(self.rates(task), x),
                0.0 if decays is None else between(decays, y),
                between((1e-4, 1.0), z) if self.other else None,
            )
            for x, y, z in points
        ]


def between(ends: tuple[float, float], share: float) -> float:
    """A point of a range on a logarithmic scale, to four digits."""
    low, high = map(math.log10, ends)
    return float(f"{10 ** (low + share * (high - low)):.4g}")


def defaults(function: Callable[..., Any], lr: str = "lr", other: str | None = None) -> Numbers:
    """The numbers of a function's signature."""
    known = inspect.signature(function).parameters
    decay = known["weight_decay"].default if "weight_decay" in known else 0.0
    return Numbers(known[lr].default, decay, None if other is None else known[other].default)


def alone(function: Callable[..., fo.GradientTransformation], **more: Any) -> Recipe:
    """A recipe of one rate and one decay, all else at its defaults."""

    def recipe(lr: Any, decay: float, other: Any, steps: int) -> fo.GradientTransformation:
        return function(lr, weight_decay=decay, **more)

    return recipe


def whole(function: Callable[..., fo.GradientTransformation], **more: Any) -> Recipe:
    """The same for a recipe of matrices, to which kernels of convolutions are matrices, too."""
    inner = alone(function, **more)

    def recipe(lr: Any, decay: float, other: Any, steps: int) -> fo.GradientTransformation:
        return fo.as_matrix(inner(lr, decay, other, steps))

    return recipe


def ademamix(lr: Any, decay: float, other: Any, steps: int) -> fo.GradientTransformation:
    """Both warm-ups as long as the run, as its authors have them."""
    return fo.ademamix(lr, weight_decay=decay, alpha_warmup=steps, beta3_warmup=steps)


def cautious(lr: Any, decay: float, other: Any, steps: int) -> fo.GradientTransformation:
    steps_of_adam = fo.cautious(fo.scale_by_adam())
    return fo.chain(steps_of_adam, fo.add_decayed_weights(decay), fo.scale_by_lr(lr))


def mars(lr: Any, decay: float, other: Any, steps: int) -> fo.GradientTransformation:
    """One rate for matrices and vectors."""
    return fo.mars(lr, weight_decay=decay, lr_1d=lr, weight_decay_1d=decay)


def muon_adamw(lr: Any, decay: float, other: Any, steps: int) -> fo.GradientTransformation:
    return fo.muon_adamw(lr, other, decay, decay)


def lbfgs(
    lr: Any, decay: float, other: Any, steps: int, *, batched: bool = True
) -> fo.GradientTransformation:
    """All runs in one call, with as many evaluations as the others make steps."""
    search: Any = {"history_size": 10, "line_search_fn": "strong_wolfe", "batched": batched}
    return fo.lbfgs(lr, steps, steps, 0.0, 0.0, **search)


def levenberg_marquardt(lr: Any, decay: float, other: Any, steps: int) -> fo.GradientTransformation:
    return fo.levenberg_marquardt()


def ssbfgs(
    lr: Any, decay: float, other: Any, steps: int, *, batched: bool = False
) -> fo.GradientTransformation:
    return fo.ssbfgs(steps, steps, 0.0, 0.0)


def adam_like(
    name: str, title: str, function: Any, recipe: Recipe | None = None, **more: Any
) -> Contender:
    """With AdamW's ranges."""
    recipe = alone(function) if recipe is None else recipe
    return Contender(name, title, recipe, (1e-4, 1.0), DECOUPLED, defaults(function), **more)


def all_contenders() -> dict[str, Contender]:
    """By name, AdamW first: the others are compared with it."""
    found = [
        adam_like("adamw", "AdamW", fo.adamw),
        Contender(
            "sgd", "SGD, Nesterov's momentum", alone(fo.sgd, momentum=0.9, nesterov=True),
            (3e-4, 3.0), (1e-6, 1e-2), defaults(fo.sgd),
            free=False,
        ),
        adam_like("nadam", "NAdam", fo.nadam, alone(fo.nadam, decoupled_weight_decay=True)),
        adam_like("cautious", "cautious AdamW", fo.adamw, cautious),
        adam_like("adan", "Adan", fo.adan),
        adam_like("adopt", "ADOPT", fo.adopt, alone(fo.adopt, decoupled_weight_decay=True)),
        adam_like("ademamix", "AdEMAMix", fo.ademamix, ademamix),
        adam_like("mars", "MARS", fo.mars, mars),
        Contender("lion", "Lion", alone(fo.lion), (1e-5, 0.1), (1e-2, 100.0), defaults(fo.lion)),
        adam_like("adafactor", "Adafactor", fo.adafactor),
        adam_like(
            "schedule_free_adamw", "schedule-free AdamW", fo.schedule_free_adamw, annealed=False,
            averages=True,
        ),
        Contender(
            "prodigy", "Prodigy", alone(fo.prodigy), (1e-2, 100.0), DECOUPLED,
            defaults(fo.prodigy), free=False,
        ),
        Contender(
            "muon_adamw", "Muon and AdamW", muon_adamw, (1e-3, 10.0), DECOUPLED,
            defaults(fo.muon_adamw, other="adamw_lr"), other=True,
        ),
        adam_like("soap", "SOAP", fo.soap, whole(fo.soap)),
        adam_like(
            "shampoo", "Shampoo, Adam's step sizes", fo.shampoo,
            whole(fo.shampoo, betas=(0.9, 0.99), grafting="adam", precondition_frequency=10),
        ),
        adam_like("psgd_kron", "PSGD Kron", fo.psgd_kron, whole(fo.psgd_kron)),
        Contender(
            "lbfgs", "L-BFGS, strong Wolfe", lbfgs, (1.0, 1.0), None, defaults(fo.lbfgs),
            free=False,
            annealed=False, exact=True,
        ),
        Contender(
            "levenberg_marquardt", "Levenberg–Marquardt", levenberg_marquardt, (1.0, 1.0), None,
            Numbers(1.0), free=False, annealed=False, exact=True, squares=True, only=("physics",),
        ),
        Contender(
            "ssbfgs", "self-scaled BFGS", ssbfgs, (1.0, 1.0), None,
            Numbers(1.0), free=False, annealed=False, exact=True, batched=False, only=("physics",),
        ),
    ]  # fmt: skip
    return {contender.name: contender for contender in found}
