"""Schedules: pure functions from the number of finished steps to a number.

Each works on a Python number or a 0-dim tensor, so it can be called from a training loop, inside a
compiled step, or under vmap. Values are computed in float64. Pass one wherever a hyperparameter is
asked for.
"""

from __future__ import annotations

import math
from typing import Any

from functional_optim import numeric
from functional_optim.numeric import Number, Schedule


def constant(value: Number) -> Schedule:
    """The same value at every step.

    Args:
        value: any number or 0-dim tensor.

    Example::

        >>> import functional_optim as fo
        >>> fo.schedules.constant(0.1)(1000)
        0.1
    """

    def schedule(count: Any) -> Any:
        return numeric.float64(value)

    return schedule


def linear(
    init_value: Number, end_value: Number, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """A straight line from init_value to end_value, constant before and after.

    Args:
        init_value: value up to step `transition_begin`.
        end_value: value from step `transition_begin + transition_steps` on.
        transition_steps: length of the line in steps, ≥ 1.
        transition_begin: steps before the line starts.

    Raises:
        ValueError: if transition_steps is below 1.

    Example::

        >>> import functional_optim as fo
        >>> fo.schedules.linear(1.0, 0.0, 10)(5)
        0.5
    """
    _check_steps("linear", "transition_steps", transition_steps)

    def schedule(count: Any) -> Any:
        x = numeric.clip((count - transition_begin) / transition_steps, 0.0, 1.0)
        return init_value + x * (end_value - init_value)

    return schedule


def cosine(init_value: Number, decay_steps: int, alpha: Number = 0.0) -> Schedule:
    """Half a cosine from init_value down to `alpha * init_value`, constant afterwards.

    Args:
        init_value: value at step 0.
        decay_steps: length of the descent in steps, ≥ 1.
        alpha: the last value as a fraction of the first. 0 by default, as in optax.

    Raises:
        ValueError: if decay_steps is below 1.

    Paper: Loshchilov, Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts",
    https://arxiv.org/abs/1608.03983, equation 5.

    Example::

        >>> import functional_optim as fo
        >>> fo.schedules.cosine(1.0, 10)(10)
        0.0
    """
    _check_steps("cosine", "decay_steps", decay_steps)

    def schedule(count: Any) -> Any:
        x = numeric.clip(count / decay_steps, 0.0, 1.0)
        fall = 0.5 * (1 + numeric.cos(math.pi * x))
        return init_value * (alpha + (1 - alpha) * fall)

    return schedule


def warmup_cosine(
    init_value: Number,
    peak_value: Number,
    warmup_steps: int,
    decay_steps: int,
    end_value: Number = 0.0,
) -> Schedule:
    """A line from init_value up to peak_value, then half a cosine down to end_value.

    Args:
        init_value: value at step 0.
        peak_value: value at step `warmup_steps`.
        warmup_steps: length of the line in steps, ≥ 0.
        decay_steps: length of line and cosine together, > warmup_steps.
        end_value: value from step `decay_steps` on.

    Raises:
        ValueError: if decay_steps is not larger than warmup_steps, or warmup_steps is negative.

    Example::

        >>> import functional_optim as fo
        >>> schedule = fo.schedules.warmup_cosine(0.0, 1.0, 10, 110)
        >>> schedule(5), schedule(10), schedule(60), schedule(110)
        (0.5, 1.0, 0.5, 0.0)
    """
    if not 0 <= warmup_steps < decay_steps:
        raise ValueError(
            "warmup_cosine needs 0 <= warmup_steps < decay_steps (which counts the warmup in), but "
            f"got warmup_steps={warmup_steps}, decay_steps={decay_steps}."
        )
    fall = cosine(1.0, decay_steps - warmup_steps)
    rise = linear(init_value, peak_value, max(warmup_steps, 1))

    def schedule(count: Any) -> Any:
        down = end_value + (peak_value - end_value) * fall(count - warmup_steps)
        return numeric.where(count < warmup_steps, rise(count), down)

    return schedule


def _check_steps(name: str, argument: str, steps: int) -> None:
    if steps < 1:
        raise ValueError(f"{name} needs {argument} of at least 1, but got {steps}.")
