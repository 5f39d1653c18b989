"""Cautious updates: only where update and gradient agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.core import base
from functional_optim.core.chain import Wrapped, check_moved
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.rule import Placement
from functional_optim.core.scalars import given
from functional_optim.core.sparse import needs_all_rows
from functional_optim.core.storage import as_real, as_update, compute_dtype

KEEPING = ("apply_delta", "scale_by_adafactor", "scale_by_laprop", "scale_by_rprop")
"""Rules with a learning rate that multiply by it without a minus sign."""


@factory
def cautious(
    tx: base.GradientTransformation, eps: numeric.Hyper = 1e-3
) -> base.GradientTransformation:
    """Zero the elements of a direction whose sign differs from the sign of the gradient.

    The other elements of a tensor are divided by their share. It has no state; if tx consists of
    one-tensor rules, the result does.

    Args:
        tx: a transformation without a learning rate: it must keep the gradient's sign, so put it
            before `scale_by_lr`.
        eps: lower bound of the share, in (0, 1]: a number, a 0-dim tensor, or a schedule. Default
            1e-3, that of the authors' code. The paper divides by (count + 1) / size instead.

    A complex element counts as two real elements.

    State: that of tx.

    Raises:
        ValueError: if eps is a number outside (0, 1], or tx has a learning rate, or multiplies by a
            negative number by `scale`, is a method that returns complete steps, such as `lbfgs`, or
            has `master_weights` next to a transformation of trees.
        TypeError: if tx is not a transformation.

    Paper: Liang, Chen, Liu, Liu, "Cautious Optimizers: Improving Training with One Line of Code",
    https://arxiv.org/abs/2411.16085, Algorithm 1; https://github.com/kyleliang919/C-Optim.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.cautious(fo.trace(0.9)), fo.scale_by_lr(1.0))
        >>> w = torch.zeros(2)
        >>> u, state = tx.update(torch.tensor([1.0, 1.0]), tx.init(w), w)
        >>> tx.update(torch.tensor([1.0, -0.5]), state, w)[0]  # momentum 1.9 and 0.4
        tensor([-3.8000, -0.0000])
    """
    numeric.check_range("cautious", "in (0, 1]", eps=eps)
    base.check_transformation("cautious", tx, "cautious(scale_by_adam())")
    rules = [x.rule for x in tx.placements if x.rule.name not in KEEPING]
    if any(name == "lr" for rule in rules for name, _ in rule.hyper):
        raise ValueError(
            "cautious compares signs, which a learning rate reverses; put it around the "
            "transforms before it, e.g. chain(cautious(scale_by_adam()), scale_by_lr(1e-3))."
        )
    if _reverses(tx.placements):
        raise ValueError(
            "cautious compares signs, which scale reverses by a negative number; put it around the "
            "transforms before it, e.g. chain(cautious(scale_by_adam()), scale(-1e-3))."
        )
    if not tx.reads_gradients or "value_and_grad" in tx.required:
        raise ValueError(
            "cautious compares directions with gradients, but a method such as lbfgs or "
            "levenberg_marquardt returns a complete step; leave cautious out."
        )
    if not isinstance(tx, Leafwise):
        return _around(tx, eps)
    hyper = {"eps": eps}
    (last,) = leafwise(None, agreeing, given, hyper=hyper, name="cautious").placements
    return Leafwise((*tx.placements, last._replace(lookback=len(tx.placements))))


def _reverses(placements: Sequence[Placement]) -> bool:
    """Whether the rules of some leaves multiply by an odd number of negative numbers."""
    found = [
        x.where
        for x in placements
        for _, factor in x.rule.hyper
        if x.rule.name == "scale" and type(factor) in (int, float) and factor < 0
    ]
    return any(sum(where in ((), own) for where in found) % 2 for own in found)


def agreeing(u: Tensor, slots: Any, p: Any, g: Tensor, eps: Any) -> tuple[Tensor, Any]:
    """The part of u that has the sign of g, scaled up."""
    mask = (u * g > 0).to(u.dtype)
    return u * (mask * mask.mean().clamp(min=eps).reciprocal()), slots


class CautiousState(NamedTuple):
    """The state of a custom transformation of trees, and a count for the schedule of `eps`."""

    step: Tensor
    inner: Any


def _around(tx: base.GradientTransformation, eps: numeric.Hyper) -> base.GradientTransformation:
    """The same for a custom transformation of trees."""
    if any(x.rule.storage.weight_codec is not None for x in tx.placements):
        raise ValueError(
            "cautious changes updates that master_weights has rounded for the parameters; put "
            "cautious around what comes before master_weights, or leave it out."
        )
    known = tx.extra

    def init(params: Any) -> CautiousState:
        return CautiousState(base.first_step(tree.leaves(params)), tx.init(params))

    def update(
        grads: Any, state: CautiousState, params: Any = None, **extra: Any
    ) -> tuple[Any, CautiousState]:
        base.check_extra(extra, known)
        least = numeric.at(eps, (state.step + 1).to(torch.float64))
        updates, inner = tx.update(grads, state.inner, params, **extra)
        check_moved(grads, updates)

        def leaf(g: Tensor, u: Any) -> Any:
            if u is None:
                return None
            if g.layout is torch.sparse_coo:
                raise needs_all_rows("cautious")
            dtype = compute_dtype(g)
            kept, _ = agreeing(as_real(u, dtype), (), None, as_real(g, dtype), least)
            return as_update(kept, g)

        return tree.map(leaf, grads, updates), CautiousState(state.step + 1, inner)

    return Wrapped(init, update, tx)
