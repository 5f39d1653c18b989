"""Transformations that skip steps: a gate in front of a transformation is open or closed.

A gate is a rule. The rules behind it run in a step if its first scalar is above 0. If the gate is
closed, their slots stay unchanged, and they do not count the step. If the scalar is known on the
host, they do not run at all.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.combinators.gated_trees import gated_trees
from functional_optim.core import base, modes
from functional_optim.core.calls import check_step_function
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.rule import Runs, select, squares, unchanged
from functional_optim.core.storage import wide_dtype

Condition = Callable[[Any], Any]
"""A function of the number of finished steps: whether the next step is taken."""


class GateCarry(NamedTuple):
    open_steps: Any
    """Number of steps in which the gate was open."""
    gate: Any
    """Whether it was open in the last step: 1 or 0."""


class FiniteCarry(NamedTuple):
    open_steps: Any
    """Number of steps that were taken."""
    gate: Any
    """Whether the last step was taken: 1 or 0."""
    notfinite_count: Any
    """Number of consecutive steps that were not finite."""
    total_notfinite: Any
    """Number of all steps that were not finite."""


class LossScaleCarry(NamedTuple):
    open_steps: Any
    """Number of steps that were taken."""
    gate: Any
    """Whether the last step was taken: 1 or 0."""
    loss_scale: Any
    """The factor for the next loss."""
    growth_tracker: Any
    """Number of finite steps since the last change of the scale, or the last overflow."""


class AccumulateCarry(NamedTuple):
    open_steps: Any
    """Number of full batches."""
    gate: Any
    """Whether the last micro-batch completed a batch: 1 or 0."""
    mini_step: Any
    """Number of micro-batches in the current batch."""


class AccumulateSlots(NamedTuple):
    acc_grads: Tensor
    """Mean or sum of the micro-batches so far, like p; float32 for half types. Zero after a full
    batch."""


@factory
def conditionally_transform(
    tx: base.GradientTransformation, should_transform: Condition
) -> base.GradientTransformation:
    """Transform the updates of some steps; those of other steps pass unchanged.

    Args:
        tx: a transformation. It counts only the steps that it takes.
        should_transform: `should_transform(step)` gets the number of finished steps (a number or a
            0-dim tensor) and returns a bool, or a 0-dim tensor.

    State: `open_steps` and `gate`, scalars, and that of tx.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.conditionally_transform(fo.scale(10.0), lambda step: step >= 1)
        >>> w, g = torch.zeros(1), torch.ones(1)
        >>> first, state = tx.update(g, tx.init(w), w)
        >>> first, tx.update(g, state, w)[0]
        (tensor([1.]), tensor([10.]))
    """
    return _by_condition(tx, should_transform, "conditionally_transform", empties=False)


@factory
def conditionally_mask(
    tx: base.GradientTransformation, should_transform: Condition
) -> base.GradientTransformation:
    """Take some steps; the updates of the others are zero.

    Args:
        tx: a transformation. It counts only the steps that it takes.
        should_transform: as for `conditionally_transform`.

    State: `open_steps` and `gate`, scalars, and that of tx.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.conditionally_mask(fo.sgd(0.5), lambda step: step % 2 == 1)
        >>> w, g = torch.zeros(1), torch.ones(1)
        >>> first, state = tx.update(g, tx.init(w), w)
        >>> first, tx.update(g, state, w)[0]
        (tensor([0.]), tensor([-0.5000]))
    """
    return _by_condition(tx, should_transform, "conditionally_mask", empties=True)


def _by_condition(
    tx: base.GradientTransformation, should: Condition, name: str, *, empties: bool
) -> base.GradientTransformation:
    if not callable(should):
        raise TypeError(
            f"{name} takes a function of the step count, but got a {type(should).__name__}; pass "
            "e.g. lambda step: step >= 100."
        )
    check_step_function(name, "condition", should)

    def scalars(t, carry):
        opened = numeric.float64(_answer("should_transform", should, t) > 0)
        return (opened,), GateCarry(carry.open_steps + opened, opened)

    update = _emptied if empties else unchanged
    return _gated(tx, name, update, scalars, GateCarry(0, 0.0))


@factory
def apply_if_finite(
    tx: base.GradientTransformation, max_consecutive_errors: int
) -> base.GradientTransformation:
    """Skip the steps whose updates have an infinite element or a NaN.

    All parameters are checked, in an optimizer object those of all parameter groups. In a skipped
    step, the updates are zero and tx is not called.

    Args:
        tx: a transformation.
        max_consecutive_errors: number of consecutive steps to skip, ≥ 0. The next one is taken, so
            that you notice when training has diverged.

    State: `open_steps`, `gate`, `notfinite_count` (consecutive) and `total_notfinite`, scalars, and
    that of tx.

    Raises:
        ValueError: if max_consecutive_errors is negative, or not an integer.
        TypeError: if tx reads no gradients.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.apply_if_finite(fo.sgd(0.5), max_consecutive_errors=3)
        >>> w = torch.zeros(2)
        >>> u, state = tx.update(torch.tensor([1.0, float("nan")]), tx.init(w), w)
        >>> u, fo.get(state, "notfinite_count").item()
        (tensor([0., 0.]), 1.0)
    """
    numeric.check_count("apply_if_finite", 0, max_consecutive_errors=max_consecutive_errors)

    def scalars(t, carry, total):
        bad = numeric.float64(total[0] > 0)
        row = numeric.where(bad > 0, carry.notfinite_count + 1, 0.0)
        opened = numeric.float64((row == 0) | (row > max_consecutive_errors))
        all_bad = carry.total_notfinite + bad
        return (opened,), FiniteCarry(carry.open_steps + opened, opened, row, all_bad)

    carry = FiniteCarry(0, 0.0, 0, 0)
    return _gated(tx, "apply_if_finite", _emptied, scalars, carry, _strange)


MOST = 2.0**127
"""The largest loss scale. A scale that is infinite or zero in float32 would never recover."""


@factory
def dynamic_loss_scale(
    tx: base.GradientTransformation,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> base.GradientTransformation:
    """Scale the loss for float16: divide gradients by the scale, and skip overflows.

    Gradients in float16 lose values below 6e-8, so compute them from a larger loss: `loss *
    fo.get(state, "loss_scale")`. `fo.compile_train_step` does so automatically. It is
    torch.amp.GradScaler as a transformation: it skips a step with an infinite element or a NaN in
    any parameter, and reduces the scale; after many consecutive finite steps it increases the
    scale.

    Args:
        tx: a transformation. It sees unscaled gradients, and counts only the steps that it takes.
        init_scale: the initial scale, > 0. Default: torch's, 65536.
        growth_factor: factor when the scale grows, > 1. Default: torch's, 2.
        backoff_factor: factor after an overflow, between 0 and 1. Default: torch's, 0.5.
        growth_interval: number of consecutive finite steps before it grows, ≥ 1. Default: torch's,
            2000.

    State: `loss_scale`, `growth_tracker`, `open_steps` and `gate`, scalars, and that of tx.

    Paper: https://arxiv.org/abs/1710.03740.

    Raises:
        ValueError: for an argument out of its range.
        TypeError: if tx reads no gradients.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.dynamic_loss_scale(fo.sgd(0.5), init_scale=4.0)
        >>> w = torch.zeros(1)
        >>> u, state = tx.update(torch.tensor([8.0]), tx.init(w), w)
        >>> u, tx.update(torch.tensor([float("inf")]), state, w)[1].carry["loss_scale"]
        (tensor([-1.]), tensor(2.))
    """
    for name, x, fits, range_ in (
        ("init_scale", init_scale, lambda x: 0 < x <= MOST, "above 0 and at most 2**127"),
        ("growth_factor", growth_factor, lambda x: x > 1, "above 1"),
        ("backoff_factor", backoff_factor, lambda x: 0 < x < 1, "between 0 and 1"),
    ):
        number = x.numel() == 1 if isinstance(x, Tensor) else isinstance(x, Real)
        if not number or not fits(x):
            error = ValueError if number else TypeError
            named = f"{'an' if name[0] == 'i' else 'a'} {name} {range_}"
            raise error(f"dynamic_loss_scale needs {named}, but got {x!r}.")
    numeric.check_count("dynamic_loss_scale", 1, growth_interval=growth_interval)

    def scalars(t, carry, total):
        opened = numeric.float64(total[0] == 0)
        finite = (carry.growth_tracker + 1) * opened
        grows = numeric.float64(finite >= growth_interval)
        scale = carry.loss_scale * numeric.where(opened > 0, 1.0, backoff_factor)
        scale = scale * numeric.where(grows > 0, growth_factor, 1.0)
        scale = numeric.minimum(numeric.maximum(scale, 1 / MOST), MOST)
        tracker = numeric.where(grows > 0, 0.0, finite)
        new = LossScaleCarry(carry.open_steps + opened, opened, scale, tracker)
        return (opened, 1 / carry.loss_scale), new

    carry = LossScaleCarry(0, 0.0, float(init_scale), 0)
    return _gated(tx, "dynamic_loss_scale", _unscaled, scalars, carry, _strange)


@factory
def skip_large_updates(
    tx: base.GradientTransformation, max_norm: numeric.Hyper
) -> base.GradientTransformation:
    """Skip the steps whose updates have a global norm above max_norm, or a NaN.

    The Euclidean norm covers all parameters. An infinite or NaN element makes it too large.

    Args:
        tx: a transformation.
        max_norm: the largest norm, > 0: a number, a 0-dim tensor, or a schedule.

    State: `open_steps` and `gate`, scalars, and that of tx.

    Raises:
        ValueError: if max_norm is a number and not positive.
        TypeError: if tx reads no gradients.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.skip_large_updates(fo.sgd(0.5), max_norm=10.0)
        >>> w = torch.zeros(1)
        >>> u, state = tx.update(torch.tensor([11.0]), tx.init(w), w)
        >>> u, tx.update(torch.tensor([9.0]), state, w)[0]
        (tensor([0.]), tensor([-4.5000]))
    """
    numeric.check_range("skip_large_updates", "positive", max_norm=max_norm)

    def scalars(t, carry, total):
        small = numeric.sqrt(total[0]) <= numeric.at(max_norm, t)  # False for a NaN
        opened = numeric.float64(small)
        return (opened,), GateCarry(carry.open_steps + opened, opened)

    carry = GateCarry(0, 0.0)
    return _gated(tx, "skip_large_updates", _emptied, scalars, carry, squares)


@factory
def accumulate(
    tx: base.GradientTransformation,
    every: int | Condition,
    *,
    mean: bool = True,
    skip_nonfinite: bool = False,
) -> base.GradientTransformation:
    """Accumulate the gradients of several micro-batches, and take one step with all of them.

    The updates are zero until a batch is full. tx is called only with full batches, and counts only
    these: schedules inside it see optimizer steps. Transforms before it in a chain apply to every
    micro-batch.

    Args:
        tx: a transformation.
        every: number of micro-batches per batch, ≥ 1: a number, or a function of the number of full
            batches so far.
        mean: pass on the mean of the gradients; False: their sum.
        skip_nonfinite: skip a micro-batch with an infinite element or a NaN, and wait for another
            one.

    tx gets the extra arguments of the last micro-batch: of `value`, pass the mean over the batch.

    State: `acc_grads`, like the parameters (float32 for half types); `open_steps`, `gate` and
    `mini_step`, scalars; and that of tx.

    A gradient of None counts as zero in the mean of its batch. A leaf is stepped only if it has a
    gradient in the last micro-batch. Otherwise it stays unchanged and its accumulated gradients are
    dropped, so that momentum or weight decay do not move a leaf without a gradient in a batch. Pass
    zeros for a leaf that has gradients in some micro-batches only, as in a mixture of experts. A
    micro-batch without any gradient is not counted.

    Raises:
        ValueError: if `every` is a number below 1, or not an integer; from update, if it returns
            False or a number below 1 (a traced step does not check that).
        TypeError: if tx takes functions of the parameters, such as `grad_fn`.
        RuntimeError: from update, for a sparse gradient.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.accumulate(fo.sgd(1.0), every=2)
        >>> w = torch.zeros(1)
        >>> first, state = tx.update(torch.tensor([1.0]), tx.init(w), w)
        >>> first, tx.update(torch.tensor([3.0]), state, w)[0]
        (tensor([0.]), tensor([-2.]))
    """
    base.check_transformation("accumulate", tx, "accumulate(adam(lr=1e-3), every=4)")
    if "residual_fn" in tx.extra:
        raise TypeError(
            "accumulate averages gradients, but a method for residuals reads none; pass the "
            "residuals of all micro-batches at once, e.g. stack_residuals(first, second)."
        )
    for name in ("grad_fn", "value_and_grad", "value_fn"):
        if name in tx.extra:
            raise TypeError(
                f"accumulate passes on the mean of gradients, but {name} is that of the last "
                "micro-batch; pass functions of the whole batch, e.g. by "
                "compile_train_step(loss_fn, tx, accumulate=4), or put accumulate inside, as in "
                "sam(accumulate(sgd(0.1), 4))."
            )
    if callable(every):
        check_step_function("accumulate", "every", every)
    elif not modes.traced():
        numeric.check_count("accumulate", 1, every=_as_int(every))

    def init(p: Tensor) -> AccumulateSlots:
        return AccumulateSlots(torch.zeros_like(p, dtype=wide_dtype(p)))

    def scalars(t, carry, total=(0.0,)):
        counted = numeric.float64(total[0] == 0)
        count = carry.mini_step + counted
        wanted = _batch_size(every, carry.open_steps + 1) if callable(every) else every
        full = numeric.float64(count >= wanted) * counted
        first = numeric.float64(count == 1)
        share = 1 / numeric.maximum(count, 1.0) if mean else 1.0
        waiting = numeric.where(full > 0, 0.0, count)
        new = AccumulateCarry(carry.open_steps + full, full, waiting)
        return (full, counted, first, share), new

    def update(u: Tensor, slots: AccumulateSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, Any]:
        full, counted, first, share = numbers
        old = slots.acc_grads
        more = old + share * (u - old) if mean else old + u
        acc = select(counted, select(first, u, more), old)
        nothing = torch.zeros_like(acc)
        return select(full, acc, 0.0), AccumulateSlots(select(full, nothing, acc))

    def absent(slots: AccumulateSlots, *numbers: Any) -> AccumulateSlots:
        full, counted, first, share = numbers
        old = slots.acc_grads
        nothing = torch.zeros_like(old)
        less = select(first, nothing, old - share * old if mean else old)
        return AccumulateSlots(select(full, nothing, select(counted, less, old)))

    collector = leafwise(
        init,
        update,
        scalars,
        reduce=_strange if skip_nonfinite else None,
        carry=AccumulateCarry(0, 0.0, 0),
        runs=Runs(shared=True, absent=absent, dense_only=True),
        name="accumulate",
    )
    return _behind(collector, tx)


def _answer(argument: str, function: Condition, t: Any) -> Any:
    """What a function of the step count returns at step t.

    Raises:
        NotANumber: which names the argument, if it is not a number.
    """
    try:
        return numeric.at(function, t)
    except numeric.NotANumber as error:
        raise error.among([(argument, function)]) from None


def _batch_size(every: Condition, t: Any) -> Any:
    """The number of micro-batches in a batch.

    Raises:
        ValueError: if it is known to be below 1: each micro-batch would be a batch.
    """
    found = _answer("every", every, t)
    if not isinstance(found, Tensor) and found < 1:
        raise ValueError(
            f"every of accumulate returned {found:g}; it must return the number of micro-batches "
            "per batch, at least 1. For a condition on the step use conditionally_mask."
        )
    return found


def _as_int(x: Any) -> Any:
    """The integer that a tensor of one element holds; anything else as it is."""
    if not isinstance(x, Tensor) or x.numel() != 1:
        return x
    held = x.item()
    return int(held) if held == held // 1 else held


def _gated(
    tx: Any, name: str, update: Any, scalars: Any, carry: Any, reduce: Any = None
) -> base.GradientTransformation:
    """A transformation behind a gate without slots."""
    gate = leafwise(
        None, update, scalars, reduce=reduce, carry=carry, runs=Runs(shared=True), name=name
    )
    return _behind(gate, tx)


def _emptied(u: Tensor, slots: Any, p: Tensor, opened: Any) -> tuple[Tensor, Any]:
    return select(opened, u, 0.0), slots


def _unscaled(u: Tensor, slots: Any, p: Tensor, opened: Any, factor: Any) -> tuple[Tensor, Any]:
    return select(opened, u * factor, 0.0), slots


def _strange(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor]:
    """The number of infinite or NaN elements."""
    return ((~u.isfinite()).to(u.dtype).sum(),)


def _behind(gate: Leafwise, tx: Any) -> base.GradientTransformation:
    """A transformation behind a gate."""
    base.check_transformation(gate.placements[0].name, tx, "adam(lr=1e-3)")
    rule, name, *_ = gate.placements[0]
    if rule.reduce is not None and not tx.reads_gradients:
        raise TypeError(
            f"{name} checks gradients, but a method for residuals or values reads none; leave "
            f"{name} out."
        )
    if isinstance(tx, Leafwise):
        behind = [placement.gated_by(i) for i, placement in enumerate(tx.placements, 1)]
        return Leafwise((*gate.placements, *behind))
    return gated_trees(gate, tx)
