"""One row per population method: what the tests send through all of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import functional_optim as fo
from functional_optim import search


class Case(NamedTuple):
    make: Callable[..., search.Search]
    """From a population and σ to the method."""
    ranks: bool = True
    """Does only the order of losses count?"""
    generations: int = 100
    tolerance: float = 1e-3
    """The median loss of five runs on the sphere after that."""
    populations: tuple[int, int] = (8, 9)


COOLING = fo.schedules.exponential_decay(1.0, 10, 0.8)


CASES = {
    "openai_es": Case(lambda n, s: search.openai_es(n, s / 4, fo.adam(0.1)), tolerance=0.05),
    "pgpe": Case(lambda n, s: search.pgpe(n, s, fo.adam(0.1)), tolerance=0.05),
    "snes": Case(search.snes),
    "sep_cma_es": Case(search.sep_cma_es),
    "cma_es": Case(search.cma_es),
    "cem": Case(lambda n, s: search.cem(n, 4 * s), generations=40, populations=(60, 61)),
    "random_search": Case(search.random_search, tolerance=3.0),
    "one_plus_one": Case(lambda n, s: search.one_plus_one(s), generations=300, populations=(1, 1)),
    "differential_evolution-best": Case(search.differential_evolution, populations=(20, 21)),
    "differential_evolution-rand": Case(
        lambda n, s: search.differential_evolution(n, s, strategy="rand/1/bin"),
        populations=(20, 21),
        tolerance=0.5,
    ),
    "annealing": Case(lambda n, s: search.annealing(n, s / 2, COOLING), ranks=False, tolerance=0.3),
}


def make(name: str, sigma: Any = 0.5, odd: bool = False) -> search.Search:
    case = CASES[name]
    return case.make(case.populations[odd], sigma)


def params(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Five numbers in a nested tree, with an empty leaf."""
    return {
        "a": torch.tensor([1.0, -2.0], dtype=dtype),
        "b": [torch.tensor(0.5, dtype=dtype), torch.zeros((0, 3), dtype=dtype)],
        "c": (torch.tensor([[1.5], [-0.5]], dtype=dtype),),
    }


def loss_fn(tree: Any) -> torch.Tensor:
    return torch.stack([x.square().sum() for x in fo.tree.leaves(tree)]).sum()


def generation(method: search.Search, state: Any, loss: Callable[..., Any] = loss_fn) -> Any:
    candidates, state = method.ask(state)
    return method.tell(candidates, search.evaluate(loss, candidates), state)


def run(method: search.Search, state: Any, generations: int = 5, loss: Any = loss_fn) -> Any:
    for _ in range(generations):
        state = generation(method, state, loss)
    return state
