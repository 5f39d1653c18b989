"""Minima of quadratic models within bounds, for batches of problems.

Byrd, Lu, Nocedal, Zhu, "A limited memory algorithm for bound constrained optimization", SIAM J.
Sci. Comput. 16 (1995), https://doi.org/10.1137/0916069: the generalized Cauchy point (section 4)
and the minimum of the model over the free variables (section 5), projected as in Morales, Nocedal,
"Remark on Algorithm 778", ACM TOMS 38 (2011), https://doi.org/10.1145/2049662.2049669.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from functional_optim.core import modes
from functional_optim.solvers.dense import DenseInverse, product
from functional_optim.solvers.linear import none_of
from functional_optim.solvers.quadratics import Quadratic


class Box(NamedTuple):
    """Bounds, each (B, n) in the parameters' dtype, or None."""

    lower: Tensor | None
    upper: Tensor | None

    @property
    def exists(self) -> bool:
        """Whether there are bounds."""
        return self.lower is not None or self.upper is not None

    def closed(self, x: Tensor) -> Tensor:
        """Whether each variable of a problem has two bounds: (B,), for x of (B, n)."""
        if self.lower is None or self.upper is None:
            return torch.zeros_like(x[:, 0], dtype=torch.bool)
        return (self.lower.isfinite() & self.upper.isfinite()).all(-1)

    def fixed(self, x: Tensor) -> Tensor:
        """Whether both bounds of a variable are equal: (B, n)."""
        if self.lower is None or self.upper is None:
            return torch.zeros_like(x, dtype=torch.bool)
        return self.lower == self.upper

    def inside(self, x: Tensor) -> Tensor:
        """The nearest point within the bounds."""
        x = x if self.lower is None else x.maximum(self.lower)
        return x if self.upper is None else x.minimum(self.upper)

    def reach(self, x: Tensor, d: Tensor) -> Tensor:
        """The largest step of each variable from x in direction d, in units of d: (B, n),
        float64."""
        far = torch.full_like(d, torch.inf)
        if self.lower is not None:
            far = torch.where(d < 0, (self.lower.to(d.dtype) - x) / d, far)
        if self.upper is not None:
            far = torch.where(d > 0, (self.upper.to(d.dtype) - x) / d, far)
        return far.clamp(min=0)

    def towards(self, d: Tensor, otherwise: Tensor) -> Tensor:
        """The bounds in direction d, if any."""
        low = otherwise if self.lower is None else torch.where(d < 0, self.lower, otherwise)
        return low if self.upper is None else torch.where(d > 0, self.upper, low)

    def sides(self, x: Tensor) -> Tensor:
        """1 at an upper bound, −1 at a lower one, else 0: (B, n), int64."""
        zero = torch.zeros_like(x, dtype=torch.int64)
        low = zero if self.lower is None else (x <= self.lower).to(torch.int64)
        return -low if self.upper is None else torch.where(x >= self.upper, 1, -low)


class Cauchy(NamedTuple):
    """z: the step from x to the generalized Cauchy point. slope: of the model there. stopped:
    variables that reached a bound. blocked: variables that were at it before. All are (B, n)."""

    z: Tensor
    slope: Tensor
    stopped: Tensor
    blocked: Tensor


def cauchy(quadratic: Quadratic, x: Tensor, g: Tensor, box: Box) -> Cauchy:
    """The first minimum of the model along the projected gradient. x: float64.

    Only problems without a minimum so far continue with the next segment.
    """
    ends = box.reach(x, -g)
    blocked = ends <= 0
    d = torch.where(blocked, 0.0, -g)
    ends, order = torch.where(blocked, torch.inf, ends).sort(dim=-1, stable=True)
    Bd = quadratic.times(d)
    z, slope, stopped = torch.zeros_like(d), g.clone(), torch.zeros_like(blocked)
    rows = None if modes.recorded() else torch.arange(len(g), device=g.device)
    going = torch.ones_like(blocked[:, 0])
    q, way, before = g, torch.zeros_like(d), torch.zeros_like(d[:, 0])
    for k in range(g.shape[-1]):
        index, end = (order[:, k], ends[:, k]) if rows is None else (order[rows, k], ends[rows, k])
        first, second, length = -(q * d).sum(-1), (Bd * d).sum(-1), end - before
        best = torch.where(second > 0, first / second, 0.0)
        crosses = best > length
        step = torch.where(crosses, length, best).unsqueeze(-1)
        way, q, before = way + step * d, q + step * Bd, end
        hit = index.unsqueeze(-1)
        if rows is None:  # all problems take part, and those that have a minimum stay there
            active = going.unsqueeze(-1)
            z, slope = torch.where(active, way, z), torch.where(active, q, slope)
            going = going & crosses
            stopped = stopped | (going.unsqueeze(-1) & stopped.scatter(-1, hit, True))
        else:
            z[rows], slope[rows] = way, q
            left = crosses.nonzero()[:, 0]
            if not len(left):
                break
            rows, hit = rows[left], hit[left]
            stopped[rows, hit[:, 0]] = True
            before, way, q, d, Bd = [v[left] for v in (before, way, q, d, Bd)]
        Bd = Bd - d.gather(-1, hit) * quadratic.columns(rows, hit[:, 0])
        d = d.scatter(-1, hit, 0.0)
    return Cauchy(z, slope, stopped, blocked)


def minimizer(quadratic: Quadratic | DenseInverse, x: Tensor, g: Tensor, box: Box) -> Tensor:
    """A point within the bounds with a lower value of the model: (B, n), in the dtype of x.

    x: (B, n). g: (B, n), float64.
    """
    wide = x.to(g.dtype)
    if isinstance(quadratic, DenseInverse):
        return (wide + product(quadratic.H, -g)).to(x.dtype)
    if not box.exists:
        return (wide + quadratic.solve(-g, None)).to(x.dtype)
    at = cauchy(quadratic, wide, g, box)
    free = ~(at.stopped | at.blocked)
    p = quadratic.solve(-at.slope, free)
    model: Quadratic = quadratic

    def worse(target: Tensor) -> Tensor:
        rest = target.to(g.dtype) - wide - at.z
        return (at.slope * rest).sum(-1) + 0.5 * (model.times(rest) * rest).sum(-1) > 0

    return arrived(box, x, g, wide + at.z, p, at.stopped, at.blocked, worse)


def arrived(
    box: Box,
    x: Tensor,
    g: Tensor,
    begin: Tensor,
    p: Tensor,
    stopped: Tensor,
    blocked: Tensor,
    worse: Callable[[Tensor], Tensor],
) -> Tensor:
    """The end of a step p from a Cauchy point within the bounds: (B, n), in the dtype of x.

    x: the point with gradient g. begin: the Cauchy point, in float64. stopped: variables that
    reached a bound there. blocked: those at a bound in x. worse: whether the model is higher at an
    end, (B, n), than at the Cauchy point, (B,). A step that ends there, or does not descend, is cut
    at the first bound.
    """
    target = placed(box, x, g, begin + p, stopped, blocked)
    uphill = ((target - x.to(g.dtype)) * g).sum(-1) >= 0
    wrong = uphill | worse(target)
    if none_of(wrong):
        return target
    share = box.reach(begin, p).amin(-1, keepdim=True).clamp(max=1)
    cut = placed(box, x, g, begin + share * p, stopped, blocked)
    return torch.where(wrong.unsqueeze(-1), cut, target)


def placed(box: Box, x: Tensor, g: Tensor, end: Tensor, stopped: Tensor, blocked: Tensor) -> Tensor:
    """An end, in float64, in the dtype of x and within the bounds: see `arrived`."""
    target = torch.where(stopped, box.towards(-g, x), end.to(x.dtype))
    return box.inside(torch.where(blocked, x, target))
