"""Steps of Newton's method by conjugate gradients, between bounds, for many problems side by side.

Nocedal, Wright, "Numerical Optimization", 2nd ed. (2006), Algorithm 7.1. Where there are bounds it
begins at a Cauchy point, as Lin, Moré, "Newton's method for large bound-constrained optimization
problems", SIAM J. Optim. 9 (1999), https://doi.org/10.1137/S1052623498345075, sections 4 and 5. All
is float64, but for the products with the Hessian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.solvers.box import Box, arrived, placed
from functional_optim.solvers.linear import norm
from functional_optim.solvers.objectives import Objective
from functional_optim.solvers.slots import ROWS

MOST = 200
"""Products with the Hessian in a step at most."""
SHORTENED = 12
"""How often a step along the projected gradient is shortened at most."""
FORCING = 0.5
"""A step is good enough if so much of the gradient is left in the model, or its root if less."""

Times = Callable[[Tensor], Tensor]


class Hessian(NamedTuple):
    """Used instead of a model; it learns nothing.

    pairs: (B,), int64; 0 where a step of Newton's method has led nowhere, and the gradient decides.
    products: with the Hessian so far, (B,), int64.
    """

    pairs: Tensor
    products: Tensor

    def learned(self, method: str, s: Tensor, y: Tensor, g: Tensor, useful: Tensor) -> Hessian:
        """Trust Newton's method again, where a step was useful."""
        return self._replace(pairs=torch.where(useful, 1, self.pairs))

    def forgotten(self, which: Tensor) -> Hessian:
        """Follow the gradient, where `which` says so."""
        return self._replace(pairs=torch.where(which, 0, self.pairs))


def unknown(like: Tensor) -> Hessian:
    """Of a new problem. like: (B, n)."""
    count = torch.zeros_like(like[:, 0], dtype=torch.int64)
    return Hessian(count + 1, count)


def newton_target(
    objective: Objective, args: tuple, x: Tensor, g: Tensor, box: Box, which: Tensor
) -> tuple[Tensor, Tensor]:
    """Where steps of length 1 lead, (B, n), in the dtype of x, and the products that took, (B,).

    Only problems `which`, (B,), are looked at; others stay.
    """
    rows = which.nonzero()[:, 0]
    count = len(rows)
    if objective.batched:
        rows = torch.cat([rows, rows[:1].expand(-count % ROWS)])
    here, slope, sides, own = tree.map(lambda a: a[rows], (x, g, box, args))
    target, used = _aimed(objective.curvature(here, own), here, slope, sides)
    products = torch.zeros_like(which, dtype=torch.int64)
    rows = rows[:count]
    return x.index_copy(0, rows, target[:count]), products.index_copy(0, rows, used[:count])


def _aimed(times: Times, x: Tensor, g: Tensor, box: Box) -> tuple[Tensor, Tensor]:
    wide = x.to(g.dtype)
    tiny = 10 * torch.finfo(x.dtype).eps
    far = norm(wide).clamp(min=1.0)
    used = torch.zeros_like(g[:, 0], dtype=torch.int64)
    if not box.exists:
        free = torch.ones_like(g)
        p, used = _conjugate(times, g, g, free, far, tiny, used)
        return (wide + p).to(x.dtype), used
    blocked = box.reach(wide, -g) <= 0
    d = torch.where(blocked, 0.0, -g)
    z, Hz, stopped, used = _cauchy(times, wide, g, d, box, far, tiny)
    free = (~(stopped | blocked)).to(g.dtype)
    p, used = _conjugate(times, g, g + Hz, free, far, tiny, used)
    bent = torch.zeros_like(used, dtype=torch.bool)

    def worse(target: Tensor) -> Tensor:
        nonlocal bent
        bent = (target != (wide + z + p).to(x.dtype)).any(-1) & (p != 0).any(-1)
        if not bool(bent.any()):
            return bent
        step = target.to(g.dtype) - wide
        model = (g * step).sum(-1) + 0.5 * (step * times(step)).sum(-1)
        return bent & ~(model <= (g * z).sum(-1) + 0.5 * (z * Hz).sum(-1))

    target = arrived(box, x, g, wide + z, p, stopped, blocked, worse)
    used = used + bent
    uphill = ((target - wide) * g).sum(-1, keepdim=True) >= 0
    if not bool(uphill.any()):
        return target, used
    return torch.where(uphill, placed(box, x, g, wide + z, stopped, blocked), target), used


def _cauchy(
    times: Times, x: Tensor, g: Tensor, d: Tensor, box: Box, far: Tensor, tiny: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A step z along the projected gradient with enough decrease of the model; H z; what it leads
    to a bound; products."""
    Hd = times(d)
    t = _length((d * d).sum(-1), d, Hd, far, tiny)
    reach = box.reach(x, d)
    z, Hz = torch.zeros_like(d), torch.zeros_like(d)
    used = torch.ones_like(d[:, 0], dtype=torch.int64)
    going = (d != 0).any(-1)
    stopped = torch.zeros_like(d, dtype=torch.bool)
    for k in range(SHORTENED):
        hits = reach <= t.unsqueeze(-1)
        step = torch.where(hits, reach, t.unsqueeze(-1)) * d
        step = torch.where(d == 0, 0.0, step)
        product = torch.where(hits.any(-1, keepdim=True), 0.0, t.unsqueeze(-1) * Hd)
        asked = going & hits.any(-1)
        if bool(asked.any()):
            product = torch.where(asked.unsqueeze(-1), times(step), product)
            used = used + asked
        slope = (g * step).sum(-1)
        enough = slope + 0.5 * (step * product).sum(-1) <= 0.01 * slope
        taken = (going & (enough | (k == SHORTENED - 1))).unsqueeze(-1)
        z, Hz = torch.where(taken, step, z), torch.where(taken, product, Hz)
        stopped = torch.where(taken, hits & (d != 0), stopped)
        going = going & ~taken[:, 0]
        if not bool(going.any()):
            break
        t = torch.where(going, 0.25 * t, t)
    return z, Hz, stopped, used


def _length(square: Tensor, p: Tensor, Hp: Tensor, far: Tensor, tiny: float) -> Tensor:
    """How far to go along p: to the minimum of the model; where it curves down, as far as if it
    curved up, but not farther than x is long."""
    curvature = (p * Hp).sum(-1)
    size = norm(p).clamp(min=1e-300)
    up = curvature > tiny * size * norm(Hp)
    t = square / torch.where(curvature == 0, 1e-300, curvature.abs())
    return torch.where(up, t, t.minimum(far / size))


def _conjugate(
    times: Times, g: Tensor, slope: Tensor, free: Tensor, far: Tensor, tiny: float, used: Tensor
) -> tuple[Tensor, Tensor]:
    """A step among the free variables from where the model has this slope, and the products used.

    A direction in which the model does not curve up is followed, and ends the way.
    """
    r = slope * free
    z, p, square = torch.zeros_like(r), -r, (r * r).sum(-1)
    start = norm(g * free)
    goal = (start.sqrt().clamp(max=FORCING) * start).square()
    going = square > goal
    for _ in range(min(MOST, 2 * g.shape[-1])):
        if not bool(going.any()):
            break
        Hp = times(p) * free
        used = used + going
        usable = going & Hp.isfinite().all(-1)
        curvature = (p * Hp).sum(-1)
        t = torch.where(usable, _length(square, p, Hp, far, tiny), 0.0).unsqueeze(-1)
        z = torch.where(usable.unsqueeze(-1), z + t * p, z)
        up = curvature > tiny * norm(p) * norm(Hp)
        r = torch.where(usable.unsqueeze(-1), r + t * Hp, r)
        after = (r * r).sum(-1)
        going = usable & up & (after > goal)
        ratio = torch.where(going, after / square, 0.0).unsqueeze(-1)
        p = torch.where(going.unsqueeze(-1), -r + ratio * p, p)
        square = torch.where(going, after, square)
    return z, used
