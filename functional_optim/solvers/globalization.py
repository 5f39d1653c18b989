"""Globalization of linear steps: damping, trust regions, dogleg paths, geodesic acceleration.

Nielsen, "Damping parameter in Marquardt's method", IMM-REP-1999-05 (1999), section 3.2. Moré, "The
Levenberg-Marquardt algorithm: Implementation and theory" (1978), for the scales D. Powell's dogleg:
Nocedal, Wright, "Numerical Optimization", 2nd ed. (2006), section 4.1. Transtrum, Sethna,
"Improvements to the Levenberg-Marquardt algorithm for nonlinear least-squares minimization",
https://arxiv.org/abs/1201.5885, section 3, for the acceleration.
"""

from __future__ import annotations

import torch
from torch import Tensor

from functional_optim.core import modes
from functional_optim.solvers.linear import SMALL, UNROLLED, System, none_of, norm, solve

ACCEPTED = 1e-4
"""Ratio of actual to predicted decrease above which a step is accepted: MINPACK's."""
EPS = torch.finfo(torch.float64).eps
INEXACT = 1e-3
"""Relative residual of the normal equations above which a second Gauss–Newton step, with more
damping, is compared with the first."""
BENT = 0.75
"""Largest ratio of acceleration to velocity of an accepted step: the paper's α."""


def ratio(actual: Tensor, predicted: Tensor) -> Tensor:
    """Actual over predicted decrease; −1 if none is predicted, or a value is not finite."""
    good = (predicted > 0) & actual.isfinite()
    return torch.where(good, actual / torch.where(good, predicted, 1.0), -1.0)


def nielsen(mu: Tensor, nu: Tensor, rho: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """The next damping μ, and the factor ν by which the next rejected step multiplies it."""
    cube = 2 * rho - 1
    lower = mu * (1 - cube * cube * cube).clamp(min=1 / 3)
    return torch.where(accepted, lower, mu * nu), torch.where(accepted, 2.0, nu * 2)


def radius(delta: Tensor, length: Tensor, rho: Tensor) -> Tensor:
    """The next radius of a trust region, from the length of the step in it (Algorithm 4.1)."""
    grown = torch.where((rho > 0.75) & (length > 0.95 * delta), 2 * delta, delta)
    return torch.where(rho < 0.25, 0.25 * length, grown)


def scales(diagonal: Tensor, before: Tensor) -> Tensor:
    """Norms of the columns of J from the diagonal of JᵀJ, or the largest so far."""
    return diagonal.clamp(min=0).sqrt().maximum(before)


def guarded(D: Tensor) -> Tensor:
    """D, with 1 for a parameter that had no influence so far."""
    return torch.where(D > 0, D, 1.0)


def floored(D: Tensor, residuals: int) -> Tensor:
    """Scales for a step, from norms of the columns of J, (..., n).

    With fewer residuals than parameters each is at least their root mean square: only the damping
    limits steps of parameters with little influence.
    """
    if residuals < D.shape[-1]:
        D = D.maximum((D * D).mean(-1, keepdim=True).sqrt())
    return guarded(D)


def dogleg(kind: str, system: System, D: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Powell's path from 0 over the Cauchy point to the Gauss–Newton step, truncated at ‖D p‖ = Δ.

    Returns p, and whether there is a Gauss–Newton step; else the path ends at the Cauchy point. The
    step is damped by the rounding errors of JᵀJ or J Jᵀ: without it, a singular one has none.
    """
    size = min(system.r.shape[-1], D.shape[-1])
    rounding = EPS * (size if size > UNROLLED else 1)
    newton, found = solve(kind, system, torch.full_like(delta, rounding), D)
    g = system.g / D
    if kind == "kernel":  # if J Jᵀ is singular, the step may have no digits
        rest = system.pull(system.push(newton)) / D + g
        lost = ~found | (norm(rest) > INEXACT * norm(g))
        if modes.traced() or not none_of(lost):
            safe, _ = solve(kind, system, torch.full_like(delta, EPS**0.5), D)
            better = lost & (system.predicted(safe) > system.predicted(newton))
            newton, found = torch.where(better.unsqueeze(-1), safe, newton), found | better
    square = (g * g).sum(-1)
    curvature = system.along(g / D)
    length = square.sqrt().clamp(min=SMALL)
    steepest = torch.where(curvature > 0, square / curvature.clamp(min=SMALL), delta / length)
    cauchy = -steepest.unsqueeze(-1) * g
    far = torch.where(found.unsqueeze(-1), D * newton, cauchy)
    edge = -(delta / length).unsqueeze(-1) * g
    leg = far - cauchy
    a, b = (leg * leg).sum(-1), (leg * cauchy).sum(-1)
    c = (cauchy * cauchy).sum(-1) - delta * delta
    root = (b * b - a * c).clamp(min=0).sqrt()
    tau = torch.where(b > 0, -c / (b + root).clamp(min=SMALL), (root - b) / a.clamp(min=SMALL))
    path = cauchy + tau.clamp(0, 1).unsqueeze(-1) * leg
    q = torch.where((c >= 0).unsqueeze(-1), edge, path)
    inside = norm(far) <= delta
    return torch.where(inside.unsqueeze(-1), far, q) / D, found


def bent(velocity: Tensor, acceleration: Tensor, D: Tensor) -> Tensor:
    """Whether the curvature is too large for the second-order correction."""
    v = norm(D * velocity)
    return norm(D * acceleration) > BENT * v / 2
