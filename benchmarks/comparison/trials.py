"""Runs of one optimizer on one task, side by side: gradients of all runs in one vmapped call."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

import functional_optim as fo
from comparison.contenders import Contender, Numbers
from comparison.tasks import Params, Task

LOOKS = 40
"""Points of a curve."""
ROUND = 10
"""Steps of a round of times: Shampoo and SOAP do more in every tenth step than in the others."""


@dataclass(frozen=True)
class Run:
    """What one run starts from."""

    numbers: Numbers
    seed: int


@dataclass
class Ended:
    """The score of a run at its end, and at some steps before; infinite once it has diverged."""

    score: float = math.inf
    curve: list[tuple[int, float]] = field(default_factory=list)


def looks(steps: int) -> set[int]:
    """Numbers of steps after which scores are looked at."""
    return {round(steps * (i + 1) / LOOKS) for i in range(LOOKS)}


def stacked(trees: Sequence[Any]) -> Any:
    return fo.tree.map(lambda *x: torch.stack(x), *trees)


def part(tree: Params, i: int) -> Params:
    """The tensors of one run: views, so that a step in place is one of the stack."""
    return {name: x[i] for name, x in tree.items()}


def train(task: Task, contender: Contender, runs: Sequence[Run], *, curves: bool) -> list[Ended]:
    """Make all runs to their ends. curves: whether scores are looked at before, too.

    A function of its arguments: seeds decide first parameters and batches, and nothing else is
    random. One run's numbers do not change another's.
    """
    if contender.squares:
        return [_by_residuals(task, contender, run) for run in runs]
    if contender.exact and not contender.batched:
        return [_by_line_search(task, contender, [run], alone=True)[0] for run in runs]
    if contender.exact:
        return _by_line_search(task, contender, runs, alone=False)
    return _SideBySide(task, contender, runs).results(looks(task.steps) if curves else set())


class _SideBySide:
    """Runs whose parameters are stacked. A step of each is a compiled one with its own numbers."""

    def __init__(self, task: Task, contender: Contender, runs: Sequence[Run]) -> None:
        self.task, self.runs, self.averages = task, runs, contender.averages
        self.alone = len({run.seed for run in runs}) == 1
        first = {run.seed: task.init(run.seed) for run in runs}
        self.params: Params = stacked([first[run.seed] for run in runs])
        self.mine = [part(self.params, i) for i in range(len(runs))]
        made = [contender.transformation(run.numbers, task.steps) for run in runs]
        self.states = [tx.init(p) for tx, p in zip(made, self.mine, strict=True)]
        self.steps = [fo.compile(tx) for tx in made]
        self.ended = [Ended() for _ in runs]
        self.running = set(range(len(runs)))
        shared = 0 if not self.alone else None
        inputs = (0, *[shared] * len(task.batch(0, 0)))
        self.slopes = vmap(grad_and_value(task.loss), in_dims=inputs)
        self.scores = vmap(task.score)

    def batch(self, step: int) -> tuple[Tensor, ...]:
        if self.alone:
            return self.task.batch(self.runs[0].seed, step)
        each = [self.task.batch(run.seed, step) for run in self.runs]
        return tuple(torch.stack(x) for x in zip(*each, strict=True))

    def results(self, seen: set[int]) -> list[Ended]:
        """Make all steps; look at the scores after those of `seen`, and at the end."""
        for step in range(self.task.steps):
            grads, losses = self.slopes(self.params, *self.batch(step))
            for i, finite in enumerate(losses.isfinite().tolist()):
                if i in self.running and not finite:
                    self.running.discard(i)
                    fo.tree.map(Tensor.zero_, self.mine[i])  # infinities would be slow
            for i in self.running:
                _, self.states[i] = self.steps[i](part(grads, i), self.states[i], self.mine[i])
            if step + 1 in seen or step + 1 == self.task.steps:
                self.look(step + 1)
        return self.ended

    def look(self, step: int) -> None:
        """Note the scores: of the averages, where a method has such."""
        kept = self.params
        if self.averages:
            both = zip(self.states, self.mine, strict=True)
            kept = stacked([fo.eval_params(state, own) for state, own in both])
        for i, score in enumerate(self.scores(kept).tolist()):
            if i in self.running:
                score = score if math.isfinite(score) else math.inf
                self.ended[i].curve.append((step, score))
                self.ended[i].score = score
            else:
                self.ended[i].score = math.inf


def _by_line_search(
    task: Task, contender: Contender, runs: Sequence[Run], *, alone: bool
) -> list[Ended]:
    """Runs of the same numbers, with as many evaluations as the others make steps.

    What counts is the point with the least loss so far: a search along a line may end at a worse
    one. Its score decides nothing.
    """
    ended, seen, count = [Ended() for _ in runs], looks(task.steps), 0
    slopes, scores = grad_and_value(task.loss), task.score
    each = [task.init(run.seed) for run in runs]
    params, least = each[0], torch.tensor(math.inf)
    if not alone:
        slopes, scores = vmap(slopes), vmap(scores)
        params, least = stacked(each), least.expand(len(runs))
    best = params

    def look(step: int) -> None:
        for own, score in zip(ended, scores(best).reshape(-1).tolist(), strict=True):
            own.score = score if math.isfinite(score) else math.inf
            own.curve.append((step, own.score))

    def evaluated(params: Params) -> tuple[Tensor, Params]:
        nonlocal best, least, count
        grads, value = slopes(params)
        count += 1
        if count <= task.steps:  # a search along a line may end a little later
            less = value < least
            least = torch.where(less, value, least)
            best = {name: chosen(less, x, best[name]) for name, x in params.items()}
        if count in seen:
            look(count)
        return value, grads

    tx = contender.transformation(runs[0].numbers, task.steps)
    value, grads = evaluated(params)
    tx.update(grads, tx.init(params), params, value=value, value_and_grad=evaluated)
    if count < task.steps:
        look(task.steps)
    return ended


def _by_residuals(task: Task, contender: Contender, run: Run) -> Ended:
    """A run whose steps each evaluate all residuals and their Jacobian once."""
    ended, seen = Ended(), looks(task.steps)
    params, tx = task.init(run.seed), contender.transformation(run.numbers, task.steps)
    state = tx.init(params)
    for step in range(1, task.steps + 1):
        updates, state = tx.update(None, state, params, residual_fn=task.residuals)
        params = fo.apply_updates(params, updates)
        if step in seen:
            score = float(task.score(params))
            ended.score = score if math.isfinite(score) else math.inf
            ended.curve.append((step, ended.score))
    return ended


def chosen(which: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a for the runs named by `which`, b for the others."""
    return torch.where(which.reshape(-1, *[1] * (a.ndim - 1)), a, b)


def times(task: Task, contender: Contender, numbers: Numbers, count: int = 60) -> dict[str, float]:
    """Milliseconds of a gradient and of a step of one run, bytes of its state, and parameters.

    The step of a line search is an evaluation's mean share of it.
    """
    params, batch, slopes = task.init(0), task.batch(0, 0), grad_and_value(task.loss)
    gradients, updates = list[float](), list[float]()

    def evaluated(params: Params) -> tuple[Tensor, Params]:
        begin = time.perf_counter()
        grads, value = slopes(params, *batch)
        gradients.append(time.perf_counter() - begin)
        return value, grads

    if contender.squares:
        tx = contender.transformation(numbers, count)
        state = tx.init(params)
        for _ in range(count):
            evaluated(params)
            begin = time.perf_counter()
            more, state = tx.update(None, state, params, residual_fn=task.residuals)
            updates.append(time.perf_counter() - begin - gradients[-1])
            params = fo.apply_updates(params, more)
    elif contender.exact:
        tx = contender.transformation(numbers, count, batched=False)
        (value, grads), state = evaluated(params), tx.init(params)
        begin, first = time.perf_counter(), sum(gradients)
        tx.update(grads, state, params, value=value, value_and_grad=evaluated)
        passed = time.perf_counter() - begin
        updates = [(passed - sum(gradients) + first) / len(gradients)] * count
        while len(gradients) < count:  # it found the minimum before
            evaluated(params)
    else:
        tx = contender.transformation(numbers, task.steps)
        step, state = fo.compile(tx), tx.init(params)
        for _ in range(count):
            _, grads = evaluated(params)
            begin = time.perf_counter()
            _, state = step(grads, state, params)
            updates.append(time.perf_counter() - begin)
    gradient, update = [round_time(x) * 1e3 for x in (gradients, updates)]
    return {
        "gradient_ms": gradient,
        "update_ms": update,
        "state_bytes": sum([x.nbytes for x in fo.tree.leaves(state) if isinstance(x, Tensor)]),
        "parameters": sum([p.numel() for p in params.values()]),
    }


def round_time(seconds: Sequence[float]) -> float:
    """The mean time of a step in a round, the median of all whole rounds but the first."""
    starts = range(ROUND, len(seconds) - ROUND + 1, ROUND)
    return statistics.median([statistics.mean(seconds[i : i + ROUND]) for i in starts])
