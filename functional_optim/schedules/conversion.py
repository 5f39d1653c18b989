"""Conversion of torch's schedulers to functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from numbers import Integral
from operator import mul
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import lr_scheduler as torchs

from functional_optim import numeric
from functional_optim.numeric import Number, Schedule
from functional_optim.schedules.basic import constant, linear, polynomial
from functional_optim.schedules.formula import WAYS, half_cosine, of_step
from functional_optim.schedules.pieces import between, join
from functional_optim.schedules.warm import warmup


def from_torch(scheduler: torchs.LRScheduler, group: int = 0) -> Schedule:
    """The learning rate of one parameter group under a scheduler of torch, as a schedule.

    `schedule(k)` is the rate after k calls of `scheduler.step()` since the scheduler was new.
    Only settings are read, from the scheduler and, if it stores them there, from the optimizer: its
    progress does not matter, and it is not changed. The schedule starts from the group's
    `initial_lr`.

    Args:
        scheduler: a LambdaLR, StepLR, MultiStepLR, ConstantLR, LinearLR, ExponentialLR,
            PolynomialLR, CosineAnnealingLR, CosineAnnealingWarmRestarts, CyclicLR or OneCycleLR of
            `torch.optim.lr_scheduler`; a SequentialLR of those; or a ChainedScheduler of those that
            multiply the rate: StepLR, MultiStepLR, ConstantLR, LinearLR, ExponentialLR and
            PolynomialLR.
        group: index of the optimizer's parameter group.

    Returns:
        A schedule that equals torch's up to rounding: torch multiplies the last rate by a factor,
        and the schedule computes it from the step. After the last step of a OneCycleLR the rate is
        constant; torch raises an error. The functions of a LambdaLR or a CyclicLR are called with
        ints for Python numbers, and with tensors in a compiled or vmapped step.

    Raises:
        TypeError: for another scheduler; the message says what to do instead.
        ValueError: if the group does not exist, or the scheduler's settings are invalid.

    Example::

        >>> import torch, functional_optim as fo
        >>> opt = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=30, gamma=0.1)
        >>> schedule = fo.schedules.from_torch(scheduler)
        >>> schedule(0), schedule(29), schedule(30)
        (0.5, 0.5, 0.05)
    """
    convert = _converter(scheduler)
    bases = _bases(scheduler)
    whole = isinstance(group, Integral) and not isinstance(group, bool)
    if not whole or group not in range(len(bases)):
        raise ValueError(
            f"from_torch needs a group from 0 to {len(bases) - 1} of the scheduler, but "
            f"got {group!r}."
        )
    return convert(scheduler, _value(bases[group]), group)


def _bases(scheduler: Any) -> list[Any]:
    """The learning rates from which a scheduler starts."""
    parts = getattr(scheduler, "_schedulers", None)
    return _bases(parts[0]) if parts else scheduler.base_lrs


def _value(x: Any) -> Number:
    """A copy of a number of a scheduler, which torch may overwrite."""
    return x.detach().clone() if isinstance(x, Tensor) else x


def _converter(scheduler: Any) -> Callable[[Any, Number, int], Schedule]:
    """The converter of a scheduler; raises TypeError if there is none."""
    name = type(scheduler).__name__
    found = _CONVERTERS.get(type(scheduler))
    if found is not None:
        return found
    if isinstance(scheduler, torchs.ReduceLROnPlateau):
        raise TypeError(
            f"from_torch cannot convert {name}, which depends on the loss and is not a function of "
            "the step; put the transform reduce_on_plateau into the chain."
        )
    if isinstance(scheduler, torchs.MultiplicativeLR):
        raise TypeError(
            f"from_torch cannot convert {name}, which has no formula but multiplies step after "
            "step; write the product as a function of the step, and use that as the schedule."
        )
    known = ", ".join(kind.__name__ for kind in _CONVERTERS)
    raise TypeError(
        f"from_torch cannot convert a {name}; it converts {known}. Write the rate as a function of "
        "the number of finished steps, and use that as the schedule."
    )


def _by_factor(factor: Callable[[Any], Any], n: Any, base: Any) -> Any:
    return base * numeric.float64(factor(_whole(n)))


def _floors(size: int, n: Any) -> Any:
    return numeric.floor(n / size)


def _multi_step(scheduler: torchs.MultiStepLR, base: Number, group: int) -> Schedule:
    milestones = tuple(sorted(scheduler.milestones.items()))
    return _powers(base, scheduler.gamma, partial(_passed, milestones))


def _passed(milestones: tuple[tuple[int, int], ...], n: Any) -> Any:
    count: Any = 0.0
    for milestone, times in milestones:
        count = count + numeric.where(n < milestone, 0.0, times)
    return count


def _powers(base: Number, gamma: Number, exponent: Callable[[Any], Any]) -> Schedule:
    return of_step(partial(_power, exponent), base, gamma)


def _power(exponent: Callable[[Any], Any], n: Any, base: Any, gamma: Any) -> Any:
    return base * numeric.power(gamma, exponent(n))


def _constant(scheduler: torchs.ConstantLR, base: Number, group: int) -> Schedule:
    numeric.check_least("ConstantLR", 1, total_iters=scheduler.total_iters)
    return warmup(constant(base), scheduler.total_iters, base * scheduler.factor, "constant")


def _linear(scheduler: torchs.LinearLR, base: Number, group: int) -> Schedule:
    numeric.check_least("LinearLR", 1, total_iters=scheduler.total_iters)
    start, end = base * scheduler.start_factor, base * scheduler.end_factor
    return linear(start, end, scheduler.total_iters)


def _cosine(scheduler: torchs.CosineAnnealingLR, base: Number, group: int) -> Schedule:
    top = _value(scheduler.base_lrs[group])  # before a SequentialLR, or a OneCycleLR in it
    return of_step(_up_and_down, base, top, scheduler.eta_min, scheduler.T_max)


def _up_and_down(n: Any, base: Any, top: Any, end: Any, steps: Any) -> Any:
    """Down from the base, and after T_max up and down again below the top."""
    return numeric.lerp(end, numeric.where(n <= steps, base, top), half_cosine(n / steps))


def _restarts(scheduler: torchs.CosineAnnealingWarmRestarts, base: Number, group: int) -> Schedule:
    formula = partial(_restarting, scheduler.T_0, scheduler.T_mult)
    return of_step(formula, base, scheduler.eta_min)


def _restarting(first: int, growth: int, n: Any, base: Any, end: Any) -> Any:
    def start(cycle: Any) -> Any:
        """The first step of a cycle."""
        if growth == 1:
            return first * cycle
        return first * (numeric.power(growth, cycle) - 1) / (growth - 1)

    cycles = n / first
    if growth > 1:
        cycles = numeric.log(1 + cycles * (growth - 1)) / math.log(growth)
    cycle = numeric.floor(cycles)
    if growth > 1:  # a logarithm may be slightly off an integer
        cycle = numeric.where(n < start(cycle), cycle - 1, cycle)
        cycle = numeric.where(n < start(cycle + 1), cycle, cycle + 1)
    x = (n - start(cycle)) / (first * numeric.power(growth, cycle))
    return numeric.lerp(end, base, half_cosine(x))


class _Cycle(NamedTuple):
    """The settings of a CyclicLR."""

    total: float
    top: float
    mode: str
    by_cycle: bool
    gamma: float
    custom: Callable[[Any], Any] | None


def _cyclic(scheduler: torchs.CyclicLR, base: Number, group: int) -> Schedule:
    settings = _Cycle(
        scheduler.total_size,
        scheduler.step_ratio,
        scheduler.mode,
        scheduler.scale_mode == "cycle",
        scheduler.gamma,
        scheduler._scale_fn_custom,
    )
    return of_step(partial(_cycling, settings), base, scheduler.max_lrs[group])


def _cycling(settings: _Cycle, n: Any, base: Any, peak: Any) -> Any:
    total, top, mode, by_cycle, gamma, custom = settings
    cycle = numeric.floor(n / total) + 1
    x = n / total - (cycle - 1)
    up = x / top if top > 0 else 0.0
    down = (1 - x) / (1 - top) if top < 1 else 0.0
    height: Any = 1.0
    if custom is not None:
        height = numeric.float64(custom(_whole(cycle if by_cycle else n)))
    elif mode == "triangular2":
        height = numeric.power(0.5, cycle - 1)
    elif mode == "exp_range":
        height = numeric.power(gamma, n)
    return base + (peak - base) * numeric.where(x <= top, up, down) * height


def _one_cycle(scheduler: torchs.OneCycleLR, base: Number, group: int) -> Schedule:
    settings = scheduler.optimizer.param_groups[group]
    phases = scheduler._schedule_phases
    ends = tuple([phase["end_step"] for phase in phases])
    names = (phases[0]["start_lr"], *[phase["end_lr"] for phase in phases])
    values = [_value(settings[name]) for name in names]
    kind = "cosine" if scheduler._anneal_func_type == "cos" else "linear"
    return of_step(partial(_through, kind, ends), *values)


def _through(kind: str, ends: tuple[float, ...], n: Any, *values: Any) -> Any:
    return between(n, WAYS[kind], ends, values)


def _sequential(scheduler: torchs.SequentialLR, base: Number, group: int) -> Schedule:
    parts = []
    for part in scheduler._schedulers:
        if type(part) in (torchs.SequentialLR, torchs.ChainedScheduler):
            raise TypeError(
                f"from_torch cannot convert a SequentialLR with a {type(part).__name__} inside, "
                "which torch itself steps wrongly; convert the simple ones, and join them."
            )
        convert, start = _converter(part), part.base_lrs[group]
        if not parts and type(part) in (*_MULTIPLY, torchs.CosineAnnealingLR):
            # the first continues from this rate, which a OneCycleLR among the others has changed
            start = scheduler.optimizer.param_groups[group]["initial_lr"]
        parts.append(convert(part, _value(start), group))
    return join(parts, scheduler._milestones)


def _chained(scheduler: torchs.ChainedScheduler, base: Number, group: int) -> Schedule:
    factors = []
    for part in scheduler._schedulers:
        if type(part) not in _MULTIPLY:
            known = ", ".join(kind.__name__ for kind in _MULTIPLY)
            raise TypeError(
                f"from_torch cannot convert a ChainedScheduler with a {type(part).__name__} inside,"
                f" only one of {known}, which multiply the rate. Convert the parts, and write a "
                "function of the step that combines them."
            )
        factors.append(_converter(part)(part, 1.0, group))
    return of_step(partial(_product, tuple(factors)), base)


def _product(factors: tuple[Schedule, ...], n: Any, base: Any) -> Any:
    return reduce(mul, [factor(n) for factor in factors], base)


def _whole(n: Any) -> Any:
    """A count as torch passes it to a user's function: an int for Python numbers."""
    return int(n) if isinstance(n, float) and n.is_integer() else n


_MULTIPLY = (
    torchs.StepLR,
    torchs.MultiStepLR,
    torchs.ConstantLR,
    torchs.LinearLR,
    torchs.ExponentialLR,
    torchs.PolynomialLR,
)

_CONVERTERS: dict[type, Callable[[Any, Number, int], Schedule]] = {
    torchs.LambdaLR: lambda x, base, i: of_step(partial(_by_factor, x.lr_lambdas[i]), base),
    torchs.StepLR: lambda x, base, i: _powers(base, x.gamma, partial(_floors, x.step_size)),
    torchs.MultiStepLR: _multi_step,
    torchs.ConstantLR: _constant,
    torchs.LinearLR: _linear,
    torchs.ExponentialLR: lambda x, base, i: _powers(base, x.gamma, numeric.float64),
    torchs.PolynomialLR: lambda x, base, i: polynomial(base, 0.0, x.power, x.total_iters),
    torchs.CosineAnnealingLR: _cosine,
    torchs.CosineAnnealingWarmRestarts: _restarts,
    torchs.CyclicLR: _cyclic,
    torchs.OneCycleLR: _one_cycle,
    torchs.SequentialLR: _sequential,
    torchs.ChainedScheduler: _chained,
}
