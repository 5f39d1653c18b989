"""A network for Poisson's equation: the losses of methods in equal time, on one thread.

make bench ARGS="--only solver-poisson"
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any, NamedTuple

import fresh
import problems
import torch
from rows import Effort, Measured, Row

import functional_optim as fo

SEEDS = 3
RESIDUALS = {"lm": fo.levenberg_marquardt, "dogleg": fo.dogleg}
NAMES = {"lm": "levenberg_marquardt"}


class Network(NamedTuple):
    """One for Poisson's equation. points: inside. seconds: that each method has."""

    words: str
    points: int
    seconds: float


NETWORKS = {
    32: Network("Poisson's equation, 1,185 parameters, 480 residuals, 20 s", 400, 20.0),
    64: Network("Poisson's equation, 4,417 parameters, 1,000 residuals, 30 s", 834, 30.0),
}
"""By their width."""


def least(method: str, seed: int, seconds: float, width: int, points: int) -> float:
    """The lowest loss that a method finds for the network in some seconds, on one thread."""
    torch.set_num_threads(1)
    params, loss, residuals = problems.poisson(seed, width, points)
    best, end = math.inf, time.perf_counter() + seconds
    if method in RESIDUALS:
        tx = RESIDUALS[method]()
        state = tx.init(params)
        while time.perf_counter() < end:
            step, state = tx.update(None, state, params, residual_fn=residuals)
            params = fo.apply_updates(params, step)
        return float(loss(params))

    def callback(intermediate_result: Any) -> bool:
        nonlocal best
        best = min(best, float(intermediate_result.fun))
        return time.perf_counter() > end

    how: dict[str, Any] = {"gtol": 0.0, "ftol": 0.0, "maxiter": 10**7, "max_nfev": 10**7}
    how |= {"method": method, "callback": callback, "implicit": False}
    fo.minimize(loss, params, **how)
    return best


def equal_time(method: str, rival: str, width: int, effort: Effort) -> Measured:
    """The losses of both, from the same starts."""
    network = NETWORKS[width]
    seconds, seeds = (0.2, range(1)) if effort.quick else (network.seconds, range(SEEDS))
    how = {"seconds": seconds, "width": width, "points": network.points}
    ours, theirs = (
        [fresh.fresh("least", method=own, seed=i, **how)["loss"] for i in seeds]
        for own in (method, rival)
    )
    return Measured(ours, theirs, f"our `{rival}`", f"Ratios by seed: {ratios(ours, theirs)}.")


def ratios(ours: list[float], theirs: list[float]) -> str:
    return ", ".join([f"{a / b:.1e}" for a, b in zip(ours, theirs, strict=True)])


def rows() -> list[Row]:
    """Methods that know residuals, and self-scaled ones, against those that do not."""
    races = [
        ("lm", "l-bfgs-b", 32, 1e-3),
        ("dogleg", "l-bfgs-b", 32, 1e-3),
        ("lm", "l-bfgs-b", 64, 0.1),
        ("dogleg", "l-bfgs-b", 64, 0.1),
        ("ssbfgs", "bfgs", 32, 1e-2),
    ]
    found = []
    for method, rival, width, bar in races:
        words = NETWORKS[width].words
        run = partial(equal_time, method, rival, width)
        what = f"Loss of `{NAMES.get(method, method)}`"
        found.append(Row(f"solver-poisson-{method}-{width}", what, words, run, (bar,), unit="loss"))
    return found
