"""One generation of an evolution strategy over the digits network, against loops over candidates.

    make bench ARGS="--only es"

64-32-10, 2,410 numbers, 1,024 candidates, cross-entropy on a batch of 32 pictures (random ones:
nothing here depends on what they show). Ours is `openai_es`: ask, evaluation under vmap and tell in
one compiled graph. It is timed against the same functions, eagerly, with `functional_call` for one
candidate after another, and against what one would write by hand: torch's generator instead of the
counter-based one, the same loop, ranks, Adam. Batches are small so that the loop's own cost counts;
with larger ones both sides wait for the same matrix products.

The other rows are the times of ask and tell alone, in ten dimensions, compared with pycma and
nevergrad; evaluating the functions is not timed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pairs import race
from rows import Effort, Measured, NotHere, Row
from torch import Tensor

import functional_optim as fo

SIGMA, LR = 0.05, 0.05
LOOPS = {"functions": "the same functions, eager", "hand": "written by hand, torch.randn"}


class Task:
    """The network, its candidates' number, and a batch."""

    def __init__(self, quick: bool) -> None:
        torch.manual_seed(0)
        self.population = 8 if quick else 1024
        layers = torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
        self.model = torch.nn.Sequential(*layers).requires_grad_(False)
        self.params = {name: p.clone() for name, p in self.model.named_parameters()}
        self.x, self.y = torch.rand(32, 64), torch.randint(10, (32,))

    def loss(self, params: Any) -> Tensor:
        logits = torch.func.functional_call(self.model, params, (self.x,))
        return torch.nn.functional.cross_entropy(logits, self.y)

    def one_by_one(self, candidates: dict[str, Tensor]) -> Tensor:
        """The losses, by a loop."""
        rows = zip(*[x.unbind() for x in candidates.values()], strict=True)
        return torch.stack([self.loss(dict(zip(candidates, row, strict=True))) for row in rows])


def compiled(task: Task) -> Callable[[], Any]:
    """Our generation."""
    method = fo.search.openai_es(task.population, SIGMA, fo.adam(LR))

    @torch.compile(fullgraph=True)
    def generation(state: Any) -> Any:
        candidates, state = method.ask(state)
        return method.tell(candidates, fo.search.evaluate(task.loss, candidates), state)

    return stepped(generation, method.init(task.params))


def functions(task: Task) -> Callable[[], Any]:
    """The same, eagerly and one by one."""
    method = fo.search.openai_es(task.population, SIGMA, fo.adam(LR))

    def generation(state: Any) -> Any:
        candidates, state = method.ask(state)
        return method.tell(candidates, task.one_by_one(candidates), state)

    return stepped(generation, method.init(task.params))


def stepped(generation: Callable[[Any], Any], state: Any) -> Callable[[], Any]:
    """A function without arguments that goes on from generation to generation."""
    kept = [state]

    def step() -> None:
        kept[0] = generation(kept[0])

    return step


def hand(task: Task) -> Callable[[], Any]:
    """The same algorithm as one writes it down."""
    params = {name: torch.nn.Parameter(p.clone()) for name, p in task.params.items()}
    optimizer = torch.optim.Adam(params.values(), lr=LR)
    n = task.population

    @torch.no_grad()
    def step() -> None:
        noise = {name: torch.randn(n // 2, *p.shape) for name, p in params.items()}
        noise = {name: torch.cat([z, -z]) for name, z in noise.items()}
        losses = task.one_by_one({name: params[name] + SIGMA * z for name, z in noise.items()})
        ranks = losses.argsort().argsort() / (n - 1) - 0.5
        for name, p in params.items():
            p.grad = torch.tensordot(ranks, noise[name], 1) / (n * SIGMA)
        optimizer.step()

    return step


def generation(loop: str, effort: Effort) -> Measured:
    """Our generation and a loop over candidates, alternately."""
    task = Task(effort.quick)
    rival = {"functions": functions, "hand": hand}[loop]
    return race(compiled(task), {LOOPS[loop]: rival(task)}, effort)


def cma(peer: str, effort: Effort) -> Measured:
    """A generation of CMA-ES on a function that costs nothing, eagerly, and a peer's."""
    d, n = 10, 10
    method = fo.search.cma_es(n, 0.5)

    def ours(state: Any) -> Any:
        x, state = method.ask(state)
        return method.tell(x, x.square().sum(1), state)

    start = torch.ones(d, dtype=torch.float64)
    theirs = {"pycma": pycma, "nevergrad": nevergrad}[peer](d, n)
    return race(stepped(ours, method.init(start)), {peer: theirs}, effort)


def installed(name: str) -> Any:
    """Another library; it need not be there."""
    if importlib.util.find_spec(name) is None:
        raise NotHere(f"{name} is not installed here.")
    return importlib.import_module(name)


def pycma(d: int, n: int) -> Callable[[], Any]:
    package = installed("cma")
    endless = {"popsize": n, "verbose": -9, "seed": 1, "tolfun": 0, "tolx": 0, "tolfunhist": 0}
    strategy = package.CMAEvolutionStrategy(d * [1.0], 0.5, endless)

    def step() -> None:
        xs = strategy.ask()
        strategy.tell(xs, [float((x * x).sum()) for x in xs])

    return step


def nevergrad(d: int, n: int) -> Callable[[], Any]:
    package = installed("nevergrad")
    optimizer = package.optimizers.ParametrizedCMA(popsize=n)(package.p.Array(shape=(d,)), 10**9)

    def step() -> None:
        for _ in range(n):
            x = optimizer.ask()
            optimizer.tell(x, float((x.value**2).sum()))

    return step


def rows() -> list[Row]:
    """A judged row, an honest one, and the peers."""
    words = "1,024 candidates of a 64-32-10 network, batch 32"
    found = [
        Row(
            f"es-{loop}",
            f"openai_es, compiled, against a loop: {LOOPS[loop]}",
            words,
            partial(generation, loop),
            (0.1,) if loop == "functions" else (),
        )
        for loop in LOOPS
    ]
    peers = [
        Row(f"es-{peer}", f"cma_es, eager, and {peer}", "10 candidates of 10", partial(cma, peer))
        for peer in ("pycma", "nevergrad")
    ]
    return [*found, *peers]
