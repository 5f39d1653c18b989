"""Sharpness-aware minimization: gradients from uphill of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.core import base
from functional_optim.core.chain import Wrapped
from functional_optim.core.factory import factory
from functional_optim.core.scalars import sum_parts

LEAST = 1e-12
"""Added to a norm before dividing, as in https://github.com/davda54/sam."""


class SamState(NamedTuple):
    """step: 0-dim int64, finished steps. inner: the state of the transformation inside."""

    step: Tensor
    inner: Any


@factory
def sam(tx: base.GradientTransformation, rho: numeric.Hyper = 0.05) -> base.GradientTransformation:
    """Step with the gradients at the point uphill of the parameters, at a distance of rho.

    `update` takes a function that returns the gradients at any parameters::

        updates, state = tx.update(grads, state, params, grad_fn=grad_fn)

    It is called once, at params + rho · g / ‖g‖, with the norm of the whole tree. `grads` are the
    gradients at params, of the same batch. An optimizer object takes a closure instead: `SAM`.

    Args:
        tx: what steps, with these gradients and the parameters as they are.
        rho: the distance, ≥ 0: a number, a 0-dim tensor, or a schedule. Default 0.05, the authors'.

    State: `step`, and that of tx as `inner`.

    Raises:
        TypeError: if tx is no transformation; from update, without `grad_fn`.
        ValueError: if rho is a negative number; from update, without parameters.

    Paper: Foret, Kleiner, Mobahi, Neyshabur, "Sharpness-Aware Minimization for Efficiently
    Improving Generalization", https://arxiv.org/abs/2010.01412, Algorithm 1.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.sam(fo.sgd(0.1), rho=1.0)
        >>> grad_fn = lambda w: 2 * w  # of f(w) = w · w
        >>> w = torch.tensor([3.0, 4.0])
        >>> updates, state = tx.update(grad_fn(w), tx.init(w), w, grad_fn=grad_fn)
        >>> updates  # −0.1 · 2 · 6/5 of w
        tensor([-0.7200, -0.9600])
    """
    return _uphill("sam", tx, rho, plain)


@factory
def asam(tx: base.GradientTransformation, rho: numeric.Hyper = 0.5) -> base.GradientTransformation:
    """`sam` with a distance that is relative to each weight: params + rho · p² g / ‖p g‖.

    Weights of any scale so are moved alike. `update` takes `grad_fn`, as for `sam`.

    Args:
        tx: what steps, with these gradients and the parameters as they are.
        rho: the distance, ≥ 0: a number, a 0-dim tensor, or a schedule. Default 0.5, the paper's
            for CIFAR-10. (The paper adds 0.01 to each |p|, which is left out here.)

    State: `step`, and that of tx as `inner`.

    Raises:
        TypeError: if tx is no transformation; from update, without `grad_fn`.
        ValueError: if rho is a negative number; from update, without parameters.

    Paper: Kwon, Kim, Park, Choi, "ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant
    Learning of Deep Neural Networks", https://arxiv.org/abs/2102.11600.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.asam(fo.sgd(0.1))
        >>> grad_fn = lambda w: 2 * w
        >>> w = torch.tensor([2.0])
        >>> tx.update(grad_fn(w), tx.init(w), w, grad_fn=grad_fn)[0]
        tensor([-0.6000])
    """
    return _uphill("asam", tx, rho, relative)


def plain(g: Tensor, p: Tensor) -> Tensor:
    """The gradient as `sam` measures it."""
    return g


def relative(g: Tensor, p: Tensor) -> Tensor:
    """The gradient as `asam` measures it."""
    return p.abs() * g


def climb(grads: Any, params: Any, rho: Any, measured: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """The way uphill, a tree like params; None where there is no gradient.

    measured: turns a gradient into what is measured, and that into the direction.
    """
    pairs = tree.rows(params, grads)
    parts = [(_square(measured(g, p)),) for p, g in pairs if g is not None]
    if not parts:
        return grads
    (square,) = sum_parts(parts)
    null = square == 0  # the gradient of the root is infinite there
    length = numeric.where(null, 0.0, rho / (numeric.where(null, 1.0, square).sqrt() + LEAST))

    def way(p: Tensor, g: Any) -> Any:
        return None if g is None else length * measured(measured(g, p), p)

    return tree.map(way, params, grads)


def check_rho(who: str, rho: numeric.Hyper) -> None:
    """Raise ValueError for a negative distance."""
    numeric.check(lambda x: x >= 0.0, rho, f"{who} needs a rho of 0 or more, but got {{}}.")


def _square(x: Tensor) -> Tensor:
    return x.abs().square().sum()


def _uphill(
    who: str,
    tx: base.GradientTransformation,
    rho: numeric.Hyper,
    measured: Callable[[Tensor, Tensor], Tensor],
) -> base.GradientTransformation:
    base.check_transformation(who, tx, f"{who}(sgd(0.1))")
    check_rho(who, rho)
    known = tx.extra

    def init(params: Any) -> SamState:
        return SamState(base.first_step(tree.leaves(params)), tx.init(params))

    def update(
        grads: Any, state: SamState, params: Any = None, *, grad_fn: Any, **extra: Any
    ) -> tuple[Any, SamState]:
        base.check_extra(extra, known)
        if params is None:
            raise ValueError("update needs the parameters: call update(grads, state, params).")
        base.check_grads(params, grads)
        now = numeric.at(rho, (state.step + 1).to(torch.float64))
        found = grad_fn(base.apply_updates(params, climb(grads, params, now, measured)))
        there = tree.map(lambda _, g, x: None if g is None else x, params, grads, found)
        updates, inner = tx.update(there, state.inner, params, **extra)
        return updates, SamState(state.step + 1, inner)

    return Wrapped(init, update, tx)
