"""Transformations around others: lookahead, flatten, sharded_over, with_schedule."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.core import base, draws, sharding
from functional_optim.core.calls import check_step_function
from functional_optim.core.chain import Wrapped, chain, each_placement, is_custom, narrowed
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import leafwise
from functional_optim.core.lift import freezes
from functional_optim.core.ravel import Ravel
from functional_optim.core.rule import Placement, Runs, select
from functional_optim.core.storage import Storage, wide_dtype
from functional_optim.core.totals import pass_over


class LookaheadSlots(NamedTuple):
    slow_params: Tensor
    """The slow copy of the parameter, like p; float32 for half types. It starts from p."""


@factory
def lookahead(
    tx: base.GradientTransformation, sync_period: int = 6, slow_step_size: numeric.Hyper = 0.5
) -> base.GradientTransformation:
    """Step with tx, and periodically return toward slow weights.

    Args:
        tx: the fast optimizer.
        sync_period: k, steps between two synchronizations, ≥ 1. Default: as in optax's examples.
        slow_step_size: α in φ ← φ + α (θ − φ), in [0, 1]: a number, a 0-dim tensor, or a schedule.
            0.5 is the paper's.

    State: that of tx, and `slow_params`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        RuntimeError: from update, for a sparse gradient.

    Paper: Zhang, Lucas, Hinton, Ba, "Lookahead Optimizer: k steps forward, 1 step back",
    https://arxiv.org/abs/1907.08610, Algorithm 1.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.lookahead(fo.sgd(1.0), sync_period=2, slow_step_size=0.5)
        >>> w, g = torch.zeros(1), torch.ones(1)
        >>> state = tx.init(w)
        >>> for _ in range(2):
        ...     u, state = tx.update(g, state, w)
        ...     w = fo.apply_updates(w, u)
        >>> w
        tensor([-1.])
    """
    base.check_transformation("lookahead", tx, "lookahead(adam())")
    numeric.check_count("lookahead", 1, sync_period=sync_period)
    numeric.check_range("lookahead", "in [0, 1]", slow_step_size=slow_step_size)

    def init(p: Tensor) -> LookaheadSlots:
        return LookaheadSlots(p.to(wide_dtype(p), copy=True))

    def scalars(t, *, slow_step_size):
        return numeric.float64(t % sync_period == 0), slow_step_size

    def update(
        u: Tensor, slots: LookaheadSlots, p: Tensor, sync: Any, a: Any
    ) -> tuple[Tensor, LookaheadSlots]:
        slow = slots.slow_params
        there = slow + a * (p + u - slow)
        return select(sync, there - p, u), LookaheadSlots(select(sync, there, slow))

    hyper = {"slow_step_size": slow_step_size}
    runs = Runs(shared=True, dense_only=True, after="lr")
    storage = Storage(weights=("slow_params",))
    slow = leafwise(
        init, update, scalars, hyper=hyper, runs=runs, storage=storage, name="lookahead"
    )
    return chain(tx, slow)


@factory
def flatten(tx: base.GradientTransformation) -> base.GradientTransformation:
    """Pass all leaves to a transformation as one vector.

    Measurements per leaf then cover all leaves together. It is not needed for speed: small tensors
    share a kernel call anyway.

    Args:
        tx: a transformation.

    State: tx's for a vector: float32, or float64 if any parameter is double; complex parameters
    count as pairs. Random numbers are those of the first leaf's path.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.flatten(fo.sgd(0.1, momentum=0.9))
        >>> params = {"a": torch.zeros(2), "b": torch.zeros(1)}
        >>> tx.init(params).slots["momentum_buffer"]
        tensor([0., 0., 0.])
    """
    base.check_transformation("flatten", tx, "flatten(adam())")
    known, reads, custom = tx.extra, tx.reads_gradients, is_custom(tx)

    def init(params: Any) -> Any:
        flat = Ravel(params)
        with _path(params):
            return tx.init(flat.vector(params))

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        base.check_extra(extra, known)
        base.check_passed(params)
        flat = Ravel(params)
        extra = narrowed(extra, params, flat.tree, flat.vector)
        if reads:
            base.check_structure(params, grads)
        given = flat.vector(grads) if tree.leaves(grads) else None
        if given is None and reads and custom:  # one written for a vector need not know None
            pass_over(tx.placements)
            return tree.map(lambda p: None, params), state
        with _path(params):
            u, state = tx.update(given, state, flat.vector(params), **extra)
        if u is None:  # frozen
            return tree.map(lambda p: None, params), state
        updates = flat.tree(u, stored=False)
        if reads:
            updates = tree.map(lambda p, g, u: None if g is None else u, params, grads, updates)
        return updates, state

    return Flattened(init, update, tx)


class Flattened(Wrapped):
    """A transformation made by `flatten`: its leaves, and so those that it freezes, are others."""

    def _seen(self) -> list[Placement]:
        return [x for x in super()._seen() if not freezes(x)]


def _path(params: Any) -> AbstractContextManager[None]:
    """Inside, a vector's random numbers are those of the path of the tree's first leaf."""
    return draws.within(tree.leaves(tree.paths(params))[0])


@factory
def sharded_over(tx: base.GradientTransformation, group: Any = None) -> base.GradientTransformation:
    """Declare that the tree is one process's part of a sharded model.

    Measurements (norms, counts of NaNs, those of `monitor`) are then summed over the processes of a
    group: a global norm covers the whole model, and gates make the same decision in all processes.
    Everything else stays local. Use it for plain tensors that are sharded over processes, each in
    one process only: FullyShardedDataParallel (FSDP1), ZeroRedundancyOptimizer, or a custom
    pipeline. Do not use it for DTensors (fully_shard, tensor parallelism), which need nothing, or
    copies (DDP), for which the sum would be too large.

    Every step performs one all_reduce of a few scalars for each transform that measures. A process
    without parameters, or without gradients for them, contributes zeros. So every process must take
    the same number of steps; if one raises an error, the others wait until their group's timeout.
    An optimizer object steps outside of torch.compile's graphs.

    Args:
        tx: a transformation that consists of one-tensor rules, or a chain of such.
        group: a `torch.distributed` process group; None: the default group, at the step. Nested
            calls sum over each of their groups.

    Returns:
        The transformation with its rules marked. It fuses as tx does, and runs in torch.vmap, in
        torch.func.grad (the gradient of a sum is summed, too), in torch.compile, in `fo.compile`,
        and in the optimizer object.

    Extra arguments, such as a loss, are not summed: pass the same value in all processes.

    Raises:
        TypeError: for a part that does not consist of one-tensor rules: its measurements cannot be
            summed; for a group that is neither a process group nor None.
        ValueError: from init, for a DTensor that a transform measures.
        RuntimeError: from update, without a process group, or outside it.

    Example::

        >>> import torch, functional_optim as fo
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> tx = fo.sharded_over(fo.chain(fo.clip_by_global_norm(1.0), fo.sgd(0.5)))
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([3.0, 4.0]), tx.init(w), w)[0]
        tensor([-0.3000, -0.4000])
        >>> dist.destroy_process_group()
    """
    base.check_transformation("sharded_over", tx, "sharded_over(chain(clip_by_global_norm(1.0)))")
    sharding.check_group("sharded_over", group)

    def refused(part: Any) -> Any:
        raise TypeError(
            "sharded_over takes transformations that consist of one-tensor rules, but got another "
            "one; put sharded_over around the rules inside it, or next to it: "
            "chain(flatten(...), sharded_over(...)), with_schedule(lambda lr: sharded_over(...))."
        )

    return each_placement(
        tx, lambda x: [x._replace(reduce_groups=(*x.reduce_groups, group))], refused
    )


class WithScheduleState(NamedTuple):
    """step: 0-dim int64, finished steps. hyper: the last values, for reading. inner: the recipe's
    state."""

    step: Tensor
    hyper: dict[str, Any]
    inner: Any


@factory
def with_schedule(
    recipe: Callable[..., base.GradientTransformation], **hyperparameters: Any
) -> base.GradientTransformation:
    """Call a recipe at every step with the current values of schedules.

    Most hyperparameters accept a schedule directly: `fo.adamw(lr=schedule)`. Use this for recipes
    that compute with their arguments.

    Args:
        recipe: a function from hyperparameters to a transformation.
        hyperparameters: for the recipe. Schedules, floats and 0-dim tensors, or tuples of them, are
            passed as 0-dim float64 tensors; everything else, also ints, unchanged.

    State: `hyper`, a dict of 0-dim float64 tensors: the values of the last step.

    Leaves that the recipe freezes with its first values are frozen in a chain around it in all
    steps.

    Raises:
        TypeError: if the recipe is not callable.

    Example::

        >>> import torch, functional_optim as fo
        >>> def recipe(lr):
        ...     return fo.chain(fo.add_decayed_weights(0.1 * lr), fo.scale_by_lr(lr))
        >>> tx = fo.with_schedule(recipe, lr=fo.schedules.linear(1.0, 0.0, 4))
        >>> w = torch.zeros(1)
        >>> u, state = tx.update(torch.ones(1), tx.init(w), w)
        >>> u, state = tx.update(torch.ones(1), state, w)
        >>> u, fo.get(state, "lr").item()
        (tensor([-0.7500]), 0.75)
    """
    if not callable(recipe):
        raise TypeError(
            "with_schedule takes a function from hyperparameters to a transformation, but got a "
            f"{type(recipe).__name__}; pass e.g. fo.adamw, not fo.adamw()."
        )
    for name, x in hyperparameters.items():
        if callable(x):
            check_step_function("with_schedule", name, x)
    fixed = {name: x for name, x in hyperparameters.items() if not _moves(x)}

    def values(t: Any, device: torch.device) -> dict[str, Any]:
        def value(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple([value(one) for one in x])
            now = numeric.at(x, t)
            if isinstance(now, Tensor):
                return now.to(device)
            return torch.full((), now, dtype=torch.float64, device=device)

        return {name: value(x) for name, x in hyperparameters.items() if name not in fixed}

    def made(now: dict[str, Any]) -> base.GradientTransformation:
        tx = recipe(**fixed, **now)
        what = "a transformation, such as fo.adamw(lr)"
        base.check_returned("the recipe of with_schedule", tx, what)
        return tx

    def init(params: Any) -> WithScheduleState:
        leaves = tree.leaves(params)
        now = values(1.0, base.default_device(leaves))
        step = base.first_step(leaves)
        return WithScheduleState(step, now, made(now).init(params))

    def update(
        grads: Any, state: WithScheduleState, params: Any = None, **extra: Any
    ) -> tuple[Any, WithScheduleState]:
        t = (state.step + 1).to(torch.float64)
        now = values(t, state.step.device)
        updates, inner = made(now).update(grads, state.inner, params, **extra)
        return updates, WithScheduleState(state.step + 1, now, inner)

    first = recipe(**fixed, **values(1.0, torch.device("cpu")))
    return Wrapped(init, update, first)


def _moves(x: Any) -> bool:
    """May a hyperparameter change while training?"""
    if isinstance(x, tuple):
        return bool(x) and all(map(_moves, x))
    return isinstance(x, (float, Tensor)) or callable(x)
