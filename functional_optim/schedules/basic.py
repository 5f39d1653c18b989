"""Schedules of one formula."""

from __future__ import annotations

from typing import Any

from functional_optim import numeric
from functional_optim.core.factory import factory
from functional_optim.numeric import Number, Schedule
from functional_optim.schedules.formula import half_cosine, of_step, share


@factory
def constant(value: Number) -> Schedule:
    """The same value at every step.

    Args:
        value: any number or 0-dim tensor.

    Example::

        >>> import functional_optim as fo
        >>> fo.schedules.constant(0.1)(1000)
        0.1
    """
    return of_step(lambda n, value: value, value)


@factory
def linear(
    init_value: Number, end_value: Number, transition_steps: Number, transition_begin: Number = 0
) -> Schedule:
    """A straight line from init_value to end_value, constant before and after.

    Args:
        init_value: value up to step `transition_begin`.
        end_value: value from step `transition_begin + transition_steps` on.
        transition_steps: length of the line in steps, ≥ 1.
        transition_begin: steps before the line starts, ≥ 0.

    Raises:
        ValueError: if a number of steps is out of range.

    Example::

        >>> import functional_optim as fo
        >>> fo.schedules.linear(1.0, 0.0, 10)(5)
        0.5
    """
    numeric.check_least("linear", 1, transition_steps=transition_steps)
    numeric.check_least("linear", 0, transition_begin=transition_begin)

    def formula(n, init, end, steps, begin):
        return numeric.lerp(init, end, share(n - begin, steps))

    return of_step(formula, init_value, end_value, transition_steps, transition_begin)


@factory
def polynomial(
    init_value: Number,
    end_value: Number,
    power: Number,
    transition_steps: Number,
    transition_begin: Number = 0,
) -> Schedule:
    """From init_value to end_value; the remaining difference decreases as (1 − x)^power.

    Args:
        init_value: value up to step `transition_begin`.
        end_value: value from step `transition_begin + transition_steps` on.
        power: > 0. 1 is a straight line; above 1 it starts steep and ends flat.
        transition_steps: length of the transition in steps, ≥ 1.
        transition_begin: steps before it starts, ≥ 0.

    Raises:
        ValueError: if the power or a number of steps is out of range.

    Example::

        >>> import functional_optim as fo
        >>> fo.schedules.polynomial(1.0, 0.0, power=2, transition_steps=10)(5)
        0.25
    """
    numeric.check_range("polynomial", "positive", power=power)
    numeric.check_least("polynomial", 1, transition_steps=transition_steps)
    numeric.check_least("polynomial", 0, transition_begin=transition_begin)

    def formula(n, init, end, power, steps, begin):
        left = numeric.power(1 - share(n - begin, steps), power)
        return numeric.lerp(end, init, left)

    return of_step(formula, init_value, end_value, power, transition_steps, transition_begin)


@factory
def cosine_decay(
    init_value: Number, decay_steps: Number, alpha: Number = 0.0, exponent: Number = 1.0
) -> Schedule:
    """Half a cosine from init_value down to `alpha * init_value`, constant afterwards.

    `cosine` is an alias.

    Args:
        init_value: value at step 0.
        decay_steps: length of the decay in steps, ≥ 1.
        alpha: the last value as a fraction of the first. 0 by default, as in optax.
        exponent: power of the half cosine, > 0. Above 1 it decreases earlier. 1 by default.

    Raises:
        ValueError: if decay_steps is below 1, or the exponent not positive.

    Paper: Loshchilov, Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts",
    https://arxiv.org/abs/1608.03983, equation 5.

    Example::

        >>> import functional_optim as fo
        >>> schedule = fo.schedules.cosine_decay(1.0, 10)
        >>> schedule(0), schedule(5), schedule(10)
        (1.0, 0.5, 0.0)
    """
    numeric.check_least("cosine_decay", 1, decay_steps=decay_steps)
    numeric.check_range("cosine_decay", "positive", exponent=exponent)

    def formula(n, init, steps, alpha, exponent):
        return init * numeric.lerp(alpha, 1.0, cosine_left(n, steps, exponent))

    return of_step(formula, init_value, decay_steps, alpha, exponent)


def cosine_left(n: Any, steps: Any, exponent: Any) -> Any:
    """The remaining fraction of a decay after n steps, from 1 to 0."""
    return numeric.power(half_cosine(share(n, steps)), exponent)


@factory
def exponential_decay(
    init_value: Number,
    transition_steps: Number,
    decay_rate: Number,
    transition_begin: Number = 0,
    staircase: bool = False,
    end_value: Number | None = None,
) -> Schedule:
    """Multiply by decay_rate every transition_steps steps, evenly or all at once.

    Args:
        init_value: value up to step `transition_begin`.
        transition_steps: number of steps for a factor of `decay_rate`, ≥ 1.
        decay_rate: factor, > 0.
        transition_begin: steps before it starts, ≥ 0.
        staircase: multiply at the end of each `transition_steps` steps; otherwise evenly.
        end_value: a lower bound if the rate is below 1, else an upper one. None: no bound.

    Raises:
        ValueError: if the rate or a number of steps is out of range.

    Example::

        >>> import functional_optim as fo
        >>> schedule = fo.schedules.exponential_decay(1.0, transition_steps=10, decay_rate=0.25)
        >>> schedule(0), schedule(5), schedule(20)
        (1.0, 0.5, 0.0625)
    """
    numeric.check_least("exponential_decay", 1, transition_steps=transition_steps)
    numeric.check_least("exponential_decay", 0, transition_begin=transition_begin)
    numeric.check_range("exponential_decay", "positive", decay_rate=decay_rate)

    def formula(n, init, steps, rate, begin, *bound):
        times = numeric.maximum(n - begin, 0.0) / steps
        value = init * numeric.power(rate, numeric.floor(times) if staircase else times)
        for end in bound:
            low, high = numeric.maximum(value, end), numeric.minimum(value, end)
            value = numeric.where(rate < 1, low, high)
        return value

    bound = () if end_value is None else (end_value,)
    return of_step(formula, init_value, transition_steps, decay_rate, transition_begin, *bound)
