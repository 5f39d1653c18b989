"""Broyden's method, which evaluates a Jacobian at the start and where it is stuck: many problems.

Broyden, "A class of methods for solving nonlinear simultaneous equations", Math. Comp. 19 (1965),
https://doi.org/10.1090/S0025-5718-1965-0198670-6: J ← J + (y − J s) sᵀ / sᵀs after a step s that
has changed the values by y. Steps and their lengths are those of `newton`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.core import modes
from functional_optim.solvers import newton
from functional_optim.solvers.linear import none_of
from functional_optim.solvers.newton import Args, NewtonRules
from functional_optim.solvers.problems import Problem
from functional_optim.solvers.slots import ROWS, RUNNING


class BroydenProgress(NamedTuple):
    """Where B problems stand."""

    x: Tensor
    """(B, n), in the parameters' dtype."""
    F: Tensor
    """The values there, (B, n), float64."""
    size: Tensor
    """The largest absolute value of each unknown so far, like x."""
    columns: Tensor
    """Jᵀ as far as it is known, (B, n, n), float64."""
    exact: Tensor
    """Is that the Jacobian at x? (B,)."""
    p: Tensor
    """The step to be tried, (B, n), float64."""
    slope: Tensor
    """Of ½ Σ F² along p, (B,)."""
    t: Tensor
    """The share of p to be tried, (B,)."""
    status: Tensor
    """(B,), int64."""
    nfev: Tensor
    """Evaluations of F, (B,), int64."""
    njev: Tensor
    """Evaluations of the Jacobian, (B,), int64."""
    nit: Tensor
    """Steps taken, (B,), int64."""


def start(rules: NewtonRules, problem: Problem, x: Tensor, args: Args) -> BroydenProgress:
    """The first evaluation, and the first step."""
    s, columns = newton.begun(rules, problem, x, args)
    exact = torch.ones_like(s.status, dtype=torch.bool)
    return BroydenProgress(
        s.x, s.F, s.size, columns, exact, s.p, s.slope, s.t, s.status, s.nfev, s.njev, s.nit
    )


def advance(
    rules: NewtonRules, problem: Problem, s: BroydenProgress, args: Args
) -> BroydenProgress:
    """Try a step of each problem that is running."""
    running = s.status == RUNNING
    trial = (s.x.to(s.p.dtype) + s.t.unsqueeze(-1) * s.p).to(s.x.dtype)
    trial = torch.where(running.unsqueeze(-1), trial, s.x)
    F = problem.residuals(trial, args).to(torch.float64)
    accepted, shorter = newton.judged(s.F, F, F.isfinite().all(-1), s.slope, s.t)
    accepted = accepted & running
    took = accepted.unsqueeze(-1)
    step = trial.to(F.dtype) - s.x.to(F.dtype)
    x, F = torch.where(took, trial, s.x), torch.where(took, F, s.F)
    columns = torch.where(took.unsqueeze(-1), _learned(s.columns, step, F - s.F), s.columns)
    size = s.size.maximum(x.abs())
    noise = newton.is_rounding(F, columns, x, rules.floor)
    short = (s.t == 1) & newton.was_last(rules, s.p, x, size, noise, accepted)
    ends = running & short & s.exact & newton.is_whole(s.slope, s.F)
    still = running & ~accepted & (trial == s.x).all(-1)
    renews = running & ~s.exact & (~accepted | short) & ~(F == 0).all(-1)
    if not none_of(renews):
        columns = _renewed(problem, x, columns, args, renews)
    fresh = accepted | renews
    p, slope = newton.step(F, columns, fresh)
    p, slope = torch.where(fresh.unsqueeze(-1), p, s.p), torch.where(fresh, slope, s.slope)
    t = torch.where(fresh, 1.0, torch.where(running, shorter, s.t))
    exact = renews | (s.exact & ~accepted)
    nfev = s.nfev + running
    lost = exact & ~fresh & (t < newton.SHORTEST) | (still & s.exact)
    status = torch.where(nfev >= rules.max_nfev, 0, RUNNING)
    status = torch.where(lost | (exact & newton.is_flat(rules, slope, F)), -2, status)
    status = torch.where(renews & ~columns.isfinite().all(-1).all(-1), -1, status)
    noise = newton.is_rounding(F, columns, x, rules.floor)
    known = exact & newton.is_whole(slope, F)
    ends = ends | (known & newton.is_last(p, x, size, noise, rules.floor))
    status = torch.where(ends, 3, status)
    status = torch.where((F == 0).all(-1), 1, status)
    return BroydenProgress(
        x, F, size, columns, exact, p, slope, t, torch.where(running, status, s.status), nfev,
        s.njev + renews, s.nit + accepted,
    )  # fmt: skip


def _learned(columns: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """Jᵀ after a step s with differences y of the values."""
    rest = y - (columns * s.unsqueeze(-1)).sum(-2)
    square = (s * s).sum(-1, keepdim=True)
    unit = s / torch.where(square > 0, square, 1.0)
    return columns + unit.unsqueeze(-1) * rest.unsqueeze(-2)


def _renewed(problem: Problem, x: Tensor, columns: Tensor, args: Args, which: Tensor) -> Tensor:
    """Jᵀ at x of the problems `which`, and of others what is given."""
    if modes.recorded():
        _, found = newton.evaluated(problem, x, args)
        return torch.where(which[:, None, None], found, columns)
    rows = which.nonzero()[:, 0]
    count = len(rows)
    if problem.batched:
        rows = torch.cat([rows, rows[:1].expand(-count % ROWS)])
    x, args = tree.map(lambda a: a[rows], (x, args))
    _, found = newton.evaluated(problem, x, args)
    return columns.index_copy(0, rows[:count], found[:count])
