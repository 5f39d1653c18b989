"""Transformations that skip steps: a gate in front of a transformation is open or shut.

A gate is a rule. The rules behind it take part in a step if its first number is above 0. If the
gate is shut, they do nothing: their slots stay, and the step is not counted for them. If the number
is known on the host, they are not run at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.core import base
from functional_optim.core.chain import Sequence, Wrapped, freezing_rules
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.rule import Runs, either, squares
from functional_optim.core.storage import wide_dtype
from functional_optim.core.totals import given_totals

Condition = Callable[[Any], Any]
"""A function of the number of finished steps: whether the next one is taken."""


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
    """What the next loss is multiplied with."""
    growth_tracker: Any
    """Number of finite steps since the scale has changed, or since one that was not finite."""


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
    """Transform the updates of some steps; the others pass through as they came.

    Args:
        tx: a transformation. It counts the steps that it takes, no others.
        should_transform: `should_transform(step)` gets the number of finished steps (a number or a
            0-dim tensor) and returns a bool, or a 0-dim tensor.

    State: `open_steps` and `gate`, numbers, and what tx keeps.

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
        tx: a transformation. It counts the steps that it takes, no others.
        should_transform: as for `conditionally_transform`.

    State: `open_steps` and `gate`, numbers, and what tx keeps.

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

    def scalars(t, carry):
        opened = numeric.float64(should(t - 1))
        return (opened,), GateCarry(carry.open_steps + opened, opened)

    update = _emptied if empties else _passed
    return _gated(tx, name, update, scalars, GateCarry(0, 0.0))


@factory
def apply_if_finite(
    tx: base.GradientTransformation, max_consecutive_errors: int
) -> base.GradientTransformation:
    """Leave out the steps whose updates have an infinite entry or a NaN.

    The whole tree is looked at, all parameter groups of an optimizer object included. Where a step
    is left out, the updates are zero and tx is as if it had not been called.

    Args:
        tx: a transformation.
        max_consecutive_errors: how many such steps in a row to leave out, ≥ 0. The next one is
            taken as it is, so that a training that has diverged is seen.

    State: `open_steps`, `gate`, `notfinite_count` (in a row) and `total_notfinite`, numbers, and
    what tx keeps.

    Raises:
        ValueError: if max_consecutive_errors is negative, or no whole number.

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
"""The largest loss scale. One that became infinite or zero in float32 would never recover."""


@factory
def dynamic_loss_scale(
    tx: base.GradientTransformation,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> base.GradientTransformation:
    """Scale the loss for float16: divide gradients by the scale, and leave out overflows.

    Gradients in float16 lose what is below 6e-8, so they are taken of a larger loss:
    `loss * fo.get(state, "loss_scale")`. `fo.compile_train_step` does that by itself. It is
    torch.amp.GradScaler as a transformation: a step with an infinite entry or a NaN anywhere in the
    tree is left out and makes the scale smaller; many finite ones in a row make it larger.

    Args:
        tx: a transformation. It sees gradients of the true size, and counts the steps it takes.
        init_scale: the first scale, > 0. Default: torch's, 65536.
        growth_factor: what the scale is multiplied with when it grows, > 1. Default: torch's, 2.
        backoff_factor: what it is multiplied with after an overflow, between 0 and 1. Default:
            torch's, 0.5.
        growth_interval: after how many finite steps in a row it grows, ≥ 1. Default: torch's, 2000.

    State: `loss_scale`, `growth_tracker`, `open_steps` and `gate`, numbers, and what tx keeps.

    Paper: https://arxiv.org/abs/1710.03740.

    Raises:
        ValueError: for an argument out of its range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.dynamic_loss_scale(fo.sgd(0.5), init_scale=4.0)
        >>> w = torch.zeros(1)
        >>> u, state = tx.update(torch.tensor([8.0]), tx.init(w), w)
        >>> u, tx.update(torch.tensor([float("inf")]), state, w)[1].carry["loss_scale"]
        (tensor([-1.]), tensor(2.))
    """
    for name, x, fits, range_ in (
        ("init_scale", init_scale, 0 < init_scale <= MOST, "above 0 and at most 2**127"),
        ("growth_factor", growth_factor, growth_factor > 1, "above 1"),
        ("backoff_factor", backoff_factor, 0 < backoff_factor < 1, "between 0 and 1"),
    ):
        if not fits:
            raise ValueError(f"dynamic_loss_scale needs a {name} {range_}, but got {x!r}.")
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
    """Leave out the steps whose updates together have a norm above max_norm, or none at all.

    The Euclidean norm is taken over the whole tree. An infinite or NaN entry makes it too large.

    Args:
        tx: a transformation.
        max_norm: the largest norm, > 0: a number, a 0-dim tensor, or a schedule.

    State: `open_steps` and `gate`, numbers, and what tx keeps.

    Raises:
        ValueError: if max_norm is a number and not positive.

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
        opened = numeric.float64(
            numeric.sqrt(total[0]) <= numeric.at(max_norm, t)
        )  # False for a NaN
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
    """Collect the gradients of several micro-batches, and take one step with all of them.

    The updates are zero until a batch is full. tx is called with full batches alone, and counts
    them alone: schedules inside it see optimizer steps. What stands before it in a chain is
    applied to every micro-batch.

    Args:
        tx: a transformation.
        every: how many micro-batches make a batch, ≥ 1: a number, or a function of the number of
            full batches so far.
        mean: hand on the mean of the gradients; False: their sum.
        skip_nonfinite: leave out a micro-batch that has an infinite entry or a NaN anywhere, and
            wait for another one.

    State: `acc_grads`, like the parameters (float32 for half types); `open_steps`, `gate` and
    `mini_step`, numbers; and what tx keeps.

    A gradient of None counts as zero in the mean of its batch. A leaf moves in the last micro-batch
    only if it has a gradient there; without one it stays, and what it has collected is dropped, so
    that a leaf without any gradient in a batch is not moved by momentum or weight decay. Pass zeros
    for a leaf whose gradients may come in some micro-batches only, as in a mixture of experts. A
    micro-batch without any gradient is not counted.

    Raises:
        ValueError: if `every` is a number below 1, or no whole one.
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
            "accumulate averages gradients, but a method that knows residuals reads none; pass the "
            "residuals of all micro-batches at once, e.g. stack_residuals(first, second)."
        )
    if not (callable(every) or isinstance(every, Tensor)):
        numeric.check_count("accumulate", 1, every=every)

    def init(p: Tensor) -> AccumulateSlots:
        return AccumulateSlots(torch.zeros_like(p, dtype=wide_dtype(p)))

    def scalars(t, carry, total=(0.0,)):
        counted = numeric.float64(total[0] == 0)
        count = carry.mini_step + counted
        wanted = every(carry.open_steps) if callable(every) else every
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
        acc = either(counted, either(first, u, more), old)
        nothing = torch.zeros_like(acc)
        return either(full, acc, 0.0), AccumulateSlots(either(full, nothing, acc))

    def absent(slots: AccumulateSlots, *numbers: Any) -> AccumulateSlots:
        full, counted, first, share = numbers
        old = slots.acc_grads
        nothing = torch.zeros_like(old)
        less = either(first, nothing, old - share * old if mean else old)
        return AccumulateSlots(either(full, nothing, either(counted, less, old)))

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


def _gated(
    tx: Any, name: str, update: Any, scalars: Any, carry: Any, reduce: Any = None
) -> base.GradientTransformation:
    """A transformation behind a gate without slots."""
    gate = leafwise(
        None, update, scalars, reduce=reduce, carry=carry, runs=Runs(shared=True), name=name
    )
    return _behind(gate, tx)


def _emptied(u: Tensor, slots: Any, p: Tensor, opened: Any) -> tuple[Tensor, Any]:
    return either(opened, u, 0.0), slots


def _unscaled(u: Tensor, slots: Any, p: Tensor, opened: Any, factor: Any) -> tuple[Tensor, Any]:
    return either(opened, u * factor, 0.0), slots


def _passed(u: Tensor, slots: Any, p: Tensor, opened: Any) -> tuple[Tensor, Any]:
    return u, slots


def _strange(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor]:
    """The number of entries that are infinite or NaN."""
    return ((~u.isfinite()).to(u.dtype).sum(),)


def _behind(gate: Leafwise, tx: Any) -> base.GradientTransformation:
    """A transformation behind a gate."""
    base.check_transformation(gate.placements[0].name, tx, "adam(lr=1e-3)")
    if isinstance(tx, Leafwise):
        behind = [placement.behind(i) for i, placement in enumerate(tx.placements, 1)]
        return Leafwise((*gate.placements, *behind))
    return _whole(gate, tx)


class WholeState(NamedTuple):
    """The state of a transformation of whole trees behind a gate."""

    gate: Any
    inner: Any


def _whole(gate: Leafwise, tx: base.GradientTransformation) -> base.GradientTransformation:
    """The same for a transformation of whole trees: it always runs, and what it did is dropped."""
    known = tx.extra
    freezing = freezing_rules(tx)
    gate = Leafwise((*freezing, *gate.placements)) if freezing else gate

    def init(params: Any) -> WholeState:
        return WholeState(gate.init(params), tx.init(params))

    def update(
        grads: Any, state: WholeState, params: Any = None, **extra: Any
    ) -> tuple[Any, WholeState]:
        base.check_extra(extra, known)
        updates, gated = gate.update(grads, state.gate, params)
        opened = gated.carry["gate"] > 0
        totals = given_totals()
        if totals is not None:
            totals.gates.append(opened)
        moved, inner = tx.update(updates, state.inner, params, **extra)
        if totals is not None:
            totals.gates.pop()

        def kept(new: Any, old: Any) -> Any:
            return new if old is None else torch.where(opened, new, old).to(old.dtype)

        updates = tree.map(lambda u, v: None if v is None else kept(v, u), updates, moved)
        return updates, WholeState(gated, tree.map(kept, inner, state.inner))

    return Wrapped(init, update, Sequence((gate, tx)))
