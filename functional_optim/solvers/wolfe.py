"""A line search for the strong Wolfe conditions, one evaluation at a time, for many problems.

Moré, Thuente, "Line search algorithms with guaranteed sufficient decrease", ACM TOMS 20 (1994),
https://doi.org/10.1145/192115.192132, as in MINPACK-2's dcsrch and dcstep, with L-BFGS-B's
constants. If differences of values are only rounding errors, slopes decide: the approximate Wolfe
conditions of Hager, Zhang, "A new conjugate gradient method with guaranteed descent and an
efficient line search", SIAM J. Optim. 16 (2005), https://doi.org/10.1137/030601880, (4.1). A value
or slope that is not finite counts as a value that is too high.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.solvers.linear import none_of

C1 = 1e-3
"""Sufficient decrease: L-BFGS-B's."""
C2 = 0.9
"""Curvature: L-BFGS-B's."""
NARROW = 0.1
"""Relative width below which a bracket is too narrow: L-BFGS-B's."""
TRIALS = 20
"""Maximum number of evaluations of a search: L-BFGS-B's."""


class LineEnd(NamedTuple):
    """A point on the line: step length, value and slope, each (B,), float64."""

    t: Tensor
    f: Tensor
    slope: Tensor


class WolfeSearch(NamedTuple):
    """The state of B searches between two evaluations. All are (B,)."""

    t: Tensor
    """The next step length."""
    longest: Tensor
    """The largest step length."""
    origin: LineEnd
    low: LineEnd
    """The end of the interval with the lowest value."""
    high: LineEnd
    """The other end, once there is a bracket."""
    bracketed: Tensor
    second: Tensor
    """Whether a point with sufficient decrease and a positive slope was found."""
    least: Tensor
    most: Tensor
    """The interval for the next trial."""
    width: Tensor
    before: Tensor
    """Widths of the last two brackets."""
    k: Tensor
    """Evaluations so far, int64."""


class Verdict(NamedTuple):
    """over: whether the search has ended. good: whether at the last trial; otherwise at the
    lowest."""

    over: Tensor
    good: Tensor


def begin(f: Tensor, slope: Tensor, t: Tensor, longest: Tensor) -> WolfeSearch:
    """A search before its first evaluation."""
    zero = torch.zeros_like(f)
    origin = LineEnd(zero, f, slope)
    no = torch.zeros_like(f, dtype=torch.bool)
    return WolfeSearch(
        t, longest, origin, origin, origin, no, no, zero, 5 * t, longest, 2 * longest,
        torch.zeros_like(f, dtype=torch.int64),
    )  # fmt: skip


def across(s: WolfeSearch, f: Tensor, slope: Tensor, noise: Tensor) -> tuple[WolfeSearch, Verdict]:
    """Update searches with the value f and slope at t.

    noise: the rounding error of differences of values, (B,).
    """
    valid = f.isfinite() & slope.isfinite()
    f = torch.where(valid, f, torch.inf)
    new = LineEnd(s.t, f, torch.where(valid, slope, 0.0))
    start = s.origin.slope
    enough = f <= s.origin.f + C1 * s.t * start
    flat = slope.abs() <= -C2 * start
    close = (f <= s.origin.f + noise) & (slope >= C2 * start) & (slope <= (2 * C1 - 1) * start)
    far = (s.t >= s.longest) & enough & (slope <= C1 * start)
    good = valid & ((enough & flat) | close | far)
    k = s.k + 1
    narrow = s.bracketed & ((s.t <= s.least) | (s.t >= s.most))
    verdict = Verdict(good | narrow | (k >= TRIALS), good)
    if none_of(~verdict.over):
        return s._replace(k=k), verdict
    after, gave_up = _next(s, new, enough)
    return after._replace(k=k), Verdict(verdict.over | gave_up, good)


def _next(s: WolfeSearch, new: LineEnd, enough: Tensor) -> tuple[WolfeSearch, Tensor]:
    """The search with its next trial, and whether the search has ended."""
    second = s.second | (enough & (new.slope >= 0))
    tilt = C1 * s.origin.slope
    tilted = ~second & (new.f <= s.low.f) & ~enough
    tilt = torch.where(tilted, tilt, 0.0)
    low, high, bracketed, t = _step(
        _lowered(s.low, tilt), _lowered(s.high, tilt), _lowered(new, tilt), s
    )
    low, high = _lowered(low, -tilt), _lowered(high, -tilt)
    gap = (high.t - low.t).abs()
    slow = bracketed & (gap >= 0.66 * s.before)
    middle = low.t + 0.5 * (high.t - low.t)
    t = torch.where(slow | ~t.isfinite(), torch.where(bracketed, middle, 2 * new.t), t)
    before = torch.where(bracketed, s.width, s.before)
    width = torch.where(bracketed, gap, s.width)
    least = torch.where(bracketed, low.t.minimum(high.t), t + 1.1 * (t - low.t))
    most = torch.where(bracketed, low.t.maximum(high.t), t + 4 * (t - low.t))
    t = t.clamp(min=0).minimum(s.longest)
    none = bracketed & ((t <= least) | (t >= most) | (most - least <= NARROW * most))
    return WolfeSearch(
        t, s.longest, s.origin, low, high, bracketed, second, least, most, width, before, s.k
    ), none


def _lowered(x: LineEnd, tilt: Tensor) -> LineEnd:
    """A point of the function less its line of sufficient decrease."""
    return LineEnd(x.t, x.f - x.t * tilt, x.slope - tilt)


def _step(
    a: LineEnd, b: LineEnd, new: LineEnd, s: WolfeSearch
) -> tuple[LineEnd, LineEnd, Tensor, Tensor]:
    """dcstep: the interval after a trial, and a safeguarded minimizer of cubics and parabolas."""
    higher = new.f > a.f
    turned = ~higher & (new.slope * a.slope.sign() < 0)
    flatter = ~higher & ~turned & (new.slope.abs() < a.slope.abs())
    dt = new.t - a.t
    theta = 3 * (a.f - new.f) / dt + a.slope + new.slope
    gamma = _root(theta, a.slope, new.slope) * dt.sign()
    parabola = new.t - new.slope / (new.slope - a.slope) * dt
    # the value is higher: between a and new
    cubic = a.t + (gamma - a.slope + theta) / (gamma - a.slope + gamma + new.slope) * dt
    half = a.t + a.slope / ((a.f - new.f) / dt + a.slope) / 2 * dt
    nearer = (cubic - a.t).abs() < (half - a.t).abs()
    t_higher = torch.where(nearer, cubic, cubic + (half - cubic) / 2)
    t_higher = torch.where(new.f.isfinite(), t_higher, a.t + 0.1 * dt)
    # the slope has turned: between a and new
    cubic = _turned(a, new, theta, gamma, dt)
    apart = (cubic - new.t).abs() > (parabola - new.t).abs()
    t_turned = torch.where(apart, cubic, parabola)
    # the slope is flatter: beyond new
    end = torch.where(dt > 0, s.most, s.least)
    beyond = ((cubic - new.t) * dt > 0) & (gamma != 0)
    cubic = torch.where(beyond, cubic, end)
    near = (cubic - new.t).abs() < (parabola - new.t).abs()
    t_flatter = torch.where(near == s.bracketed, cubic, parabola)
    limit = new.t + 0.66 * (b.t - new.t)
    held = torch.where(dt > 0, t_flatter.minimum(limit), t_flatter.maximum(limit))
    bound = t_flatter.minimum(s.most).maximum(s.least)
    t_flatter = torch.where(s.bracketed, held, bound)
    # the slope is no flatter: a cubic with the other end
    back = b.t - new.t
    other = 3 * (new.f - b.f) / back + b.slope + new.slope
    inner = _root(other, b.slope, new.slope) * -back.sign()
    t_else = _turned(b, new, other, inner, -back)
    t_else = torch.where(s.bracketed, t_else, end)
    t = torch.where(flatter, t_flatter, t_else)
    t = torch.where(higher, t_higher, torch.where(turned, t_turned, t))
    low = LineEnd(*[torch.where(higher, x, y) for x, y in zip(a, new, strict=True)])
    swapped = LineEnd(*[torch.where(turned, x, y) for x, y in zip(a, b, strict=True)])
    high = LineEnd(*[torch.where(higher, x, y) for x, y in zip(new, swapped, strict=True)])
    return low, high, s.bracketed | higher | turned, t


def _root(theta: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """√(θ² − p q) without overflow; 0 if it is not real."""
    scale = theta.abs().maximum(p.abs()).maximum(q.abs())
    scale = torch.where(scale > 0, scale, 1.0)
    u = theta / scale
    return scale * (u * u - (p / scale) * (q / scale)).clamp(min=0).sqrt()


def _turned(a: LineEnd, new: LineEnd, theta: Tensor, gamma: Tensor, dt: Tensor) -> Tensor:
    """The minimizer of the cubic through a and new, written from new."""
    p = -gamma - new.slope + theta
    q = -gamma - new.slope - gamma + a.slope
    return new.t - p / q * dt
