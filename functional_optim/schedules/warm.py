"""Schedules with a warm-up."""

from __future__ import annotations

from functional_optim import numeric
from functional_optim.core.calls import check_choice
from functional_optim.core.factory import factory
from functional_optim.numeric import Number, Schedule
from functional_optim.schedules.basic import constant, cosine_left, exponential_decay
from functional_optim.schedules.formula import WAYS, called, check_schedule, of_step, share
from functional_optim.schedules.pieces import join


@factory
def warmup(
    schedule: Schedule, warmup_steps: Number, init_value: Number = 0.0, kind: str = "linear"
) -> Schedule:
    """A warm-up to the first value of any schedule, then the schedule.

    The schedule starts when the warm-up is over: it receives `count - warmup_steps`.

    Args:
        schedule: a function of the number of finished steps.
        warmup_steps: length of the warm-up, ≥ 0.
        init_value: value at step 0.
        kind: "linear": a straight line. "constant": `init_value` up to a jump, as in
            torch.optim.lr_scheduler.ConstantLR. "exponential": by equal factors, from an
            `init_value` above 0.

    Raises:
        TypeError: if `schedule` is not a function.
        ValueError: for an unknown kind, a negative number of steps, or an exponential warm-up that
            does not start above 0; from the schedule, if it does not end above 0.

    Paper: Goyal et al., "Accurate, Large Minibatch SGD", https://arxiv.org/abs/1706.02677, § 2.2:
    constant and gradual warm-up.

    Example::

        >>> import functional_optim as fo
        >>> schedule = fo.schedules.warmup(fo.schedules.polynomial(1.0, 0.0, 2, 10), 5)
        >>> schedule(0), schedule(5), schedule(10)
        (0.0, 1.0, 0.25)
    """
    check_schedule("warmup", schedule)
    numeric.check_least("warmup", 0, warmup_steps=warmup_steps)
    check_choice("warmup", ("linear", "constant", "exponential"), kind=kind)
    if kind == "constant":
        return join([constant(init_value), schedule], [warmup_steps])
    if kind == "exponential":
        numeric.check_range("an exponential warmup", "positive", init_value=init_value)

    def formula(n, init, steps):
        peak, x = called(schedule, 0), share(n, steps)
        if kind == "exponential":
            numeric.check_range("an exponential warmup", "above 0", peak=peak)
            return init * numeric.power(peak / init, x)
        return numeric.lerp(init, peak, x)

    return join([of_step(formula, init_value, warmup_steps), schedule], [warmup_steps])


@factory
def warmup_constant(init_value: Number, peak_value: Number, warmup_steps: Number) -> Schedule:
    """A line from init_value up to peak_value, constant afterwards.

    Args:
        init_value: value at step 0.
        peak_value: value from step `warmup_steps` on.
        warmup_steps: length of the line in steps, ≥ 0.

    Raises:
        ValueError: if warmup_steps is negative.

    Example::

        >>> import functional_optim as fo
        >>> schedule = fo.schedules.warmup_constant(0.0, 1.0, 10)
        >>> schedule(5), schedule(1000)
        (0.5, 1.0)
    """
    numeric.check_least("warmup_constant", 0, warmup_steps=warmup_steps)
    return warmup(constant(peak_value), warmup_steps, init_value)


@factory
def warmup_cosine_decay(
    init_value: Number,
    peak_value: Number,
    warmup_steps: Number,
    decay_steps: Number,
    end_value: Number = 0.0,
    exponent: Number = 1.0,
) -> Schedule:
    """A line from init_value up to peak_value, then half a cosine down to end_value.

    `warmup_cosine` is an alias.

    Args:
        init_value: value at step 0.
        peak_value: value at step `warmup_steps`.
        warmup_steps: length of the line in steps, ≥ 0.
        decay_steps: length of line and cosine together, > warmup_steps.
        end_value: value from step `decay_steps` on.
        exponent: power of the half cosine, > 0. 1 by default.

    Raises:
        ValueError: if decay_steps is not larger than warmup_steps, warmup_steps is negative, or
            the exponent not positive.

    Example::

        >>> import functional_optim as fo
        >>> schedule = fo.schedules.warmup_cosine_decay(0.0, 1.0, 10, 110)
        >>> schedule(5), schedule(10), schedule(60), schedule(110)
        (0.5, 1.0, 0.5, 0.0)
    """
    lengths = (warmup_steps, decay_steps)
    if all(map(numeric.is_static, lengths)) and not 0 <= warmup_steps < decay_steps:
        raise ValueError(
            "warmup_cosine_decay needs 0 <= warmup_steps < decay_steps (which counts the warmup "
            f"in), but got warmup_steps={warmup_steps}, decay_steps={decay_steps}."
        )
    numeric.check_range("warmup_cosine_decay", "positive", exponent=exponent)

    def formula(n, peak, end, warm, steps, exponent):
        return numeric.lerp(end, peak, cosine_left(n, steps - warm, exponent))

    fall = of_step(formula, peak_value, end_value, *lengths, exponent)
    return warmup(fall, warmup_steps, init_value)


@factory
def warmup_exponential_decay(
    init_value: Number,
    peak_value: Number,
    warmup_steps: Number,
    transition_steps: Number,
    decay_rate: Number,
    transition_begin: Number = 0,
    staircase: bool = False,
    end_value: Number | None = None,
) -> Schedule:
    """A line from init_value up to peak_value, then `exponential_decay`.

    Args:
        init_value: value at step 0.
        peak_value: value at step `warmup_steps`.
        warmup_steps: length of the line in steps, ≥ 0.
        transition_steps: number of steps for a factor of `decay_rate`, ≥ 1.
        decay_rate: factor, > 0.
        transition_begin: steps between the end of the line and the start of the decay, ≥ 0.
        staircase: multiply at the end of each `transition_steps` steps; otherwise evenly.
        end_value: a lower bound if the rate is below 1, else an upper one. None: no bound.

    Raises:
        ValueError: if the rate or a number of steps is out of range.

    Example::

        >>> import functional_optim as fo
        >>> schedule = fo.schedules.warmup_exponential_decay(0.0, 1.0, 10, 20, 0.25)
        >>> schedule(5), schedule(10), schedule(20)
        (0.5, 1.0, 0.5)
    """
    numeric.check_least("warmup_exponential_decay", 0, warmup_steps=warmup_steps)
    fall = exponential_decay(
        peak_value, transition_steps, decay_rate, transition_begin, staircase, end_value
    )
    return warmup(fall, warmup_steps, init_value)


@factory
def warmup_stable_decay(
    init_value: Number,
    peak_value: Number,
    warmup_steps: Number,
    stable_steps: Number,
    decay_steps: Number,
    end_value: Number = 0.0,
    kind: str = "linear",
) -> Schedule:
    """Warm up, stay at peak_value, and decay: WSD, the trapezoid.

    Before the decay nothing depends on the length of the run, so a run can continue from a
    checkpoint taken there.

    Args:
        init_value: value at step 0.
        peak_value: value from step `warmup_steps` on.
        warmup_steps: length of the line up, ≥ 0.
        stable_steps: length of the plateau, ≥ 0.
        decay_steps: length of the decay, ≥ 1. Often 10 to 20 % of all steps.
        end_value: value from step `warmup_steps + stable_steps + decay_steps` on.
        kind: of the decay: "linear", "cosine", or "1-sqrt", where 1 − √x of the distance remains
            after a fraction x of the decay.

    Raises:
        ValueError: for an unknown kind, or a number of steps out of range.

    Papers: Hu et al., "MiniCPM", https://arxiv.org/abs/2404.06395, § 4; Hägele et al., "Scaling
    Laws and Compute-Optimal Training Beyond Fixed Training Durations",
    https://arxiv.org/abs/2405.18392, for "1-sqrt".

    Example::

        >>> import functional_optim as fo
        >>> schedule = fo.schedules.warmup_stable_decay(0.0, 1.0, 10, 70, 20, kind="1-sqrt")
        >>> schedule(5), schedule(80), schedule(85), schedule(100)
        (0.5, 1.0, 0.5, 0.0)
    """
    name = "warmup_stable_decay"
    check_choice(name, ("linear", "cosine", "1-sqrt"), kind=kind)
    numeric.check_least(name, 0, warmup_steps=warmup_steps, stable_steps=stable_steps)
    numeric.check_least(name, 1, decay_steps=decay_steps)

    def formula(n, peak, end, stable, steps):
        return numeric.lerp(peak, end, WAYS[kind](share(n - stable, steps)))

    fall = of_step(formula, peak_value, end_value, stable_steps, decay_steps)
    return warmup(fall, warmup_steps, init_value)


@factory
def inverse_square_root(
    peak_value: Number, warmup_steps: Number, init_value: Number = 0.0
) -> Schedule:
    """A line up to peak_value, then 1/√count: `peak_value * sqrt(warmup_steps/count)`.

    It has no end, so the length of a run need not be known.

    Args:
        peak_value: value at step `warmup_steps`. The paper's is
            `(d_model * warmup_steps) ** -0.5`.
        warmup_steps: length of the line, ≥ 1; it also sets the pace of the decay.
        init_value: value at step 0. With `peak_value` itself the warm-up is constant, as for T5.

    Raises:
        ValueError: if warmup_steps is below 1.

    Paper: Vaswani et al., "Attention Is All You Need", https://arxiv.org/abs/1706.03762,
    equation 3; its steps are counted from 1, so its first one is step 1 here.

    Example::

        >>> import functional_optim as fo
        >>> schedule = fo.schedules.inverse_square_root(1.0, warmup_steps=100)
        >>> schedule(50), schedule(100), schedule(400)
        (0.5, 1.0, 0.5)
    """
    numeric.check_least("inverse_square_root", 1, warmup_steps=warmup_steps)

    def formula(n, peak, warm):
        return peak * numeric.sqrt(warm / (warm + n))

    fall = of_step(formula, peak_value, warmup_steps)
    return warmup(fall, warmup_steps, init_value)
