"""Training without gradients: digits by evolution, and CMA-ES at work in two dimensions.

    python examples/gradient_free.py

trains a network of 2,410 numbers on scikit-learn's digits with OpenAI's evolution strategy: 256
candidates a generation, evaluated side by side, asked for and told in one compiled graph; no
backward pass. Then it follows CMA-ES through Rosenbrock's valley. Most of its minute is the
compiler's; a second run finds the kernels. It leaves `gradient_free.png` in `out`, and ends with 1
if the digits were not learnt, with 2 if it cannot start.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import digits
import search_report as report
import torch
from errors import BadInput
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor

import functional_optim as fo

POPULATION, SIGMA, LR, BATCH = 256, 0.05, 0.05, 128
GENERATIONS = 150
ENOUGH = 0.90
"""The accuracy on test pictures that must be reached."""


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong flag gets one sentence instead of the usage too."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(message)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = Parser(prog="gradient_free", description="Train a classifier without gradients.")
    parser.add_argument("--generations", type=int, help=f"default {GENERATIONS}")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default 0)")
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("out"), help="default: out")
    parser.add_argument("--eager", action="store_true", help="do not compile the generation")
    parser.add_argument(
        "--quick", action="store_true", help="few candidates, eagerly: does it run?"
    )
    flags = parser.parse_args(argv)
    if flags.generations is not None and flags.generations < 1:
        raise BadInput(f"--generations must be at least 1, but is {flags.generations}.")
    if not 0 <= flags.seed < 2**63:
        raise BadInput(f"--seed must be at least 0 and below 2**63, but is {flags.seed}.")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code."""
    try:
        flags = parse(argv)
        try:
            flags.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"--out {flags.out} cannot be made: {error.strerror}.") from None
        return work(flags)
    except BadInput as problem:
        print(f"gradient_free: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gradient_free: stopped.", file=sys.stderr)
        return 130


def work(flags: argparse.Namespace) -> int:
    """Train, search, draw, judge."""
    console = Console()
    population = 64 if flags.quick else POPULATION
    generations = flags.generations or (8 if flags.quick else GENERATIONS)
    curve = learn(console, population, generations, flags.seed, not (flags.eager or flags.quick))
    found = valley(flags.seed)
    console.print(report.table(curve, population))
    path = flags.out / "gradient_free.png"
    report.plot(curve, found, population, path)
    print(
        f"CMA-ES came to a loss of {found[-1].best:.1e} after {8 * (len(found) - 1)} evaluations."
    )
    print(f"The picture is {path}.")
    best = max([point.accuracy for point in curve])
    if flags.quick or flags.generations:
        print(f"Best test accuracy {best:.1%}: too short a run to judge it.")
        return 0
    if best < ENOUGH:
        print(f"gradient_free: the digits were not learnt: {best:.1%} is not {ENOUGH:.0%}.")
        return 1
    first = next(point for point in curve if point.accuracy >= ENOUGH)
    print(
        f"{ENOUGH:.0%} of the test pictures after {first.generation} generations, {best:.1%} at "
        "best, and not one backward pass."
    )
    return 0


def learn(
    console: Console, population: int, generations: int, seed: int, compiled: bool
) -> list[report.Point]:
    """Train the network on digits; the accuracy along the way."""
    data, model = digits.load(), digits.network()
    decay = fo.schedules.cosine_decay(LR, generations, alpha=0.1)
    method = fo.search.openai_es(population, SIGMA, fo.adam(decay))

    def loss_fn(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return digits.loss_of(model, params, x, y)

    def generation(state: Any, x: Tensor, y: Tensor) -> Any:
        candidates, state = method.ask(state)
        fitness = fo.search.evaluate(loss_fn, candidates, x, y)
        return method.tell(candidates, fitness, state), fitness.mean()

    step: Callable[..., Any] = torch.compile(generation, fullgraph=True) if compiled else generation
    batches = torch.Generator().manual_seed(seed)
    state = method.init(dict(model.named_parameters()), seed=seed)
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
    )
    curve: list[report.Point] = []
    seconds = 0.0
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        waiting = "compiling the generation …" if compiled else ""
        task = progress.add_task("digits", total=generations, status=waiting)
        for k in range(generations + 1):
            if k % 5 == 0 or k == generations:
                right = digits.accuracy(model, fo.search.center(state), data)
                curve.append(report.Point(k, seconds, right))
            if k == generations:
                break
            start = time.perf_counter()
            state, loss = step(state, *data.batch(BATCH, batches))
            status = f"loss {loss.item():.3f}  test accuracy {curve[-1].accuracy:.1%}"
            seconds += time.perf_counter() - start
            progress.update(task, advance=1, status=status)
            if not console.is_terminal and (k == 0 or (k + 1) % max(1, generations // 10) == 0):
                print(f"digits {k + 1:>4}/{generations}  {status}  {seconds:.1f} s", flush=True)
    return curve


def valley(seed: int) -> list[report.Generation]:
    """CMA-ES on Rosenbrock's function: what each generation looked like."""
    method = fo.search.cma_es(population=8, sigma=0.4)
    state = method.init(torch.tensor([-1.2, 1.6], dtype=torch.float64), seed=seed)
    seen = []
    for _ in range(61):
        candidates, state = method.ask(state)
        seen.append(
            report.Generation(
                candidates, state.mean, state.sigma.square() * state.C, state.best_fitness.item()
            )
        )
        state = method.tell(candidates, report.rosenbrock(candidates), state)
    return seen


if __name__ == "__main__":
    sys.exit(main())
