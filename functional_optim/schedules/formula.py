"""Schedules from formulas, and checks that schedules share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from functional_optim import numeric
from functional_optim.core.calls import check_step_function
from functional_optim.core.factory import factory
from functional_optim.numeric import Number, Schedule


@factory
def of_step(formula: Callable[..., Any], *numbers: Number) -> Schedule:
    """The schedule `formula(n, *numbers)`, n finished steps, all in float64.

    It returns a tensor if the count or one of the numbers is a tensor, else a Python float.
    """

    def schedule(count: Any) -> Any:
        if isinstance(count, Tensor) and count.numel() != 1:
            raise ValueError(
                "a schedule takes one number of steps, but got a tensor of shape "
                f"{tuple(count.shape)}; use torch.vmap(schedule) for many at once."
            )
        n = numeric.float64(count)
        return numeric.like(formula(n, *[numeric.float64(x) for x in numbers]), n)

    return schedule


def called(schedule: Schedule, n: Any) -> Any:
    """The number that a schedule returns; raises NotANumber for anything else."""
    return numeric.at(lambda _: schedule(n), 1)


def share(n: Any, steps: Any) -> Any:
    """n as a fraction of `steps`, clamped to [0, 1]."""
    return numeric.clip(n / numeric.where(steps > 0, steps, 1.0), 0.0, 1.0)


def half_cosine(x: Any) -> Any:
    """From 1 at x = 0 down to 0 at x = 1, flat at both ends."""
    return 0.5 * (1 + numeric.cos(math.pi * x))


WAYS: dict[str, Callable[[Any], Any]] = {
    "linear": lambda x: x,
    "cosine": lambda x: 1 - half_cosine(x),
    "1-sqrt": numeric.sqrt,
}
"""Transitions from 0 to 1. For the last one, the remaining distance is 1 − √x."""


def check_schedule(name: str, schedule: Any) -> None:
    """Raise TypeError unless it is callable."""
    if not callable(schedule):
        raise TypeError(
            f"{name} takes schedules, functions of the step count, but got {schedule!r}; use "
            "constant for a number."
        )
    check_step_function(name, "schedule", schedule)
