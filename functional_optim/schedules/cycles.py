"""Schedules of one or several cycles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from functional_optim import numeric
from functional_optim.core.factory import factory
from functional_optim.numeric import Number, Schedule
from functional_optim.schedules.formula import WAYS, of_step
from functional_optim.schedules.pieces import between, join
from functional_optim.schedules.warm import warmup_cosine_decay


@factory
def linear_onecycle(
    transition_steps: Number,
    peak_value: Number,
    pct_start: Number = 0.3,
    pct_final: Number = 0.85,
    div_factor: Number = 25.0,
    final_div_factor: Number = 1e4,
) -> Schedule:
    """Linear: up to peak_value, back down, and further down to almost zero.

    Args:
        transition_steps: length of the cycle in steps, ≥ 1.
        peak_value: the largest value.
        pct_start: fraction of the cycle that increases, in [0, 1]. Default 0.3, optax's and
            torch's.
        pct_final: fraction of the cycle at which the second line ends, in [pct_start, 1]. Default
            0.85, optax's.
        div_factor: peak_value over the first value, > 0. Default 25, optax's and torch's.
        final_div_factor: the first value over the last one, > 0. Default 1e4, optax's and torch's.

        Lines end at integer steps: `pct * transition_steps` is rounded down.

    Raises:
        ValueError: for a number out of range.

    Paper: Smith, Topin, "Super-Convergence: Very Fast Training of Neural Networks Using Large
    Learning Rates", https://arxiv.org/abs/1708.07120.

    Example::

        >>> import functional_optim as fo
        >>> schedule = fo.schedules.linear_onecycle(100, 1.0, div_factor=4.0)
        >>> schedule(0), schedule(30), schedule(85), schedule(100)
        (0.25, 1.0, 0.25, 2.5e-05)
    """
    name = "linear_onecycle"
    _check_cycle(name, transition_steps, div_factor, final_div_factor)
    pair = (pct_start, pct_final)
    if all(map(numeric.is_static, pair)) and not 0 <= pct_start <= pct_final <= 1:
        raise ValueError(
            f"{name} needs 0 <= pct_start <= pct_final <= 1, but got pct_start={pct_start}, "
            f"pct_final={pct_final}."
        )

    def formula(n, steps, peak, start, final, div, final_div):
        ends = (numeric.floor(start * steps), numeric.floor(final * steps), steps)
        low = peak / div
        return between(n, WAYS["linear"], ends, (low, peak, low, low / final_div))

    numbers = (transition_steps, peak_value, pct_start, pct_final, div_factor, final_div_factor)
    return of_step(formula, *numbers)


@factory
def cosine_onecycle(
    transition_steps: Number,
    peak_value: Number,
    pct_start: Number = 0.3,
    div_factor: Number = 25.0,
    final_div_factor: Number = 1e4,
) -> Schedule:
    """Two half cosines: up to peak_value, and down to almost zero.

    Args:
        transition_steps: length of the cycle in steps, ≥ 1.
        peak_value: the largest value.
        pct_start: fraction of the cycle that increases, in [0, 1]; its end is rounded down to an
            integer step. Default 0.3, optax's and torch's.
        div_factor: peak_value over the first value, > 0. Default 25, optax's and torch's.
        final_div_factor: the first value over the last one, > 0. Default 1e4, optax's and torch's.

    Raises:
        ValueError: for a number out of range.

    Paper: Smith, Topin, "Super-Convergence: Very Fast Training of Neural Networks Using Large
    Learning Rates", https://arxiv.org/abs/1708.07120.

    Example::

        >>> import functional_optim as fo
        >>> schedule = fo.schedules.cosine_onecycle(100, 1.0, div_factor=4.0)
        >>> schedule(0), schedule(30), schedule(100)
        (0.25, 1.0, 2.5e-05)
    """
    name = "cosine_onecycle"
    _check_cycle(name, transition_steps, div_factor, final_div_factor)
    numeric.check_range(name, "in [0, 1]", pct_start=pct_start)

    def formula(n, steps, peak, start, div, final_div):
        ends = (numeric.floor(start * steps), steps)
        low = peak / div
        return between(n, WAYS["cosine"], ends, (low, peak, low / final_div))

    return of_step(formula, transition_steps, peak_value, pct_start, div_factor, final_div_factor)


@factory
def sgdr(cosine_kwargs: Iterable[Mapping[str, Number]]) -> Schedule:
    """Stochastic gradient descent with warm restarts: several cosines, one after the other.

    Args:
        cosine_kwargs: the arguments of `warmup_cosine_decay` for each cycle. Its `decay_steps` is
            the length of the cycle, its warm-up included. The last cycle stays at its final value.

    Raises:
        TypeError: if a cycle lacks an argument, or has an unknown one.
        ValueError: if there is no cycle, or a number of steps is out of range.

    Paper: Loshchilov, Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts",
    https://arxiv.org/abs/1608.03983.

    Example::

        >>> import functional_optim as fo
        >>> cycle = {"init_value": 0.0, "peak_value": 1.0, "warmup_steps": 2, "decay_steps": 10}
        >>> schedule = fo.schedules.sgdr([cycle, {**cycle, "peak_value": 0.5}])
        >>> schedule(2), schedule(6), schedule(12), schedule(20)
        (1.0, 0.5, 0.5, 0.0)
    """
    cycles = list(cosine_kwargs) if isinstance(cosine_kwargs, Iterable) else [cosine_kwargs]
    if isinstance(cosine_kwargs, Mapping) or any(not isinstance(x, Mapping) for x in cycles):
        raise TypeError(
            f"sgdr takes a list of dicts, one for each cycle, but got {cosine_kwargs!r}; pass e.g. "
            "[dict(init_value=0.0, peak_value=1.0, warmup_steps=2, decay_steps=10)]."
        )
    if not cycles:
        raise ValueError("sgdr needs at least one cycle, but got none.")
    parts = [warmup_cosine_decay(**kwargs) for kwargs in cycles]
    ends = list(accumulate(kwargs["decay_steps"] for kwargs in cycles))
    return join(parts, ends[:-1])


def _check_cycle(name: str, steps: Number, div_factor: Number, final_div_factor: Number) -> None:
    numeric.check_least(name, 1, transition_steps=steps)
    numeric.check_range(name, "positive", div_factor=div_factor, final_div_factor=final_div_factor)
