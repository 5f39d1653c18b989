"""Constraints on parameters, and removal of NaNs from updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base
from functional_optim.core.calls import takes
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.rule import Runs
from functional_optim.kernels.callers import warn


class NanCarry(NamedTuple):
    nan_count: Any
    """Number of NaNs in the last updates."""
    total_nan_count: Any
    """Number of NaNs since the start."""


@factory
def zero_nans() -> Leafwise:
    """Replace every NaN by 0, and count them.

    Infinite elements stay. To skip the step instead, use `apply_if_finite`.

    State: `nan_count`, in the last updates, and `total_nan_count`, since the start: scalars, for
    all parameters together. optax stores a flag for each leaf.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.zero_nans()
        >>> w = torch.zeros(2)
        >>> u, state = tx.update(torch.tensor([1.0, float("nan")]), tx.init(w), w)
        >>> u, fo.get(state, "nan_count").item()
        (tensor([1., 0.]), 1.0)
    """

    def reduce(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor]:
        return (u.isnan().to(u.dtype).sum(),)

    def scalars(t, carry, total):
        return (), NanCarry(total[0], carry.total_nan_count + total[0])

    def update(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor, Any]:
        return u.masked_fill(u.isnan(), 0.0), slots

    carry, runs = NanCarry(0, 0), Runs(shared=True)
    return leafwise(None, update, scalars, reduce=reduce, carry=carry, runs=runs, name="zero_nans")


@factory
def keep_params_nonnegative() -> Leafwise:
    """Shorten updates so that no parameter becomes negative: p + u ≥ 0 in every element.

    Put it at the end of a chain, after `scale_by_lr`. A negative parameter becomes 0.

    Raises:
        TypeError: from init, for a complex parameter.
        ValueError: from `chain`, if a learning rate follows.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.sgd(1.0), fo.keep_params_nonnegative())
        >>> w = torch.tensor([1.0, 1.0])
        >>> tx.update(torch.tensor([3.0, 0.5]), tx.init(w), w)[0]
        tensor([-1.0000, -0.5000])
    """

    def update(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor, Any]:
        return torch.maximum(u, -p), slots

    init = base.real_only("keep_params_nonnegative")
    return leafwise(init, update, runs=Runs(after="lr"), name="keep_params_nonnegative")


@factory
def keep_params_in(
    projection: Callable[..., Tensor], *, elementwise: bool | None = None, **numbers: numeric.Hyper
) -> Leafwise:
    """Change updates so that each parameter tensor stays in a set: projected descent.

    The update becomes P(p + u) − p, with the projection P, up to the rounding of that difference;
    where P does not change p + u, u is unchanged. Put it at the end of a chain, after
    `scale_by_lr`.

    The set constrains single tensors: `l2_ball` bounds the norm of each. For a set of trees, apply
    the projection to the parameters: `params = fo.projections.l2_ball(params, scale=3.0)`.

    Args:
        projection: a function of one tensor and of `numbers` by name: one of `fo.projections`, or a
            custom function of tensor operations.
        elementwise: deprecated and ignored; the operations of the projection are recorded.
        numbers: its arguments: numbers, 0-dim tensors, or schedules.

    Raises:
        TypeError: if projection is not callable; from init, for a complex parameter.
        ValueError: from `chain`, if a learning rate follows.

    Paper: Bertsekas, "On the Goldstein-Levitin-Polyak gradient projection method",
    https://doi.org/10.1109/TAC.1976.1101194.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.sgd(1.0), fo.keep_params_in(fo.projections.l2_ball, scale=5.0))
        >>> w = torch.zeros(2)
        >>> u, state = tx.update(torch.tensor([-6.0, -8.0]), tx.init(w), w)
        >>> fo.apply_updates(w, u)
        tensor([3., 4.])
    """
    if not callable(projection):
        raise TypeError(
            f"keep_params_in takes a projection, but got {projection!r}; pass e.g. "
            "fo.projections.box, and its arguments by name."
        )
    if not takes(projection, None, **numbers):
        raise TypeError(
            f"the projection of keep_params_in is called with a tensor and the arguments "
            f"{', '.join(numbers) or 'none'}, but it takes others; pass them by name, e.g. "
            "keep_params_in(fo.projections.box, lower=0.0, upper=1.0)."
        )
    if elementwise is not None:
        warn(
            "keep_params_in(..., elementwise=...) is deprecated; leave it out.", DeprecationWarning
        )
    names = tuple(numbers)

    def scalars(t):
        return tuple([numeric.at(x, t) for x in numbers.values()])

    def update(u: Tensor, slots: Any, p: Tensor, *given: Any) -> tuple[Tensor, Any]:
        x = p + u
        y = projection(x, **dict(zip(names, given, strict=True)))
        if not isinstance(y, Tensor) or y.shape != x.shape:
            raise TypeError(
                f"the projection of keep_params_in returned {_named(y)} for a tensor of shape "
                f"{tuple(x.shape)}; return the nearest point, a tensor of this shape."
            )
        return torch.where(y == x, u, y - p), slots

    def _named(y: Any) -> str:
        return f"a tensor of shape {tuple(y.shape)}" if isinstance(y, Tensor) else repr(y)

    init = base.real_only("keep_params_in")
    return leafwise(
        init, update, scalars, hyper=numbers, runs=Runs(after="lr"), name="keep_params_in"
    )
