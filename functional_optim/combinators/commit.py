"""Steps that may be refused, and steps that may be undone."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.core import base, modes
from functional_optim.core.chain import Wrapped
from functional_optim.core.factory import factory
from functional_optim.core.sparse import on_values


class CommitIf(Wrapped):
    """A transformation made by `commit_if`."""


@factory
def commit_if(tx: base.GradientTransformation) -> CommitIf:
    """Take or refuse a step according to a flag, such as the vote of a group of replicas.

    `update(grads, state, params, commit=flag)` is that of tx if the flag is true. If it is false,
    the updates are zero (-0.0, which changes no bit of any parameter) and the state is the old one,
    bitwise, even if gradients are NaN. The count of steps does not advance, so neither do
    schedules.

    Args:
        tx: a transformation. Its extra arguments are passed on.

    Returns:
        A transformation whose `update` needs `commit`: a bool, or a 0-dim tensor, bool or number.
        With a bool, a refused step computes nothing. Inside torch.compile and vmap, pass a tensor:
        the update is computed and then selected, and one graph serves both decisions. `fo.compile`
        accepts both, and reads the flag before it runs anything.

    State: that of tx.

    Raises:
        TypeError: from update, without `commit` or for a flag of another type.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.commit_if(fo.sgd(0.5))
        >>> w, bad = torch.ones(2), torch.full((2,), float("nan"))
        >>> state = tx.init(w)
        >>> refused, state = tx.update(bad, state, w, commit=torch.tensor(False))
        >>> taken, state = tx.update(torch.ones(2), state, w, commit=torch.tensor(True))
        >>> refused, taken, state.step
        (tensor([-0., -0.]), tensor([-0.5000, -0.5000]), tensor(1))
    """
    base.check_transformation("commit_if", tx, "commit_if(adam())")
    known = tx.extra
    nothing = partial(on_values, _nothing)

    def update(
        grads: Any, state: Any, params: Any = None, *, commit: Any = base.NEEDED, **extra: Any
    ) -> tuple[Any, Any]:
        base.check_extra(extra, known)
        check_flag(commit)
        if "commit" in known:
            extra["commit"] = commit
        if not isinstance(commit, Tensor):
            if as_flag(commit):
                return tx.update(grads, state, params, **extra)
            like = grads if params is None else params
            if not tx.reads_gradients:
                return tree.map(nothing, like), state
            kinds = tree.map(_as_given, like, grads)  # of a sparse gradient, the update is sparse
            return tree.map(nothing, kinds), state
        # NaN times the zero gradient of a selection would be a NaN in meta-gradients
        grads = tree.map(
            partial(on_values, lambda g: select(commit, g, torch.zeros_like(g))), grads
        )
        updates, new = tx.update(grads, state, params, **extra)
        updates = tree.map(partial(on_values, lambda u: select(commit, u, _nothing(u))), updates)
        return updates, tree.map(lambda a, b: select(commit, a, b), new, state)

    return CommitIf(tx.init, update, tx)


def _as_given(x: Any, g: Any) -> Any:
    """What has the form of an update: none without a gradient, sparse if that is."""
    if isinstance(g, Tensor) and g.layout is not torch.strided:
        return g
    return None if g is None else x


def _nothing(like: Tensor) -> Tensor:
    """An update that changes no bit: -0.0 + 0.0 would be 0.0, but x + -0.0 is x."""
    return torch.full_like(like, complex(-0.0, -0.0) if like.is_complex() else -0.0)


def select(commit: Tensor, taken: Tensor, refused: Tensor) -> Tensor:
    """One of two tensors of the same shape, selected by a flag; a NaN of the other has no
    effect."""
    flag = commit.reshape(()) if commit.dtype == torch.bool else commit.reshape(()) > 0
    return torch.where(flag.to(taken.device), taken, refused)


def as_flag(commit: Any) -> bool:
    """A commit flag, read on the host."""
    check_flag(commit)
    return bool(commit > 0)


def check_flag(commit: Any) -> None:
    """Raise TypeError unless it is one flag."""
    base.check_needed("commit_if", commit=commit)
    if isinstance(commit, Tensor) and commit.numel() != 1:
        raise TypeError(
            f"commit must be one flag, but is a tensor of shape {tuple(commit.shape)}; pass a bool "
            "or a 0-dim tensor."
        )
    if not isinstance(commit, (bool, int, float, Tensor)):
        raise TypeError(
            f"commit must be a bool or a 0-dim tensor, but is a {type(commit).__name__}; pass "
            "decision.committed."
        )


class Moment(NamedTuple):
    """Parameters and state before a step."""

    params: Any
    inner: Any


class SnapshotsState(NamedTuple):
    """The state of `keep_snapshots`.

    inner: that of the wrapped transformation.
    kept: 0-dim int64, number of steps that can be undone.
    past: one `Moment` for each, the latest first; unused ones are those of the start.
    """

    inner: Any
    kept: Tensor
    past: tuple[Moment, ...]


@factory
def keep_snapshots(tx: base.GradientTransformation, last: int = 1) -> base.GradientTransformation:
    """Store parameters and state from before each of the last steps, for `rollback`.

    Nothing is copied: the state references the trees of those steps. So do not write into
    parameters in place; `add_` would also change the snapshots. `fo.compile(tx)` copies what it
    must.

    Args:
        tx: a transformation.
        last: number of steps that can be undone, ≥ 1. Memory: `last` times that of parameters and
            state.

    State: a `SnapshotsState`.

    Raises:
        ValueError: for a `last` below 1; from update, without params.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.keep_snapshots(fo.sgd(1.0), last=2)
        >>> w = torch.zeros(1)
        >>> state = tx.init(w)
        >>> for g in (1.0, 2.0):
        ...     u, state = tx.update(torch.tensor([g]), state, w)
        ...     w = fo.apply_updates(w, u)
        >>> w, fo.rollback(state)[0], fo.rollback(state, steps=2)[0]
        (tensor([-3.]), tensor([-1.]), tensor([0.]))
    """
    base.check_transformation("keep_snapshots", tx, "keep_snapshots(adam())")
    numeric.check_count("keep_snapshots", 1, last=last)
    known = tx.extra

    def init(params: Any) -> SnapshotsState:
        inner = tx.init(params)
        count = base.first_step(tree.leaves(params))
        return SnapshotsState(inner, count, (Moment(params, inner),) * last)

    def update(
        grads: Any, state: SnapshotsState, params: Any = None, **extra: Any
    ) -> tuple[Any, SnapshotsState]:
        base.check_extra(extra, known)
        base.check_passed(params)
        updates, inner = tx.update(grads, state.inner, params, **extra)
        past = (Moment(params, state.inner), *state.past[:-1])
        return updates, SnapshotsState(inner, (state.kept + 1).clamp(max=last), past)

    return Wrapped(init, update, tx)


def rollback(state: SnapshotsState, steps: int = 1) -> tuple[Any, SnapshotsState]:
    """Undo the last steps of a transformation inside `keep_snapshots`.

    Args:
        state: its state.
        steps: number of steps to undo, 1 ≤ steps ≤ `state.kept`.

    Returns:
        The parameters and the state from before these steps, bitwise. Older steps can still be
        undone.

    Raises:
        TypeError: for any other state.
        ValueError: if fewer steps are kept; of stacked states, in any of them. Inside torch.compile
            and vmap, where the count is not known, only `steps` ≤ `last` is checked.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.keep_snapshots(fo.adam(0.1))
        >>> w = torch.ones(1)
        >>> u, state = tx.update(torch.ones(1), tx.init(w), w)
        >>> w, state = fo.rollback(state)
        >>> w, state.inner.step
        (tensor([1.]), tensor(0))
    """
    if not isinstance(state, SnapshotsState):
        raise TypeError(
            f"rollback takes the state of keep_snapshots, but got a {type(state).__name__}; wrap "
            "the transformation: keep_snapshots(adam())."
        )
    numeric.check_count("rollback", 1, steps=steps)
    unknown = modes.traced()
    most = len(state.past) if unknown else int(state.kept.min())
    if steps > most:
        raise ValueError(
            f"rollback can undo {most} step{'s' * (most != 1)} of this state, but got "
            f"steps={steps}; keep_snapshots(tx, last=…) says how many are kept."
        )
    there = state.past[steps - 1]
    left = state.past[steps:]
    past = (*left, *[state.past[-1]] * (len(state.past) - len(left)))
    return there.params, SnapshotsState(there.inner, state.kept - steps, past)
