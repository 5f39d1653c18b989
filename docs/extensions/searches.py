"""Curves of search methods on Rosenbrock's function in five dimensions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from trainings import Losses

import functional_optim as fo

EVALUATIONS = 1500
SEEDS = 5


def valley(x: Tensor) -> Tensor:
    """Rosenbrock's function of each row; 0 where all entries are 1."""
    a, b = x[:, :-1], x[:, 1:]
    return (100 * (b - a * a) ** 2 + (1 - a) ** 2).sum(1)


class SearchCurve(NamedTuple):
    """What a picture shows.

    runs: methods by their labels; the second is the suggested start. axis: its label. steps: the
    number of evaluations. beside: whether random search is shown, too.
    """

    runs: dict[str, Callable[[], fo.search.Search]]
    axis: str = "evaluation"
    steps: int = EVALUATIONS
    beside: bool = True

    @property
    def what(self) -> str:
        """The caption."""
        found = "The best value found of Rosenbrock's function in five dimensions"
        grey = "; grey: random search" if self.beside else ""
        return f"{found}, median of {SEEDS} seeds{grey}."

    def follow(self, recipe: Callable[[], fo.search.Search]) -> Losses:
        """The best value so far, after each generation, from a start at −1: the median of seeds."""
        method = recipe()
        every = range(method.population, self.steps + 1, method.population)
        found = torch.tensor([best_values(method, seed, len(every)) for seed in range(SEEDS)])
        return list(every), found.median(0).values.tolist()

    def reference(self) -> tuple[str, Losses] | None:
        """Trying at random."""
        return at_random() if self.beside else None


def best_values(method: fo.search.Search, seed: int, generations: int) -> list[float]:
    """The best value so far, after each generation."""
    state = method.init(torch.full((5,), -1.0, dtype=torch.float64), seed)
    found = []
    for _ in range(generations):
        candidates, state = method.ask(state)
        state = method.tell(candidates, valley(candidates), state)
        found.append(float(state.best_fitness))
    return found


@functools.cache
def at_random() -> tuple[str, Losses]:
    return "random search", SearchCurve({}).follow(lambda: fo.search.random_search(20, 1.0))


def sigmas(
    method: Callable[..., Any],
    *values: float,
    steps: int = EVALUATIONS,
    beside: bool = True,
    **more: Any,
) -> SearchCurve:
    """A curve for each deviation at first."""
    runs = {f"sigma={value:g}": functools.partial(method, sigma=value, **more) for value in values}
    return SearchCurve(runs, steps=steps, beside=beside)


def adam(lr: float = 0.05) -> fo.GradientTransformation:
    return fo.adam(lr)


SEARCHES = {
    "annealing": sigmas(
        fo.search.annealing,
        *(0.02, 0.1, 0.5),
        population=10,
        temperature=fo.schedules.exponential_decay(10.0, 100, 0.3),
    ),
    "cem": sigmas(fo.search.cem, 0.1, 1.0, 10.0, population=40),
    "cma_es": sigmas(fo.search.cma_es, 0.02, 0.3, 5.0, population=8),
    "differential_evolution": sigmas(
        fo.search.differential_evolution, 0.1, 1.0, 10.0, population=40
    ),
    "one_plus_one": sigmas(fo.search.one_plus_one, 0.02, 0.3, 5.0, steps=300),
    "openai_es": sigmas(fo.search.openai_es, 0.005, 0.05, 0.5, population=20, tx=adam()),
    "pgpe": sigmas(fo.search.pgpe, 0.01, 0.1, 1.0, population=20, tx=adam()),
    "random_search": sigmas(fo.search.random_search, 0.1, 1.0, 10.0, population=20, beside=False),
    "sep_cma_es": sigmas(fo.search.sep_cma_es, 0.02, 0.3, 5.0, population=8),
    "snes": sigmas(fo.search.snes, 0.05, 0.5, 5.0, population=20),
}
