"""Newton's method for as many equations as unknowns, with a line search: many problems at once.

Dennis, Schnabel, "Numerical Methods for Unconstrained Optimization and Nonlinear Equations" (1983),
Algorithm D6.5.3 on the length of steps. If J is singular the step is Levenberg's.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as functional
from torch import Tensor

from functional_optim.solvers import linear
from functional_optim.solvers.linear import System, norm, padded
from functional_optim.solvers.problems import Problem
from functional_optim.solvers.slots import RUNNING

DECREASE = 1e-4
"""Fraction of the predicted decrease of an accepted step: theirs."""
SHORTEST = 1e-10
"""The smallest relative length of a step."""
SINGULAR = 1e-8
"""Levenberg's damping, in units of the largest square of a column's length."""


class NewtonRules(NamedTuple):
    """The settings of the solver. floor: the relative rounding error of x in its dtype."""

    xtol: float
    floor: float
    max_nfev: int


Args: TypeAlias = tuple[Any, ...]
"""The arguments of each problem, trees of tensors (B, ...)."""


class NewtonProgress(NamedTuple):
    """The state of B problems."""

    x: Tensor
    """(B, n), in the parameters' dtype."""
    F: Tensor
    """The values there, (B, n), float64."""
    size: Tensor
    """The largest absolute value of each unknown so far, like x."""
    p: Tensor
    """The next trial step, (B, n), float64."""
    slope: Tensor
    """Slope of ½ Σ F² along p, (B,)."""
    t: Tensor
    """The fraction of p to try, (B,)."""
    status: Tensor
    """(B,), int64."""
    nfev: Tensor
    """Evaluations of F, (B,), int64."""
    njev: Tensor
    """Evaluations of its Jacobian, (B,), int64."""
    nit: Tensor
    """Accepted steps, (B,), int64."""


def solved(columns: Tensor, b: Tensor) -> Tensor:
    """J⁻¹ b, (B, n), from Jᵀ; not finite if J is singular.

    Small systems are eliminated element by element, over all problems; larger matrices are padded,
    so that those of a batch have the same alignment.
    """
    n = b.shape[-1]
    if n <= linear.UNROLLED:
        return _eliminated(columns, b)
    wide = padded(columns, -1, -2)
    if wide.shape[-1] > n:
        tail = torch.arange(wide.shape[-1], device=b.device) >= n
        wide = wide + torch.diag(tail.to(b.dtype))
    right = functional.pad(b, (0, wide.shape[-1] - n)).unsqueeze(-1)
    p, info = torch.linalg.solve_ex(wide.mT.contiguous(), right)
    return torch.where((info == 0).unsqueeze(-1), p[..., :n, 0], torch.nan)


def _eliminated(columns: Tensor, b: Tensor) -> Tensor:
    """By Gauss's elimination with partial pivoting."""
    n = b.shape[-1]
    known = torch.cat([columns, b.unsqueeze(-2)], -2).permute(2, 1, 0).contiguous()
    rows = [list(row.unbind(0)) for row in known]
    for k in range(n):
        for i in range(k + 1, n):
            larger = rows[i][k].abs() > rows[k][k].abs()
            for j in range(k, n + 1):
                a, c = rows[k][j], rows[i][j]
                rows[k][j], rows[i][j] = torch.where(larger, c, a), torch.where(larger, a, c)
        for i in range(k + 1, n):
            factor = rows[i][k] / rows[k][k]
            for j in range(k + 1, n + 1):
                rows[i][j] = rows[i][j] - factor * rows[k][j]
    p = [row[n] for row in rows]
    for i in reversed(range(n)):
        for k in range(i + 1, n):
            p[i] = p[i] - rows[i][k] * p[k]
        p[i] = p[i] / rows[i][i]
    return torch.stack(p, -1)


def evaluated(problem: Problem, x: Tensor, args: Args) -> tuple[Tensor, Tensor]:
    """F and Jᵀ in float64."""
    F, columns = problem.linearize(x, args)
    assert columns is not None
    return F.to(torch.float64), columns.to(torch.float64)


def step(F: Tensor, columns: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """A step, and the slope of ½ Σ F² along it, of the selected problems."""
    p = solved(columns, -F)
    g = (columns * F.unsqueeze(-2)).sum(-1)
    slope = -(F * F).sum(-1)
    lost = wanted & ~p.isfinite().all(-1)
    if linear.none_of(lost):
        return p, slope
    size = norm(columns)
    mu = SINGULAR * size.amax(-1).square()
    mu = torch.where(mu > 0, mu, 1.0)
    system = System(F, g, gram=linear.gram(columns))
    damped, _ = linear.solve("cholesky", system, mu, torch.ones_like(g))
    p = torch.where(lost.unsqueeze(-1), damped, p)
    return p, torch.where(lost, (g * p).sum(-1), slope)


def start(rules: NewtonRules, problem: Problem, x: Tensor, args: Args) -> NewtonProgress:
    """The first evaluation, and the first step."""
    return begun(rules, problem, x, args)[0]


def begun(
    rules: NewtonRules, problem: Problem, x: Tensor, args: Args
) -> tuple[NewtonProgress, Tensor]:
    """The same, and Jᵀ."""
    F, columns = evaluated(problem, x, args)
    finite = F.isfinite().all(-1) & columns.isfinite().all(-1).all(-1)
    zero = (F == 0).all(-1)
    left = RUNNING if rules.max_nfev > 1 else 0
    status = torch.where(finite, torch.where(zero, 1, left), -1)
    p, slope = step(F, columns, finite)
    count, t = torch.ones_like(status), torch.ones_like(slope)
    return NewtonProgress(x, F, x.abs(), p, slope, t, status, count, count, 0 * count), columns


def advance(rules: NewtonRules, problem: Problem, s: NewtonProgress, args: Args) -> NewtonProgress:
    """Try a step of each running problem."""
    running = s.status == RUNNING
    trial = (s.x.to(s.p.dtype) + s.t.unsqueeze(-1) * s.p).to(s.x.dtype)
    trial = torch.where(running.unsqueeze(-1), trial, s.x)
    F, columns = evaluated(problem, trial, args)
    finite = F.isfinite().all(-1) & columns.isfinite().all(-1).all(-1)
    accepted, shorter = judged(s.F, F, finite, s.slope, s.t)
    accepted = accepted & running
    took = accepted.unsqueeze(-1)
    x, F = torch.where(took, trial, s.x), torch.where(took, F, s.F)
    p, slope = step(F, columns, accepted)
    whole = is_whole(s.slope, s.F)
    p, slope = torch.where(took, p, s.p), torch.where(accepted, slope, s.slope)
    t = torch.where(accepted, 1.0, shorter)
    size = s.size.maximum(x.abs())
    noise = finite & is_rounding(F, columns, x, rules.floor)
    ends = (s.t == 1) & whole & was_last(rules, s.p, x, size, noise, accepted)
    ends = ends | is_whole(slope, F) & is_last(p, x, size, noise, rules.floor)
    nfev = s.nfev + running
    status = torch.where(nfev >= rules.max_nfev, 0, RUNNING)
    lost = (~accepted & (t < SHORTEST)) | (x == trial).all(-1) & ~accepted
    status = torch.where(lost | is_flat(rules, slope, F), -2, status)
    status = torch.where(ends, 3, status)
    status = torch.where((F == 0).all(-1), 1, status)
    return NewtonProgress(
        x, F, size, p, slope, t, torch.where(running, status, s.status), nfev,
        s.njev + running, s.nit + accepted,
    )  # fmt: skip


def is_whole(slope: Tensor, F: Tensor) -> Tensor:
    """Whether a step is Newton's, along which ½ Σ F² has the slope −Σ F², and not Levenberg's."""
    return slope <= -0.5 * (F * F).sum(-1)


def is_flat(rules: NewtonRules, slope: Tensor, F: Tensor) -> Tensor:
    """Whether a step does not change ½ Σ F², but for rounding."""
    return slope >= -rules.floor * (F * F).sum(-1)


def judged(
    before: Tensor, after: Tensor, finite: Tensor, slope: Tensor, t: Tensor
) -> tuple[Tensor, Tensor]:
    """Whether the values after a step are small enough, and otherwise the next fraction of it.

    before, after: values, (B, n). finite: whether those after are finite. slope: of ½ Σ F² along
    the whole step. t: the tried fraction of it.
    """
    old, new = 0.5 * (before * before).sum(-1), 0.5 * (after * after).sum(-1)
    new = torch.where(finite, new, torch.inf)
    best = -slope * t * t / (2 * (new - old - t * slope))
    shorter = torch.where(best.isfinite(), best, 0.0).clamp(min=0.1 * t, max=0.5 * t)
    return new <= old + DECREASE * t * slope, shorter


def was_last(
    rules: NewtonRules, p: Tensor, x: Tensor, size: Tensor, noise: Tensor, accepted: Tensor
) -> Tensor:
    """Whether the search ends with a step that was tried. One that is nearly short, and does not
    reduce the values, has met rounding, too."""
    noise = noise | (~accepted & is_short(p, x, size, math.sqrt(rules.xtol)))
    return is_last(p, x, size, noise, rules.xtol)


def is_last(p: Tensor, x: Tensor, size: Tensor, noise: Tensor, tolerance: float) -> Tensor:
    """Whether a step is short for each unknown or, if values are noise, for the largest."""
    small = p.abs().amax(-1) <= tolerance * x.abs().amax(-1)
    return is_short(p, x, size, tolerance) | (noise & small)


def is_short(p: Tensor, x: Tensor, size: Tensor, tolerance: float) -> Tensor:
    """Whether a step from x is short for each unknown. size: the largest value that it had, as an
    unknown may become 0."""
    return (p.abs() <= tolerance * (x.abs() + tolerance * size).to(p.dtype)).all(-1)


def is_rounding(F: Tensor, columns: Tensor, x: Tensor, tolerance: float) -> Tensor:
    """Whether changes of each unknown by a share of it, the tolerance, can cause the values."""
    change = (columns.abs() * x.to(F.dtype).abs().unsqueeze(-1)).sum(-2)
    return (F.abs() <= tolerance * change).all(-1)
