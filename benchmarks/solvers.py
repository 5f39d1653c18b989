"""Solvers: ours for many problems against a loop over scipy's, and against optimistix.

    make bench ARGS="--only solver"

One thread on both sides. A loop over scipy's that would take minutes solves some of the problems;
its time is scaled up to all of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import fresh
import problems
import torch
from pairs import Step, timed
from rows import Effort, Measured, NotHere, Row
from scipy import optimize

import functional_optim as fo

SAMPLE = 300
"""Problems that scipy's loop solves."""
TIGHT = 1e-8
ROUNDS = 5
Timed = dict[str, list[float]]


def fits(many: problems.Many, compiled: bool) -> Step:
    x0, data = many.tensors()
    how: dict[str, Any] = {"batched": True, "compile": compiled, "implicit": False}
    return lambda: fo.least_squares(many.fun, x0, (data,), **how)


def scipy_fits(many: problems.Many) -> Step:
    """Levenberg–Marquardt of MINPACK, with Jacobians."""
    one = partial(optimize.least_squares, many.plain, jac=many.slopes, method="lm")
    return lambda: [one(x, args=(y,)) for x, y in sampled(many)]


def optimistix_fits(many: problems.Many) -> Step:
    """optimistix's Levenberg–Marquardt under jax's vmap and jit."""
    jax, library = importlib.import_module("jax"), importlib.import_module("optimistix")
    jax.config.update("jax_enable_x64", True)
    solver = library.LevenbergMarquardt(rtol=TIGHT, atol=TIGHT)
    fun = partial(many.traced, jax.numpy)

    def solved(x: Any, y: Any) -> Any:
        return library.least_squares(fun, solver, x, y, max_steps=1000, throw=False).value

    solve = jax.jit(jax.vmap(solved))
    x0, data = jax.numpy.asarray(many.starts), jax.numpy.asarray(many.data)
    return lambda: jax.block_until_ready(solve(x0, data))


def minima(many: problems.Many, compiled: bool) -> Step:
    x0, data = many.tensors()
    how: dict[str, Any] = {"batched": True, "compile": compiled, "implicit": False}
    how |= {"method": "l-bfgs-b", "bounds": (-1.5, 0.8)}
    return lambda: fo.minimize(many.fun, x0, (data,), **how)


def scipy_minima(many: problems.Many, *, autograd: bool) -> Step:
    """L-BFGS-B with gradients written for numpy, or with torch's."""

    def slopes(x: Any, y: Any) -> tuple[float, Any]:
        at = torch.from_numpy(x).requires_grad_()
        value = many.fun(at, torch.from_numpy(y))
        (grad,) = torch.autograd.grad(value, at)
        return value.item(), grad.numpy()

    bounds = optimize.Bounds(-1.5, 0.8)
    fun, jac = (slopes, True) if autograd else (many.plain, many.slopes)
    one = partial(optimize.minimize, fun, jac=jac, method="L-BFGS-B", bounds=bounds)
    return lambda: [one(x.copy(), args=(y,)) for x, y in sampled(many)]


def botorch_minima(many: problems.Many) -> Step:
    """Its batch of scipy's L-BFGS-B, with the gradients of all problems by torch."""
    library: Any = importlib.import_module("botorch.optim.batched_lbfgs_b")
    data = torch.from_numpy(many.data)

    def slopes(x: Any, batch_indices: list[int]) -> tuple[Any, Any]:
        at = torch.from_numpy(x).requires_grad_()
        values = torch.vmap(many.fun)(at, data[batch_indices])
        (grad,) = torch.autograd.grad(values.sum(), at)
        return values.detach().numpy(), grad.numpy()

    bounds = [(-1.5, 0.8)] * many.starts.shape[1]
    how: dict[str, Any] = {"bounds": bounds, "pass_batch_indices": True}
    return lambda: library.fmin_l_bfgs_b_batched(slopes, many.starts, **how)


def roots(many: problems.Many, compiled: bool) -> Step:
    x0, data = many.tensors()
    how: dict[str, Any] = {"batched": True, "compile": compiled, "implicit": False}
    return lambda: fo.root(many.fun, x0, (data,), **how)


def scipy_roots(many: problems.Many) -> Step:
    return lambda: [optimize.root(many.plain, x, (y,)) for x, y in sampled(many)]


def sampled(many: problems.Many) -> Any:
    return list(zip(many.starts[:SAMPLE], many.data[:SAMPLE], strict=True))


PROBLEMS: dict[str, tuple[str, Callable[[int], problems.Many], int]] = {
    "decays": ("fits of exponential decays", problems.decays, 1000),
    "rosenbrocks": ("least squares of Rosenbrock", problems.rosenbrocks, 1000),
    "stragglers": (
        "fits, 2 % of them from bad starts", partial(problems.decays, stragglers=True), 10_000,
    ),
    "roots": ("systems of 5 equations", partial(problems.tridiagonals, n=5), 10_000),
    "bounded": ("minima of 16 variables in bounds", partial(problems.valleys, n=16), 1000),
}  # fmt: skip

RIVALS: dict[str, tuple[Callable[..., Step], Callable[[problems.Many], Step]]] = {
    "scipy": (fits, scipy_fits),
    "optimistix": (fits, optimistix_fits),
    "roots": (roots, scipy_roots),
    "numpy": (minima, partial(scipy_minima, autograd=False)),
    "autograd": (minima, partial(scipy_minima, autograd=True)),
    "botorch": (minima, botorch_minima),
}


LIBRARIES = {"optimistix": ("jax", "optimistix"), "botorch": ("botorch",)}
"""Rivals that solve all problems at once, and what they import."""


def turns(problem: str, rival: str, compiled: bool, rounds: int, quick: bool) -> Timed:
    """The samples of ours and of a rival alternately, in this process, with one thread."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    torch.set_num_threads(1)
    _, make, count = PROBLEMS[problem]
    many = make(30 if quick else count)
    ours, other = RIVALS[rival]
    mine, theirs = ours(many, compiled), other(many)
    all_of_them = rival in LIBRARIES
    scale = 1.0 if all_of_them else len(many.starts) / len(sampled(many))
    first = timed(mine)
    theirs()
    found: Timed = {"ours": [], "theirs": [], "first": [first]}
    for _ in range(rounds):
        found["ours"].append(timed(mine))
        found["theirs"].append(scale * timed(theirs))
    return found


def compare(problem: str, rival: str, compiled: bool, effort: Effort) -> Measured:
    """The race, in a separate process."""
    peer = rival in LIBRARIES
    absent = [x for x in LIBRARIES.get(rival, ()) if importlib.util.find_spec(x) is None]
    if absent:
        raise NotHere(f"{' and '.join(absent)} cannot be imported here.")
    rounds = 1 if effort.quick else effort.repeats or ROUNDS
    how = {"compiled": compiled, "rounds": rounds, "quick": effort.quick}
    found = fresh.fresh("solve", problem=problem, rival=rival, **how)
    name = f"{rival} {version(rival)}" if peer else "a loop over scipy's"
    note = f"The first call took {found['first'][0]:.2g} s."
    return Measured(found["ours"], found["theirs"], name, note)


def first_call(problem: str, rival: str, compiled: bool, effort: Effort) -> Measured:
    """Of a batch, in a process that finds nothing compiled."""
    how = {"problem": problem, "rival": rival, "compiled": compiled, "rounds": 1, "quick": True}
    return Measured([fresh.fresh("solve", **how)["first"][0] for _ in fresh.processes(effort)], [])


def rows() -> list[Row]:
    """Many problems at once, a network in equal time, and first calls."""
    races = [
        ("decays", "scipy", False, 0.125),
        ("decays", "scipy", True, 0.125),
        ("decays", "optimistix", True, 0.25),
        ("rosenbrocks", "scipy", True, 0.033),
        ("rosenbrocks", "optimistix", True, 0.25),
        ("stragglers", "scipy", True, 0.167),
        ("stragglers", "optimistix", True, 0.4),
        ("roots", "roots", False, 0.05),
        ("roots", "roots", True, 0.05),
        ("bounded", "numpy", False, 0.125),
        ("bounded", "numpy", True, 0.125),
        ("bounded", "autograd", True, 0.025),
        ("bounded", "botorch", True, 0.35),
    ]
    names = {"roots": "`root`", "bounded": "`minimize`, l-bfgs-b", "lm": "levenberg_marquardt"}
    found = []
    for problem, rival, compiled, bar in races:
        words, _, count = PROBLEMS[problem]
        how = "compiled" if compiled else "eager"
        what = f"{names.get(problem, '`least_squares`')}, {how}"
        if rival in ("numpy", "autograd"):
            what = f"{what}; scipy's with {rival} gradients"
        run = partial(compare, problem, rival, compiled)
        key, words = f"solver-{problem}-{rival}-{how}", f"{count:,} {words}, 1 thread"
        found.append(Row(key, what, words, run, (bar,)))
    firsts = [("decays", "scipy", False, 0.1), ("decays", "scipy", True, 5.0)]
    for problem, rival, compiled, bar in [*firsts, ("bounded", "numpy", True, 5.0)]:
        words, _, _ = PROBLEMS[problem]
        how = "compiled" if compiled else "eager"
        what = f"First call, {how}, nothing cached"
        run = partial(first_call, problem, rival, compiled)
        found.append(Row(f"solver-first-{problem}-{how}", what, words, run, (bar,), "ours"))
    return found
