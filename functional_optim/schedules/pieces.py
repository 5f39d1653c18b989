"""Schedules of several pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

from functional_optim import numeric
from functional_optim.core.calls import check_choice
from functional_optim.core.factory import factory
from functional_optim.numeric import Number, Schedule
from functional_optim.schedules.formula import WAYS, called, check_schedule, of_step


@factory
def join(schedules: Iterable[Schedule], boundaries: Iterable[Number]) -> Schedule:
    """One schedule after the other; each counts its steps from 0.

    Args:
        schedules: functions of the number of finished steps, at least one.
        boundaries: the steps at which the second, third, … starts, ≥ 0 and in order: one fewer
            than schedules.

    Raises:
        TypeError: if a schedule is not a function.
        ValueError: if the numbers of schedules and boundaries do not fit, or the boundaries are
            out of order.

    Example::

        >>> import functional_optim as fo
        >>> up, down = fo.schedules.linear(0.0, 1.0, 10), fo.schedules.linear(1.0, 0.0, 20)
        >>> schedule = fo.schedules.join([up, down], [10])
        >>> schedule(5), schedule(10), schedule(20)
        (0.5, 1.0, 0.5)
    """
    for name, x in (("schedules", schedules), ("boundaries", boundaries)):
        if not isinstance(x, Iterable) or isinstance(x, str):
            raise TypeError(f"join takes a list as {name}, but got {x!r}; pass one, even of one.")
    parts, starts = tuple(schedules), tuple(boundaries)
    if len(parts) != len(starts) + 1:
        raise ValueError(
            "join needs one boundary fewer than schedules, but got "
            f"{len(parts)} schedules and {len(starts)} boundaries."
        )
    for part in parts:
        check_schedule("join", part)
    for start in starts:
        if not hasattr(start, "__float__"):
            raise TypeError(f"join takes numbers of steps as boundaries, but got {start!r}.")
    known = [start for start in starts if numeric.is_static(start)]
    if known != sorted(known) or any(not start >= 0 for start in known):
        raise ValueError(f"join needs boundaries of at least 0 in rising order, but got {known}.")

    def formula(n, *starts):
        def part(i):
            return called(parts[i], numeric.maximum(n - starts[i - 1], 0.0) if i else n)

        if all(map(numeric.is_static, (n, *starts))):  # a table may end where its part does
            return part(sum(not n < start for start in starts))
        value = part(0)
        for i, start in enumerate(starts, 1):
            value = numeric.where(n < start, value, part(i))
        return value

    return of_step(formula, *starts)


@factory
def piecewise_constant(
    init_value: Number, boundaries_and_scales: Mapping[int, Number] | None = None
) -> Schedule:
    """Steps: the value is multiplied by a scale at each boundary.

    Args:
        init_value: value before the first boundary.
        boundaries_and_scales: from the step, ≥ 0, to the factor, ≥ 0, by which the value is
            multiplied from that step on. None: no boundaries.

    Raises:
        ValueError: if a boundary or a scale is negative.

    Example::

        >>> import functional_optim as fo
        >>> schedule = fo.schedules.piecewise_constant(1.0, {100: 0.5, 200: 0.1})
        >>> schedule(99), schedule(100), schedule(200)
        (1.0, 0.5, 0.05)
    """
    starts, scales = _sorted("piecewise_constant", boundaries_and_scales)

    def formula(n, init, *numbers):
        starts, scales = _halves(numbers)
        value = init
        for start, scale in zip(starts, scales, strict=True):
            value = numeric.where(n < start, value, value * scale)
        return value

    return of_step(formula, init_value, *starts, *scales)


@factory
def piecewise_interpolate(
    interpolate_type: str,
    init_value: Number,
    boundaries_and_scales: Mapping[int, Number] | None = None,
) -> Schedule:
    """The values of `piecewise_constant` at its boundaries, joined by lines or half cosines.

    Args:
        interpolate_type: "linear" or "cosine".
        init_value: value at step 0.
        boundaries_and_scales: from the step, ≥ 0, to the factor, ≥ 0, of the value at that boundary
            over the value at the previous one. None: no boundaries.

    Raises:
        ValueError: for an unknown type, or if a boundary or a scale is negative.

    Example::

        >>> import functional_optim as fo
        >>> schedule = fo.schedules.piecewise_interpolate("linear", 1.0, {10: 0.5, 20: 0.5})
        >>> schedule(5), schedule(10), schedule(15), schedule(20)
        (0.75, 0.5, 0.375, 0.25)
    """
    name = "piecewise_interpolate"
    check_choice(name, ("linear", "cosine"), interpolate_type=interpolate_type)
    ends, scales = _sorted(name, boundaries_and_scales)

    def formula(n, init, *numbers):
        ends, scales = _halves(numbers)
        return between(
            n, WAYS[interpolate_type], ends, tuple(accumulate(scales, mul, initial=init))
        )

    return of_step(formula, init_value, *ends, *scales)


def between(n: Any, shape: Callable[[Any], Any], ends: Sequence[Any], values: Sequence[Any]) -> Any:
    """The value at step n, interpolated between the values at the boundaries."""
    value = values[0]
    for (start, end), (a, b) in zip(pairwise((0.0, *ends)), pairwise(values), strict=True):
        length = numeric.where(end > start, end - start, 1.0)
        x = numeric.clip((n - start) / length, 0.0, 1.0)
        there = numeric.where(n < end, numeric.lerp(a, b, shape(x)), b)
        value = numeric.where(n < start, value, there)
    return value


def _halves(numbers: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    middle = len(numbers) // 2
    return numbers[:middle], numbers[middle:]


def _sorted(
    name: str, boundaries_and_scales: Mapping[int, Number] | None
) -> tuple[tuple[int, ...], tuple[Number, ...]]:
    """Boundaries in order, and their scales."""
    given = boundaries_and_scales or {}
    if not isinstance(given, Mapping) or any(isinstance(x, str) for x in given):
        raise TypeError(
            f"{name} takes a dict from boundaries, numbers of steps, to scales, e.g. {{100: 0.1}}, "
            f"but got {given!r}."
        )
    for boundary, scale in given.items():
        numeric.check_least(name, 0, boundaries=boundary, scales=scale)
    found = dict(sorted(given.items()))
    return tuple(found), tuple(found.values())
