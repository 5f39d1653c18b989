"""Multiplication of updates by scalars."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core.calls import check_flags, check_step_function
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, identity, leafwise
from functional_optim.core.rule import times
from functional_optim.core.scalars import given


@factory
def scale(factor: numeric.Hyper) -> Leafwise:
    """Multiply every update by `factor`.

    Args:
        factor: a number, a 0-dim tensor, or a schedule. The Python number 1 makes this `identity`.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale(-0.5)
        >>> w = torch.ones(2)
        >>> tx.update(torch.tensor([2.0, 4.0]), tx.init(w), w)[0]
        tensor([-1., -2.])
    """
    if numeric.equals(factor, 1):
        return identity()
    return leafwise(None, times, given, hyper={"factor": factor}, name="scale")


def signed(maximize: bool) -> Leafwise:
    """Gradients, negated if `maximize`.

    Raises:
        TypeError: if maximize is neither True nor False.
    """
    check_flags({"maximize": "bool"}, {"maximize": maximize})
    return scale(-1 if maximize else 1)


@factory
def scale_by_lr(lr: numeric.Hyper) -> Leafwise:
    """Multiply every update by −lr: the last transform of a descent method.

    Args:
        lr: learning rate, ≥ 0: a number, a 0-dim tensor (one compiled graph for all its values,
            and a meta-gradient), or a schedule from the number of finished steps.

    Raises:
        ValueError: if lr is a negative number, or a tensor of more than one element.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_lr(fo.schedules.linear(1.0, 0.0, 4))
        >>> w = torch.ones(1)
        >>> u, state = tx.update(torch.ones(1), tx.init(w), w)
        >>> u, tx.update(torch.ones(1), state, w)[0]
        (tensor([-1.]), tensor([-0.7500]))
    """
    check_lr(lr)

    def scalars(t, *, lr):
        return (-lr,)

    return leafwise(None, times, scalars, hyper={"lr": lr}, name="scale_by_lr")


@factory
def scale_by_schedule(schedule: numeric.Schedule) -> Leafwise:
    """Multiply every update by `schedule(count)`, count = 0 at the first step.

    Args:
        schedule: a function of the number of finished steps, see `functional_optim.schedules`.

    Raises:
        TypeError: if `schedule` is not callable.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_schedule(lambda count: 1 / (1 + count))
        >>> w = torch.ones(1)
        >>> u, state = tx.update(torch.ones(1), tx.init(w), w)
        >>> tx.update(torch.ones(1), state, w)[0]
        tensor([0.5000])
    """
    if not callable(schedule):
        raise TypeError(
            f"scale_by_schedule takes a function of the step count, but got {schedule!r}; "
            "use scale for a number."
        )
    check_step_function("scale_by_schedule", "schedule", schedule)
    return leafwise(None, times, given, hyper={"factor": schedule}, name="scale_by_schedule")


@factory
def apply_delta(lr: numeric.Hyper = 1.0) -> Leafwise:
    """Use the input as the step itself: multiply by +lr.

    For local rules, which compute a step without a loss: Hebb's, Oja's, feedback alignment. The
    step is added, `params + lr · delta`; a gradient would be subtracted. Put clipping, momentum and
    noise before it in a chain.

    Args:
        lr: learning rate, ≥ 0: a number, a 0-dim tensor, or a schedule. Default 1: the step itself.

    Raises:
        ValueError: if lr is a negative number, or a tensor of more than one element. For an
            anti-Hebbian rule negate the step, e.g. with `scale(-1)`.

    Oja's rule, which turns to the first principal component, is from "A simplified neuron model as
    a principal component analyzer" (1982), https://doi.org/10.1007/BF00275687.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.clip_by_global_norm(1.0), fo.apply_delta(0.1))
        >>> w = torch.tensor([0.1, 0.1])
        >>> state = tx.init(w)
        >>> for i in range(200):
        ...     x = torch.tensor([2.0, 0.0]) if i % 2 else torch.tensor([0.0, 0.5])
        ...     y = w @ x
        ...     updates, state = tx.update(y * (x - y * w), state, w)
        ...     w = fo.apply_updates(w, updates)
        >>> w.round(decimals=2)
        tensor([1., 0.])
    """
    check_lr(lr)

    return leafwise(None, times, given, hyper={"lr": lr}, name="apply_delta")


@factory
def set_to_zero() -> Leafwise:
    """Make every update zero, even NaN; parameters stay unchanged.

    Leaves in a chain with it are still measured and have state; use `freeze` to exclude them.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.set_to_zero()
        >>> w = torch.ones(2)
        >>> tx.update(torch.tensor([torch.nan, 3.0]), tx.init(w), w)[0]
        tensor([0., 0.])
    """
    return leafwise(None, _nothing, name="set_to_zero")


def _nothing(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor, Any]:
    return torch.zeros_like(u), slots


def after_the_first() -> Leafwise:
    """Multiply every update by 0 in the first step; later updates pass unchanged."""
    return leafwise(None, times, _after_the_first, name="after_the_first")


def _after_the_first(t: Any) -> tuple[Any]:
    return (numeric.where(t == 1, 0.0, 1.0),)


def check_lr(lr: numeric.Hyper, says: str = "Invalid learning rate: {}") -> None:
    """Raise torch's errors for a bad learning rate."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(
            f"Tensor lr must be 1-element, but it has shape {tuple(lr.shape)}; for several rates "
            "at once map over update with torch.vmap, or use partition."
        )
    numeric.check(lambda x: x >= 0.0, lr, says)
