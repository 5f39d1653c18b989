"""Smaller steps when the loss stops decreasing."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.rule import Runs, times


class PlateauCarry(NamedTuple):
    scale: Any
    """Factor on the updates, 1 at first."""
    best_value: Any
    """The lowest value so far, infinite at first."""
    plateau_count: Any
    """Number of consecutive values without an improvement."""
    cooldown_count: Any
    """Number of remaining values of the cooldown."""
    avg_value: Any
    """Mean of the values since the last comparison."""
    count: Any
    """Number of these values."""


@factory
def reduce_on_plateau(
    factor: numeric.Hyper = 0.1,
    patience: numeric.Hyper = 10,
    rtol: numeric.Hyper = 1e-4,
    atol: numeric.Hyper = 0.0,
    cooldown: numeric.Hyper = 0,
    accumulation_size: numeric.Hyper = 1,
    min_scale: numeric.Hyper = 0.0,
) -> Leafwise:
    """Multiply updates by a scale that is reduced whenever a value has stopped decreasing.

    The value is an extra argument, a loss for instance::

        updates, state = tx.update(grads, state, params, value=loss)

    The value counts as an improvement if `value < best - (rtol * |best| + atol)`. This also holds
    below zero, where a factor on the best value would point the wrong way.

    Args:
        factor: factor of a reduction, in (0, 1). Default 0.1, optax's and torch's.
        patience: number of values without an improvement before a reduction, ≥ 1. Default 10,
            optax's. torch's ReduceLROnPlateau counts from 0: its patience is one less.
        rtol: relative threshold of an improvement, in [0, 1]. Default 1e-4, optax's and torch's.
        atol: absolute threshold, ≥ 0; it is added. Default 0.
        cooldown: number of values after a reduction that are not counted, ≥ 0.
        accumulation_size: number of values to average before a comparison, ≥ 1. Use more than 1 for
            the losses of single batches. Patience and cooldown count the means.
        min_scale: lower bound of the scale, in [0, 1].

        Hyperparameters may also be 0-dim tensors or schedules.

    Extra arguments of `update`: `value`, a number or a 0-dim tensor. No gradient flows through it.

    State: `scale`, `best_value`, `plateau_count`, `cooldown_count`, `avg_value` and `count`,
    scalars; `fo.get(state, "scale")` reads one. They have torch's default dtype, so in float32 the
    scale has an error of about 1e-8.

    Raises:
        ValueError: for hyperparameters out of range, or if rtol and atol are both 0.
        TypeError: from update, if the value is missing or has more than one element.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.scale_by_lr(1.0), fo.reduce_on_plateau(0.5, patience=2))
        >>> w = torch.zeros(1)
        >>> state = tx.init(w)
        >>> for loss in (-3.0, -3.0, -3.0):
        ...     u, state = tx.update(torch.ones(1), state, w, value=loss)
        >>> u, fo.get(state, "scale")
        (tensor([-0.5000]), tensor(0.5000))
    """
    numeric.check_range("reduce_on_plateau", "in (0, 1)", factor=factor)
    numeric.check_range("reduce_on_plateau", "in [0, 1]", rtol=rtol, min_scale=min_scale)
    count = accumulation_size
    numeric.check_least("reduce_on_plateau", 1, patience=patience, accumulation_size=count)
    numeric.check_least("reduce_on_plateau", 0, atol=atol, cooldown=cooldown)
    if numeric.is_zero(rtol) and numeric.is_zero(atol):
        raise ValueError(
            "reduce_on_plateau needs an rtol or an atol above 0: without one, noise counts as an "
            "improvement."
        )

    def scalars(
        t, carry, *, factor, patience, rtol, atol, cooldown, accumulation_size, min_scale, value
    ):
        count = carry.count + 1
        value = numeric.float64(value.detach() if isinstance(value, Tensor) else value)
        mean = carry.avg_value + (value - carry.avg_value) / count
        full = count >= accumulation_size

        best = carry.best_value
        margin = rtol * abs(best) + atol
        level = numeric.where(best < math.inf, best - margin, best)
        seen = numeric.rounded(mean)  # rounded like the stored best: equal is no improvement
        better = seen < level

        resting = carry.cooldown_count > 0
        bad = numeric.where(better, 0.0, carry.plateau_count + 1)
        bad = numeric.where(resting, 0.0, bad)
        reduces = bad >= patience
        less = numeric.maximum(carry.scale * factor, min_scale)
        rest = numeric.where(resting, carry.cooldown_count - 1, 0.0)
        judged = PlateauCarry(
            scale=numeric.where(reduces, less, carry.scale),
            best_value=numeric.where(better, seen, best),
            plateau_count=numeric.where(reduces, 0.0, bad),
            cooldown_count=numeric.where(reduces, cooldown, rest),
            avg_value=0.0,
            count=0.0,
        )
        waiting = carry._replace(avg_value=mean, count=count)
        pairs = zip(judged, waiting, strict=True)
        new = PlateauCarry(*[numeric.where(full, a, b) for a, b in pairs])
        return (new.scale,), new

    carry = PlateauCarry(1.0, math.inf, 0, 0, 0.0, 0)
    hyper = {"factor": factor, "patience": patience, "rtol": rtol, "atol": atol}
    hyper |= {"cooldown": cooldown, "accumulation_size": count, "min_scale": min_scale}
    name, runs = "reduce_on_plateau", Runs(shared=True)
    return leafwise(None, times, scalars, carry=carry, hyper=hyper, runs=runs, name=name)
