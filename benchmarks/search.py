"""Population methods on four functions in ten dimensions, against pycma's and nevergrad's.

    python benchmarks/search.py          # writes benchmarks/SEARCH.md

Nothing is timed: what counts is the loss of the best candidate after a fixed number of evaluations,
the median over thirty starts. Each start is a standard normal point, the same for ours and theirs,
and so is σ₀ = 1. All searches of a method of ours run in parallel under torch.vmap, the peers in
separate processes. Needs cma and nevergrad (`pip install "functional_optim[peers]"`).
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import search_table
import torch
from search_table import Found
from torch import Tensor

import functional_optim as fo
from functional_optim import search

FILE = Path(__file__).with_name("SEARCH.md")
DIMENSIONS, SEEDS = 10, 30
BUDGETS = (500, 2000)
STIFFNESS = 1e6 ** torch.linspace(0, 1, DIMENSIONS, dtype=torch.float64)


def sphere(x: Tensor) -> Tensor:
    return x.square().sum(-1)


def rosenbrock(x: Tensor) -> Tensor:
    a, b = x[..., 1:] - x[..., :-1] ** 2, 1 - x[..., :-1]
    return (100 * a**2 + b**2).sum(-1)


def rastrigin(x: Tensor) -> Tensor:
    return (10 + x.square() - 10 * (2 * math.pi * x).cos()).sum(-1)


def ellipsoid(x: Tensor) -> Tensor:
    return (STIFFNESS * x.square()).sum(-1)


FUNCTIONS = (sphere, rosenbrock, rastrigin, ellipsoid)


class Row(NamedTuple):
    """A method of ours, and what does the same elsewhere."""

    name: str
    method: search.Search
    peers: tuple[str, ...] = ()
    note: str = ""


def rows() -> list[Row]:
    cooling = fo.schedules.exponential_decay(10.0, 100, 0.5)
    steps = fo.schedules.exponential_decay(0.5, 200, 0.5)
    return [
        Row("cma_es", search.cma_es(10, 1.0), ("pycma CMA",)),
        Row("sep_cma_es", search.sep_cma_es(10, 1.0), ("pycma CMA_diagonal",)),
        Row("one_plus_one", search.one_plus_one(1.0), ("nevergrad OnePlusOne",)),
        Row(
            "differential_evolution",
            search.differential_evolution(30, 1.0),
            ("nevergrad DE",),
            "theirs has 30 members, too, and moves from each towards the best",
        ),
        Row(
            "cem",
            search.cem(64, 1.0),
            ("nevergrad NaiveIsoEMNA", "nevergrad AnisoEMNA"),
            "theirs estimate a normal distribution from the best 16 of 64, and do not narrow it "
            "down here",
        ),
        Row("random_search", search.random_search(10, 1.0), ("nevergrad RandomSearch",)),
        Row("snes", search.snes(10, 1.0)),
        Row("pgpe", search.pgpe(20, 1.0, fo.adam(0.1))),
        Row("openai_es", search.openai_es(20, 0.1, fo.adam(0.1))),
        Row("annealing", search.annealing(1, steps, cooling)),
    ]


def starts() -> Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randn(SEEDS, DIMENSIONS, dtype=torch.float64, generator=g)


def ours(method: search.Search) -> Found:
    """All functions and starts at once."""
    which = torch.arange(len(FUNCTIONS)).repeat_interleave(SEEDS)

    def generation(state: Any, index: Tensor) -> Any:
        def loss_fn(x: Tensor) -> Tensor:
            return torch.stack([f(x) for f in FUNCTIONS]).gather(0, index.reshape(1))[0]

        candidates, state = method.ask(state)
        return method.tell(candidates, search.evaluate(loss_fn, candidates), state)

    points = starts().repeat(len(FUNCTIONS), 1)
    states = torch.vmap(method.init)(points, torch.arange(len(points)))
    step = torch.vmap(generation)
    found: Found = {}
    done = 0
    for budget in BUDGETS:
        while done + method.population <= budget:
            states = step(states, which)
            done += method.population
        table = states.best_fitness.reshape(len(FUNCTIONS), SEEDS)
        for f, values in zip(FUNCTIONS, table, strict=True):
            found[f.__name__, budget] = values.tolist()
    return found


def collect(run: Callable[[Any, Any, int], list[float]]) -> Found:
    """From a peer's losses in the order of its evaluations."""
    found: Found = {}
    for f in FUNCTIONS:
        for seed, start in enumerate(starts().numpy()):

            def loss(x: Any, f: Callable[[Tensor], Tensor] = f) -> float:
                return float(f(torch.as_tensor(x, dtype=torch.float64)))

            values = run(loss, start, seed)
            for budget in BUDGETS:
                found.setdefault((f.__name__, budget), []).append(min(values[:budget]))
    return found


def theirs(name: str) -> Found:
    """A peer by its name in the table."""
    return collect(_pycma(name) if name.startswith("pycma") else _nevergrad(name.split()[1]))


def _pycma(name: str) -> Callable[[Any, Any, int], list[float]]:
    cma: Any = importlib.import_module("cma")

    options = {"verbose": -9, "tolfun": 0, "tolx": 0, "tolfunhist": 0, "tolstagnation": 10**9}
    options |= {"CMA_diagonal": name.endswith("diagonal"), "tolxstagnation": False}

    def run(loss: Any, start: Any, seed: int) -> list[float]:
        es = cma.CMAEvolutionStrategy(start, 1.0, {**options, "seed": seed + 1})
        values: list[float] = []
        while len(values) < BUDGETS[-1]:
            candidates = es.ask()
            fitness = [loss(x) for x in candidates]
            es.tell(candidates, fitness)
            values += fitness
        return values

    return run


def _nevergrad(name: str) -> Callable[[Any, Any, int], list[float]]:
    nevergrad: Any = importlib.import_module("nevergrad")

    def run(loss: Any, start: Any, seed: int) -> list[float]:
        values: list[float] = []

        def recorded(x: Any) -> float:
            values.append(loss(x))
            return values[-1]

        space = nevergrad.p.Array(init=start).set_mutation(sigma=1.0)
        space.random_state.seed(seed)
        nevergrad.optimizers.registry[name](space, budget=BUDGETS[-1]).minimize(recorded)
        return values

    return run


def peer_runs(peer: str) -> Found:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return theirs(peer)


def main() -> None:
    torch.set_num_threads(1)
    chosen = set(sys.argv[1:])
    picked = [row for row in rows() if not chosen or row.name in chosen]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {p: pool.submit(peer_runs, p) for row in picked for p in row.peers}
        mine = [ours(row.method) for row in picked]
        others = {peer: future.result() for peer, future in waiting.items()}
    pairs = [
        (row.name, peer, found, others[peer])
        for row, found in zip(picked, mine, strict=True)
        for peer in row.peers
    ]
    single = [(row.name, f) for row, f in zip(picked, mine, strict=True) if not row.peers]
    names = [f.__name__ for f in FUNCTIONS]
    populations = [f"`{row.name}` {row.method.population}" for row in picked]
    notes = [f"* `{row.name}`: {row.note}." for row in picked if row.note]
    notes.append(f"* Populations: {', '.join(populations)}.")
    tables = (
        search_table.compared(pairs, names, BUDGETS),
        search_table.alone(single, names, BUDGETS),
    )
    text = "\n\n".join([*tables, "\n".join(notes)])
    print(text)
    if not chosen:
        FILE.write_text(HEAD + text + "\n")


HEAD = f"""# Population methods: losses after a fixed number of evaluations

Written by `benchmarks/search.py`. Ten dimensions, σ₀ = 1, {SEEDS} starts (standard normal points,
the same for all); medians of the loss of the best candidate so far, after as many evaluations as
the line says. Peers have their own defaults: pycma 4.5.0, nevergrad 1.0.12.

*better*, *equal* and *worse* say what the sampling error of the medians allows to say. The starts
are redrawn with replacement, {search_table.RESAMPLINGS:,} times, each time with the
ratio of both medians. Ours is better where the middle {search_table.CONFIDENCE:.0%} of these
ratios lie below 1, worse where they lie above 1, and equal where they lie on both sides. Of
medians that are truly equal, about one in twenty will look better and one in twenty worse.

"""

if __name__ == "__main__":
    main()
