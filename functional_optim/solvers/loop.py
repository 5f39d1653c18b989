"""Steps of all least-squares methods, for batches of problems."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.solvers import linear
from functional_optim.solvers.box import Box
from functional_optim.solvers.globalization import (
    ACCEPTED,
    dogleg,
    floored,
    guarded,
    nielsen,
    radius,
    ratio,
    scales,
)
from functional_optim.solvers.linear import System, norm
from functional_optim.solvers.losses import Loss
from functional_optim.solvers.problems import Problem
from functional_optim.solvers.slots import RUNNING

FIRST_DAMPING = 1e-3
"""Of the first step, in units of D²: Nielsen's τ for a good starting point."""
FIRST_RADIUS = 1e-3
"""The smallest radius of the first step, in units of the residuals: where x0 is near 0, the cost
would decrease by less than ftol."""
TRUSTED = 0.25
"""Ratio of actual to predicted decrease above which a small one is convergence: scipy's."""
CLIPS = 3
"""How often a step is recomputed after it has reached bounds."""


class Rules(NamedTuple):
    """The settings of the solver. kind: the linear solver. scaled: whether D are norms of
    columns."""

    method: str
    kind: str
    loss: Loss
    ftol: float
    xtol: float
    gtol: float
    floor: float
    max_nfev: int
    scaled: bool


class Data(NamedTuple):
    """The data of each problem, (B, ...). D: (B, n)."""

    args: tuple[Any, ...]
    box: Box
    D: Tensor


class Progress(NamedTuple):
    """The state of B problems."""

    x: Tensor
    """(B, n), in the parameters' dtype."""
    r: Tensor
    """Residuals at x, (B, m), from the function."""
    curvature: Tensor
    """JᵀJ (B, n, n) for "cholesky", Jᵀ (B, n, m) for other solvers; (B, 0) without a Jacobian."""
    g: Tensor
    """Gradient of the cost at x, (B, n), float64."""
    cost: Tensor
    """(B,), float64."""
    mu: Tensor
    """Damping, or the radius of the trust region: (B,), float64."""
    nu: Tensor
    """Factor of the damping after the next rejected step: (B,), float64."""
    D: Tensor
    """Scales of the parameters, (B, n), float64; 0 for one without influence so far."""
    unit: Tensor
    """The size of lengths scaled by D, (B,), float64: the norm of the first residuals, or 1."""
    status: Tensor
    """(B,), int64."""
    nfev: Tensor
    """Evaluations of r, (B,), int64."""
    njev: Tensor
    """Evaluations of J, (B,), int64."""
    nit: Tensor
    """Steps tried, (B,), int64."""


class Linearized(NamedTuple):
    """Values at a point. diagonal: of JᵀJ, (B, n)."""

    cost: Tensor
    curvature: Tensor
    g: Tensor
    diagonal: Tensor


def measured(rules: Rules, problem: Problem, x: Tensor, r: Tensor, columns: Any) -> Linearized:
    """Cost, gradient and curvature from residuals and Jᵀ; or from products, if columns is None.

    All are those of the robust loss.
    """
    cost = rules.loss.cost(r)
    if columns is None:
        weighted, products = problem.products(x, rules.loss)
        g = products[1](weighted)
        return Linearized(cost, g[:, :0], g, torch.ones_like(g))
    weighted, columns = rules.loss.scaled(r, columns)
    g = linear.gradient(columns, weighted)
    if rules.kind == "cholesky":
        gram = linear.gram(columns)
        return Linearized(cost, gram, g, gram.diagonal(dim1=-2, dim2=-1))
    return Linearized(cost, columns, g, (columns * columns).sum(-1))


def start(rules: Rules, problem: Problem, x: Tensor, data: Data) -> Progress:
    """The first evaluation."""
    r, columns = problem.linearize(x, data.args)
    at = measured(rules, problem, x, r, columns)
    D = scales(at.diagonal, torch.zeros_like(at.g)) if rules.scaled else data.D
    ones = torch.ones_like(at.cost)
    mu, unit = FIRST_DAMPING * ones, (2 * at.cost).sqrt() if rules.scaled else ones
    if columns is None or not rules.scaled:  # D are no norms of columns, which may be smaller
        if columns is None:  # the curvature along the gradient
            along = problem.products(x, rules.loss)[1][0](at.g / (D * D))
            size = (along * along).sum(-1) / (at.g / D).square().sum(-1)
        else:
            size = (at.diagonal / (D * D)).amax(-1)
        mu = torch.where((size > 0) & (size < 1), size, 1.0) * mu
    if rules.method == "dogleg":
        size = norm(stepped(rules, D, r) * x.to(torch.float64))
        mu = torch.where(size > 0, size.maximum(FIRST_RADIUS * unit), unit)
        mu = torch.where(mu > 0, mu, 1.0)
    count = torch.ones_like(at.cost, dtype=torch.int64)
    status = torch.where(_finite(at) & r.isfinite().all(-1), RUNNING, -1)
    left = RUNNING if rules.max_nfev > 1 else 0
    status = torch.where(status == RUNNING, left, status)
    status = torch.where((status == left) & _flat(rules, at.cost, x, at.g, D, data), 1, status)
    return Progress(
        x, r, at.curvature, at.g, at.cost, mu, 2 * ones, D, unit, status, count, count, 0 * count
    )


def _finite(at: Linearized) -> Tensor:
    return at.cost.isfinite() & at.g.isfinite().all(-1) & at.diagonal.isfinite().all(-1)


def stepped(rules: Rules, D: Tensor, r: Tensor) -> Tensor:
    """The scales of a step: those of the user, or from the norms of columns."""
    return floored(D, r.shape[-1]) if rules.scaled else guarded(D)


def outward(x: Tensor, g: Tensor, data: Data) -> Tensor:
    """Whether a parameter is at a bound beyond which the cost decreases: (B, n)."""
    none, (lower, upper) = torch.zeros_like(g, dtype=torch.bool), data.box
    low = none if lower is None else (x <= lower) & (g > 0)
    high = none if upper is None else (x >= upper) & (g < 0)
    return low | high


def _flat(rules: Rules, cost: Tensor, x: Tensor, g: Tensor, D: Tensor, data: Data) -> Tensor:
    """Whether the projected gradient vanishes: it is small, and r orthogonal to the columns of J.

    The second condition has no unit, unlike a tolerance for the first alone.
    """
    free = torch.where(outward(x, g, data), 0.0, g).abs()
    cosine = free / guarded(D)
    orthogonal = cosine.amax(-1) <= rules.gtol * (2 * cost).sqrt()
    small = free.amax(-1) <= rules.gtol
    return small & (orthogonal | (not rules.scaled))


def advance(rules: Rules, problem: Problem, s: Progress, data: Data) -> Progress:
    """Try a step of each running problem. Without branches on values, unless
    `problem.batched` is False."""
    running = s.status == RUNNING
    D = stepped(rules, s.D, s.r)
    system = _system(rules, problem, s)
    trial, found, near, held = _proposed(rules, system, s, D, data)
    trial = torch.where(running.unsqueeze(-1), trial, s.x)
    step = (trial - s.x).to(torch.float64)
    predicted = system.predicted(step)
    actual, rho, accepted, r, at = _judged(rules, problem, s, data, trial, predicted)
    accepted = accepted & found  # finished problems have a step of 0, without a prediction
    length, size = norm(D * step), norm(D * s.x.to(torch.float64))

    def taken(new: Tensor, old: Tensor) -> Tensor:
        shape = (-1, *[1] * (new.dim() - 1))
        return torch.where(accepted.reshape(shape), new, old)

    x, g, cost = taken(trial, s.x), taken(at.g, s.g), taken(at.cost, s.cost)
    if rules.method == "dogleg":
        mu, nu = radius(s.mu, torch.where(found, length, 0.5 * s.mu), rho), s.nu
    else:
        mu, nu = nielsen(s.mu, s.nu, rho, accepted)
    scale = taken(scales(at.diagonal, s.D), s.D) if rules.scaled else s.D
    by_x = near & found & (length <= rules.xtol * (rules.xtol * s.unit + size))
    small = (predicted <= rules.ftol * s.cost) & (actual <= rules.ftol * s.cost)
    noise = (predicted <= rules.floor * s.cost) & (actual.abs() <= rules.floor * s.cost)
    by_f = found & ((accepted & small & (near | (rho > TRUSTED))) | (near & noise))
    if held is not None:
        by_x, by_f = by_x & ~held, by_f & ~held
    nfev = s.nfev + running
    status = torch.where(nfev >= rules.max_nfev, 0, RUNNING)
    status = torch.where(~accepted & (trial == s.x).all(-1), -2, status)
    status = torch.where(by_x, 3, status)
    status = torch.where(by_f, torch.where(by_x, 4, 2), status)
    status = torch.where(_flat(rules, cost, x, g, scale, data), 1, status)
    return Progress(
        x, taken(r, s.r), taken(at.curvature, s.curvature), g, cost,
        torch.where(running, mu, s.mu), torch.where(running, nu, s.nu), scale, s.unit,
        torch.where(running, status, s.status), nfev,
        s.njev + (running if problem.batched else accepted), s.nit + running,
    )  # fmt: skip


def _system(rules: Rules, problem: Problem, s: Progress) -> System:
    if rules.kind == "cholesky":
        return System(s.r, s.g, gram=s.curvature)
    if problem.matrix_free:
        r, products = problem.products(s.x, rules.loss)
        return System(r, s.g, products=products, eps=linear.rounding(s.x, s.r))
    r = s.r.to(torch.float64)
    if rules.loss.name != "linear":
        r = r * rules.loss.weights(r)[0]
    return System(r, s.g, columns=s.curvature)


def _judged(
    rules: Rules, problem: Problem, s: Progress, data: Data, trial: Tensor, predicted: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Linearized]:
    """Actual decrease, its ratio to the predicted one, whether to accept, and the values there."""
    old = Linearized(s.cost, s.curvature, s.g, s.D * s.D)
    if not problem.batched:
        r = problem.residuals(trial, data.args)
        actual = s.cost - rules.loss.cost(r)
        rho = ratio(actual, predicted)
        if not bool((rho > ACCEPTED).any()):
            return actual, rho, rho > ACCEPTED, r, old
    r, columns = problem.linearize(trial, data.args)
    at = measured(rules, problem, trial, r, columns)
    actual = s.cost - at.cost
    rho = ratio(actual, predicted)
    good = _finite(at)
    return actual, torch.where(good, rho, -1.0), good & (rho > ACCEPTED), r, at


def _proposed(
    rules: Rules, system: System, s: Progress, D: Tensor, data: Data
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The end of a step, whether the step was found, and whether it is nearly the Gauss–Newton
    step. Last, with bounds, whether a parameter is held, so that a short step is not convergence.
    """
    if rules.method == "dogleg":
        p, found = dogleg(rules.kind, system, D, s.mu)
        end = s.x + p.to(s.x.dtype)
        return end, p.isfinite().all(-1), found & (norm(D * p) < 0.95 * s.mu), None
    if rules.method == "trf":
        end, found, held = _clipped(rules, system, s, D, data)
        return end, found, s.mu <= 1, held
    p, found = linear.solve(rules.kind, system, s.mu, D)
    return s.x + p.to(s.x.dtype), found, s.mu <= 1, None


def _clipped(
    rules: Rules, system: System, s: Progress, D: Tensor, data: Data
) -> tuple[Tensor, Tensor, Tensor]:
    """The end of a damped step of the free parameters, and whether the step was found. Parameters
    that reach a bound stop there, and the step of the others is recomputed.

    Third, whether one is held: it stays at its bound, although the cost would decrease by more than
    ftol if it alone moved inside.
    """
    G, x = system.gram, s.x
    assert G is not None
    fixed = outward(x, s.g, data)
    p, end = torch.zeros_like(s.g), x
    found = torch.ones_like(s.mu, dtype=torch.bool)
    held = ~found
    least = 2 * rules.ftol * s.cost.unsqueeze(-1)
    useful = s.g * s.g > least * G.diagonal(dim1=-2, dim2=-1)
    for _ in range(CLIPS):
        free = (~fixed).to(G.dtype)
        g = (s.g + (G * torch.where(fixed, p, 0.0).unsqueeze(-2)).sum(-1)) * free
        masked = G * free.unsqueeze(-1) * free.unsqueeze(-2) + torch.diag_embed(1 - free)
        step, found = linear.solve("cholesky", System(s.r, g, gram=masked), s.mu, D)
        p = torch.where(fixed, p, step)
        ahead = torch.where(fixed, end, x + p.to(x.dtype))
        end = data.box.inside(ahead)  # x + (bound − x) may be another number than the bound
        hit = ~fixed & (end != ahead)
        held = held | (hit & (end == x) & useful).any(-1)
        p, fixed = torch.where(hit, (end - x).to(G.dtype), p), fixed | hit
    return end, found, held
