"""64 Rosenbrock problems in 10 dimensions: side by side, against a loop over torch.optim.LBFGS.

    python benchmarks/lbfgs.py [--rounds 5] [--problems 64] [--dimensions 10]

Both start at the same random points, search with strong Wolfe conditions, and end where every
gradient norm is below 1e-6. (About one problem in a hundred gets stuck just above it, where the
search finds no decrease above rounding, or brackets too narrow: it goes on with full steps.) They
take turns in one process; a ratio is the median over the rounds. Compiling happens before, and its
time is printed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import functional_optim as fo

NORM = 1e-6
SEARCHES = ("strong_wolfe", None)


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


def seconds(fn: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--dimensions", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(0)
    starts = torch.randn(args.problems, args.dimensions, dtype=torch.float64)
    print(f"{args.problems} problems, {args.dimensions} dimensions, gradient norm < {NORM:g}")
    print("history  side by side        ms    loop ms   ratio")
    for history_size in (10, 100):
        options = {
            "max_iter": 2000,
            "tolerance_grad": NORM / args.dimensions**0.5,
            "tolerance_change": 0.0,
            "history_size": history_size,
        }
        for compiled in (False, True):
            methods = [
                fo.lbfgs(**options, line_search_fn=search, batched=True, compile=compiled)
                for search in SEARCHES
            ]
            first = seconds(lambda methods=methods: side_by_side(methods, starts))
            ours, theirs = [], []
            for _ in range(args.rounds):
                ours.append(seconds(lambda methods=methods: side_by_side(methods, starts)))
                theirs.append(seconds(lambda options=options: loop(options, starts)))
            a, b = statistics.median(ours), statistics.median(theirs)
            ratio = statistics.median(x / y for x, y in zip(ours, theirs, strict=True))
            how = f"compiled in {first - a:.0f} s" if compiled else "eager"
            print(f"{history_size:7}  {how:15}  {a * 1e3:7.0f}  {b * 1e3:9.0f}  {ratio:6.3f}")


if __name__ == "__main__":
    main()
