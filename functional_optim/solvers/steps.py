"""Common parts of the transformations with residuals: one step of one tree of parameters."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import jvp, vjp

from functional_optim import tree
from functional_optim.core import base, modes
from functional_optim.core.chain import WithoutGradients
from functional_optim.core.ravel import Ravel
from functional_optim.solvers import linear, residuals
from functional_optim.solvers.given import check_derivatives, check_recorded
from functional_optim.solvers.globalization import ACCEPTED, bent, floored, ratio, scales
from functional_optim.solvers.linear import System

Scaling = Literal["jac"]


class FromResiduals(WithoutGradients):
    """A transformation whose update uses residuals instead of gradients."""


class Here(NamedTuple):
    """The linear problem at some parameters.

    flat: the vector view. x: the parameters, (n,), in its dtype. system: in float64. diagonal: of
    JᵀJ, (n,), float64; ones without a Jacobian. cost: half the sum of squares, 0-dim,
    float64. kind: the linear solver.
    """

    flat: Ravel
    x: Tensor
    system: System
    diagonal: Tensor
    cost: Tensor
    kind: str


def here(name: str, kind: linear.Kind, params: Any, residual_fn: Any) -> Here:
    """Evaluate residuals and the parts of their Jacobian that the linear solver needs.

    Raises: TypeError, ValueError: with the name of the transformation, if parameters or residuals
    are missing, or residuals are not finite, or do not depend on the parameters.
    """
    base.check_needed(name, residual_fn=residual_fn)
    if not torch.compiler.is_dynamo_compiling():  # which cannot trace the check
        check_derivatives(name)
    elif kind in ("cg", "lsmr"):
        raise RuntimeError(
            f"{name} with linear_solver={kind!r} is not compiled, since a graph of all iterations "
            'is too large; use "auto", or call update outside of torch.compile.'
        )
    if params is None:
        raise ValueError(
            f"{name} needs the parameters: call update(None, state, params, residual_fn=fn)."
        )
    if not callable(residual_fn):
        raise TypeError(
            f"residual_fn must be a function from parameters to residuals, but got a "
            f"{type(residual_fn).__name__}; pass the function, not its result."
        )
    flat = vector_view(name, params)
    x = flat.vector(params)
    many = residuals.size(residual_fn, flat, x) if kind == "auto" else 0
    known = linear.choose(kind, flat.size, many)
    system, diagonal = system_at(known, residual_fn, flat, x)
    cost = 0.5 * (system.r * system.r).sum()
    finite = cost.isfinite() & diagonal.isfinite().all()
    if system.r.numel() == 1 and not modes.traced():
        check_no_loss(residual_fn(params))
    if not modes.traced() and not bool(finite & system.g.any()):
        if not finite:
            raise ValueError(
                "residuals, or their Jacobian, are not finite at these parameters; nothing was "
                "changed. Start from other parameters, or restore earlier ones."
            )
        if not hasattr(residual_fn, "derivatives"):
            point = residuals.searched(x)
            with torch.enable_grad():
                check_recorded(name, residuals.on_vector(residual_fn, flat)(point), point)
    return Here(flat, x, system, diagonal, cost, known)


def check_no_loss(value: Any) -> None:
    """Raise ValueError for one number in place of residuals."""
    if isinstance(value, Tensor) and not value.dim():
        raise ValueError(
            "residual_fn returned one number, such as a loss, of which the square would be "
            "minimized; return the residuals, before they are squared and summed, or a single "
            "residual as r.reshape(1)."
        )


def vector_view(name: str, params: Any) -> Ravel:
    """The parameters as a vector. Raises TypeError for complex ones."""
    for path, p in tree.items(params):
        if isinstance(p, Tensor) and p.is_complex():
            raise TypeError(
                f"{name} takes real parameters, but {path!r} has dtype {p.dtype}; train "
                "torch.view_as_real of it."
            )
    return Ravel(params)


def system_at(kind: str, fn: Any, flat: Ravel, x: Tensor) -> tuple[System, Tensor]:
    """The linear problem in float64, and the diagonal of JᵀJ."""
    wide = torch.float64
    if kind in ("cg", "lsmr"):
        r, push, pull = residuals.products(fn, flat, x)

        def forward(v: Tensor) -> Tensor:
            return push(v.to(x.dtype)).to(wide)

        def backward(u: Tensor) -> Tensor:
            return pull(u.to(r.dtype)).to(wide)

        g = backward(r)
        eps = linear.rounding(x, r)
        system = System(r.to(wide), g, products=(forward, backward), eps=eps)
        return system, torch.ones_like(g)
    if kind != "cholesky":
        r, J = residuals.jacobian(fn, flat, x)
        r, columns = r.to(wide), J.mT.to(wide)
        g = columns @ r
        return System(r, g, columns=columns), (columns * columns).sum(-1)
    parts: list[Tensor] = []
    gram = g = torch.zeros((), dtype=wide, device=x.device)
    for r, J in residuals.blocks(fn, flat, x):
        r, J = r.to(wide), J.to(wide)
        parts.append(r)
        gram, g = gram + J.mT @ J, g + r @ J
    return System(torch.cat(parts), g, gram=gram), gram.diagonal()


class Tried(NamedTuple):
    """A tried step: its end point, in the leaves' dtypes, and whether it is accepted."""

    step: Tensor
    ratio: Tensor
    accepted: Tensor

    def updates(self, at: Here) -> Any:
        """The step as a tree; −0.0 if it was rejected."""
        return at.flat.tree(torch.where(self.accepted, self.step, -0.0), stored=False)


def tried(at: Here, fn: Any, p: Tensor, found: Tensor) -> Tried:
    """Evaluate the residuals after a step p, (n,), and compare with the prediction."""
    trial = at.flat.snap(at.x + p.to(at.x.dtype))
    step = trial - at.x
    r = residuals.on_vector(fn, at.flat)(trial).to(torch.float64)
    if not (trial.requires_grad or modes.traced()):  # a closure's tensors would stay in the state
        r = r.detach()
    wide = step.to(torch.float64)
    rho = ratio(at.cost - 0.5 * (r * r).sum(), at.system.predicted(wide))
    return Tried(step, rho, found & (rho > ACCEPTED))


def acceleration(at: Here, fn: Any, p: Tensor, mu: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """Half the second-order correction of a step p, and whether it is too long."""
    f = residuals.on_vector(fn, at.flat)
    v = p.to(at.x.dtype)
    second = jvp(lambda x: jvp(f, (x,), (v,))[1], (at.x,), (v,))[1]
    g = vjp(f, at.x)[1](second)[0].to(torch.float64)
    system = at.system._replace(r=second.to(torch.float64), g=g)
    a, found = linear.solve(at.kind, system, mu, D)
    return 0.5 * a, bent(p, a, D) | ~found


def scaled(scaling: Scaling | None, at: Here, before: Tensor) -> tuple[Tensor, Tensor]:
    """D for this step, and for the state."""
    if scaling is None:
        return torch.ones_like(at.diagonal), before
    kept = scales(at.diagonal, before)
    return floored(kept, at.system.r.shape[-1]), kept


def check_scaling(scaling: Any) -> None:
    """Raise ValueError for an unknown one."""
    if scaling not in ("jac", None):
        raise ValueError(f"unknown scaling {scaling!r}; choose 'jac' or None.")


def number(flat: Ravel, value: float) -> Tensor:
    """A scalar of a new state: 0-dim, float64; under vmap batched like the parameters."""
    return base.batched(torch.tensor(value, dtype=torch.float64, device=flat.device), flat.leaves)
