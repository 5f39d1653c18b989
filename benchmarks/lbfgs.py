"""64 Rosenbrock problems in 10 dimensions: side by side, against a loop over torch.optim.LBFGS.

    make bench ARGS="--only lbfgs"

Both start at the same random points, search with strong Wolfe conditions, and end where every
gradient norm is below 1e-6. (About one problem in a hundred gets stuck just above it, where the
search finds no decrease above rounding, or brackets too narrow: it goes on with full steps.) They
take turns in one process; a ratio is the median over the rounds. Compiling happens before, and its
time is printed.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from pairs import timed
from rows import Effort, Measured, Row
from torch import Tensor

import functional_optim as fo

NORM = 1e-6
SEARCHES = ("strong_wolfe", None)
ROUNDS = 5


def rosenbrock(x: Tensor) -> Tensor:
    a, b = x[..., 1:] - x[..., :-1] ** 2, 1 - x[..., :-1]
    return (100 * a**2 + b**2).sum(-1)


def value_and_grad(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of all problems at once."""
    x = x.detach().requires_grad_()
    value = rosenbrock(x)
    (grad,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), grad


def side_by_side(methods: list[fo.GradientTransformation], x: Tensor) -> Tensor:
    state = methods[0].init(x)
    for tx in itertools.cycle(methods):
        value, grads = value_and_grad(x)
        if grads.norm(dim=1).max() < NORM:
            break
        updates, state = tx.update(grads, state, x, value=value, value_and_grad=value_and_grad)
        x = fo.apply_updates(x, updates)
    return x


def loop(options: dict[str, Any], starts: Tensor) -> Tensor:
    ends = []
    for start in starts:
        p = torch.nn.Parameter(start.clone())
        opt = torch.optim.LBFGS([p], **options)

        def closure(opt: torch.optim.LBFGS = opt, p: Tensor = p) -> Tensor:
            opt.zero_grad()
            loss = rosenbrock(p)
            loss.backward()
            return loss

        for search in itertools.cycle(SEARCHES):
            if value_and_grad(p)[1].norm() < NORM:
                break
            opt.param_groups[0]["line_search_fn"] = search
            opt.step(closure)
        ends.append(p.detach())
    return torch.stack(ends)


def compare(history_size: int, compiled: bool, problems: int, effort: Effort) -> Measured:
    """Ours and the loop, alternately."""
    dimensions = 10
    if effort.quick:
        dimensions, problems, history_size = 3, 2, 3
    torch.manual_seed(0)
    starts = torch.randn(problems, dimensions, dtype=torch.float64)
    options = {
        "max_iter": 2000,
        "tolerance_grad": NORM / dimensions**0.5,
        "tolerance_change": 0.0,
        "history_size": history_size,
    }
    methods = [
        fo.lbfgs(**options, line_search_fn=search, batched=True, compile=compiled)
        for search in SEARCHES
    ]
    first = timed(lambda: side_by_side(methods, starts))
    loop(options, starts)
    ours, theirs = [], []
    for _ in range(1 if effort.quick else effort.repeats or ROUNDS):
        ours.append(timed(lambda: side_by_side(methods, starts)))
        theirs.append(timed(lambda: loop(options, starts)))
    note = f"The first run took {first:.0f} s, with compiling." if compiled else ""
    return Measured(ours, theirs, "a loop over torch's", note)


def rows(problems: int = 64) -> list[Row]:
    """Short and long histories, eager and compiled."""
    return [
        Row(
            f"lbfgs-{history_size}-{'compiled' if compiled else 'eager'}",
            f"L-BFGS, history {history_size}, {'compiled' if compiled else 'eager'}",
            f"{problems} Rosenbrock problems",
            partial(compare, history_size, compiled, problems),
        )
        for history_size in (10, 100)
        for compiled in (False, True)
    ]
