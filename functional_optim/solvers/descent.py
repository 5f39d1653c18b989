"""Steps of quasi-Newton methods between bounds: many problems, each in its own line search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.solvers import quadratics, wolfe
from functional_optim.solvers.box import Box, minimizer
from functional_optim.solvers.linear import none_of, norm
from functional_optim.solvers.objectives import Objective
from functional_optim.solvers.slots import RUNNING
from functional_optim.solvers.truncated import Hessian, newton_target, unknown

Model: TypeAlias = quadratics.Model | Hessian
Evaluate: TypeAlias = Callable[[Tensor, tuple[Any, ...]], tuple[Tensor, Tensor]]
"""From points (B, n), and the data of their problems, to values and gradients in float64. For
"newton-cg" an `Objective`."""


LARGEST = 0.99
"""Share of the largest number of a dtype above which values have no minimum: their decrease ends
because numbers do."""


class DescentRules(NamedTuple):
    """How problems are solved. noise: a share of a value by which it may be wrong. eps: of x0's
    dtype."""

    method: str
    gtol: float
    ftol: float
    noise: float
    eps: float
    maxiter: int
    max_nfev: int


class DescentData(NamedTuple):
    """The data of each problem, (B, ...)."""

    args: tuple[Any, ...]
    box: Box


class Iterate(NamedTuple):
    """x: (B, n), in the parameters' dtype. f: (B,). g: (B, n), both float64."""

    x: Tensor
    f: Tensor
    g: Tensor


class DescentProgress(NamedTuple):
    """Where B problems stand."""

    at: Iterate
    """The last iterate."""
    best: Iterate
    """The lowest point of the search from there."""
    target: Tensor
    """Where a step of length 1 leads, (B, n), in the parameters' dtype."""
    search: wolfe.WolfeSearch
    model: Model
    status: Tensor
    """(B,), int64."""
    nfev: Tensor
    """(B,), int64."""
    nit: Tensor
    """Iterates accepted, (B,), int64."""

    @property
    def products(self) -> Tensor:
        """With the Hessian so far, (B,), int64."""
        model = self.model
        return model.products if isinstance(model, Hessian) else torch.zeros_like(self.nit)


def where(condition: Tensor, a: Any, b: Any) -> Any:
    """Trees of tensors (B, ...): a where the condition, (B,), holds, else b."""

    def one(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(condition.reshape(-1, *[1] * (x.dim() - 1)), x, y)

    return tree.map(one, a, b)


def projected(at: Iterate, box: Box) -> Tensor:
    """The projected gradient x − P(x − g): (B, n), float64."""
    reach = box.reach(at.x.to(at.g.dtype), -at.g)
    return torch.where(reach < 1, reach, 1.0) * at.g


def start(
    rules: DescentRules, objective: Objective, x: Tensor, data: DescentData
) -> DescentProgress:
    """The first evaluation, and the first direction."""
    at = Iterate(x, *objective(x, data.args))
    if rules.method == "newton-cg":
        model: Model = unknown(at.g)
    else:
        model = quadratics.fresh(rules.method, at.g, bounded=data.box.exists)
    return begun(rules, objective, at, model, data)


def begun(
    rules: DescentRules, objective: Evaluate, at: Iterate, model: Model, data: DescentData
) -> DescentProgress:
    """The first direction, by what a model knows."""
    x, f, g = at
    finite = f.isfinite() & g.isfinite().all(-1)
    flat = projected(at, data.box).abs().amax(-1) <= rules.gtol
    left = RUNNING if rules.max_nfev > 1 else 0
    status = torch.where(finite, torch.where(flat, 1, left), -1)
    g = torch.where(finite.unsqueeze(-1), g, 0.0)
    aims = status == RUNNING
    target, search, model, descends = _aimed(objective, Iterate(x, f, g), model, data, aims)
    status = torch.where(aims & ~descends, -2, status)
    if data.box.exists:  # as L-BFGS-B, which has no scale yet
        search = search._replace(longest=torch.ones_like(f))
    count = torch.ones_like(status)
    return DescentProgress(at, at, target, search, model, status, count, 0 * count)


def _aimed(
    objective: Evaluate, at: Iterate, model: Model, data: DescentData, aims: Tensor
) -> tuple[Tensor, wolfe.WolfeSearch, Model, Tensor]:
    """A direction from each point, the search along it, the model, and whether there is one.

    A direction that does not descend makes the model of a problem that aims forget what it knows.
    """
    wide = at.x.to(at.g.dtype)
    target, model = _target(objective, at, model, data, aims)
    slope = (at.g * (target.to(at.g.dtype) - wide)).sum(-1)
    bad = aims & ~((slope < 0) & target.isfinite().all(-1))
    if not none_of(bad):
        model = model.forgotten(bad)
        size = norm(at.g).clamp(min=1e-300).unsqueeze(-1)
        steepest = data.box.inside((wide - at.g / size.clamp(min=1.0)).to(at.x.dtype))
        target = torch.where(bad.unsqueeze(-1), steepest, target)
    d = target.to(at.g.dtype) - wide
    slope = (at.g * d).sum(-1)
    longest = data.box.reach(wide, d).amin(-1).clamp(min=1.0, max=1e10)
    fresh = model.pairs == 0
    t = torch.where(fresh & ~data.box.closed(d), norm(d).clamp(min=1.0).reciprocal(), 1.0)
    return target, wolfe.begin(at.f, slope, t, longest), model, slope < 0


def _target(
    objective: Evaluate, at: Iterate, model: Model, data: DescentData, aims: Tensor
) -> tuple[Tensor, Model]:
    """Where steps of length 1 lead: to the minimum of each problem's model, or near it."""
    if not isinstance(model, Hessian):
        return minimizer(model.quadratic(at.x.shape[-1]), at.x, at.g, data.box), model
    which = aims & (model.pairs > 0)
    if not bool(which.any()):
        return at.x, model
    assert isinstance(objective, Objective)
    target, used = newton_target(objective, data.args, at.x, at.g, data.box, which)
    return target, model._replace(products=model.products + used)


def advance(
    rules: DescentRules, objective: Evaluate, s: DescentProgress, data: DescentData
) -> DescentProgress:
    """Evaluate each running problem once; where that ends its line search, choose a new
    direction."""
    running = s.status == RUNNING
    wide = s.at.x.to(s.at.g.dtype)
    d = s.target.to(wide.dtype) - wide
    t = s.search.t.unsqueeze(-1)
    trial = data.box.inside((wide + t * d).to(s.at.x.dtype))
    trial = torch.where(t == 1, s.target, trial)
    trial = torch.where(running.unsqueeze(-1), trial, s.at.x)
    new = Iterate(trial, *objective(trial, data.args))
    noise = rules.noise * s.at.f.abs()
    search, verdict = wolfe.across(s.search, new.f, (new.g * d).sum(-1), noise)
    good = verdict.good & new.g.isfinite().all(-1)
    lower = (new.f < s.best.f) & new.f.isfinite() & new.g.isfinite().all(-1)
    best = where(good | (lower & running), new, s.best)
    nfev = s.nfev + running
    spent = nfev >= rules.max_nfev
    over = running & (verdict.over | spent)
    moved = over & (good | (best.f < s.at.f))
    at = where(moved, best, s.at)
    now = DescentProgress(
        at, best, s.target, where(running, search, s.search), s.model, s.status, nfev,
        s.nit + moved,
    )  # fmt: skip
    cut = spent & ~verdict.over
    return now if none_of(over) else _aim(rules, objective, s, now, data, over, moved, spent, cut)


def _aim(
    rules: DescentRules,
    objective: Evaluate,
    s: DescentProgress,
    now: DescentProgress,
    data: DescentData,
    over: Tensor,
    moved: Tensor,
    spent: Tensor,
    cut: Tensor,
) -> DescentProgress:
    """What follows the end of a search: the model learns, and says where to go next."""
    at = now.at
    step = at.x.to(at.g.dtype) - s.at.x.to(at.g.dtype)
    y = at.g - s.at.g
    useful = moved & ((step * y).sum(-1) > rules.eps * (s.at.g * step).sum(-1).abs())
    stuck = over & ~moved
    model = s.model.learned(rules.method, step, y, s.at.g, useful)
    decrease = s.at.f - at.f
    size = s.at.f.abs().maximum(at.f.abs()).clamp(min=1.0)
    status = torch.where(spent | (now.nit >= rules.maxiter), 0, RUNNING)
    small = (decrease <= rules.ftol * size) & (size < LARGEST * torch.finfo(at.x.dtype).max)
    status = torch.where(moved & ~cut & small, 2, status)
    status = torch.where(stuck & (s.model.pairs == 0) & ~spent, -2, status)
    flat = projected(at, data.box).abs().amax(-1) <= rules.gtol
    status = torch.where(flat, 1, status)
    status = torch.where(over, status, s.status)
    model = model if none_of(stuck) else model.forgotten(stuck)
    aims = over & (status == RUNNING)
    if none_of(aims):
        return now._replace(model=model, status=status)
    target, search, model, descends = _aimed(objective, at, model, data, aims)
    return now._replace(
        best=where(aims, at, now.best),
        target=where(aims, target, s.target),
        search=where(aims, search, now.search),
        model=model,
        status=torch.where(aims & ~descends, -2, status),
    )
