"""The protocol of transformations with local steps and synchronizations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.combinators.commit import as_flag, check_flag, select
from functional_optim.core import base
from functional_optim.core.chain import Wrapped

Settle = Callable[[Any, Any, Any], tuple[Any, Any]]
"""From a mean, a state and parameters to parameters and a state."""


class Synced(Wrapped):
    """A pure transformation with local steps, and synchronizations between them.

    `init` and `update` are those of a local step. After each, a driver (`Replica`) asks:

    offers(state): whether to begin a synchronization, a bool on the host. True until the
    synchronization has ended. offer(state, params): the tree to average over the group. None for a
    leaf that is not averaged in this synchronization. settles(state): whether to end it, a bool on
    the host; at once, or some steps later. settle(mean, state, params, commit): the parameters and
    the state after it. `commit`, a bool or a 0-dim tensor, is the decision of the group; with a
    tensor nothing is read on the host, and one graph serves both decisions. The returned tensors
    share no memory with each other, so in-place steps may follow.

    Args:
        inner: the transformation of a local step.
        init: the first state: a NamedTuple with the fields `inner`, the state of that, and `since`,
            the local steps since the last synchronization, 0-dim int64 on the CPU.
        offers, offer, settles: as above.
        taken, refused: `settle` for either decision. `refused` may only use the structure of the
            mean.
        heals_first: whether a joining replica needs a peer's state before it offers anything.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx, w = fo.local_sgd(fo.sgd(0.5), every=2), torch.zeros(1)
        >>> state = tx.init(w)
        >>> for _ in range(2):
        ...     updates, state = tx.update(-torch.ones(1), state, w)
        ...     w = fo.apply_updates(w, updates)
        >>> tx.offers(state), tx.settles(state)
        (True, True)
        >>> mean = (tx.offer(state, w) + torch.tensor([3.0])) / 2  # with what another offers
        >>> w, state = tx.settle(mean, state, w, commit=True)
        >>> w
        tensor([2.])
    """

    offers: Callable[[Any], bool]
    offer: Callable[..., Any]
    settles: Callable[[Any], bool]
    settle: Callable[[Any, Any, Any, Any], tuple[Any, Any]]
    heals_first: bool
    settled: tuple[Settle, Settle]

    def __new__(
        cls,
        inner: base.GradientTransformation,
        init: Callable[[Any], Any],
        offers: Callable[[Any], bool],
        offer: Callable[..., Any],
        settles: Callable[[Any], bool],
        taken: Settle,
        refused: Settle,
        heals_first: bool = False,
    ) -> Synced:
        known = inner.extra

        def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            base.check_extra(extra, known)
            updates, mine = inner.update(grads, state.inner, params, **extra)
            return updates, advanced(state, mine)

        def settle(mean: Any, state: Any, params: Any, commit: Any) -> tuple[Any, Any]:
            if not isinstance(commit, Tensor):
                return (taken if as_flag(commit) else refused)(mean, state, params)
            check_flag(commit)
            yes, no = taken(mean, state, params), refused(mean, state, params)
            return tree.map(lambda a, b: a if a is b else select(commit, a, b), yes, no)

        self = super().__new__(cls, init, update, inner)
        self.offers = offers
        self.offer = offer
        self.settles = settles
        self.settle = settle
        self.heals_first = heals_first
        self.settled = taken, refused
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        functions = self.init, self.offers, self.offer, self.settles, *self.settled
        return self.inner, *functions, self.heals_first


def advanced(state: Any, inner: Any) -> Any:
    """The state after a local step, with the new state of the inner transformation."""
    return base.replaced(state, inner=inner, since=state.since + 1)


def no_steps() -> Tensor:
    """A count on the CPU, where reading it is cheap."""
    return torch.zeros((), dtype=torch.int64, device="cpu")


def copied(values: Any) -> Any:
    """A copy of a tree."""
    return tree.map(torch.clone, values)


def check_alone(name: str, tx: Any, example: str) -> None:
    """Raise an error unless it is a transformation, or if it contains one with synchronizations."""
    base.check_transformation(name, tx, example)
    if holds_synced(tx):
        raise ValueError(
            f"{name} got local_sgd(…) or diloco(…) inside another transformation, which does not "
            "synchronize it; put the others inside it: local_sgd(chain(…), every=16)."
        )


def holds_synced(tx: base.GradientTransformation) -> bool:
    """Whether a transformation has synchronizations, which a `Replica` makes."""
    return isinstance(tx, Synced) or any(map(holds_synced, tx.children))
