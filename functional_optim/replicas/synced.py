"""Transformations that step alone for a while, and then synchronize: their protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from functional_optim import base


class Synced(base.GradientTransformation):
    """A transformation with local steps, and synchronizations between them; all of it pure.

    `init` and `update` are those of a step alone. After each, a driver (`Replica`) asks:

    offers(state): does a synchronization begin now? On the host: a bool.
    offer(state, params): the tree to average over the group.
    settles(state): does it end now? On the host: a bool. At once, or some steps later.
    settle(mean, state, params, commit): the parameters and the state after it; `commit`, a bool or
        a 0-dim tensor, is what the group has decided.
    """

    offers: Callable[[Any], bool]
    offer: Callable[[Any, Any], Any]
    settles: Callable[[Any], bool]
    settle: Callable[[Any, Any, Any, Any], tuple[Any, Any]]

    def __new__(
        cls,
        init: Callable[[Any], Any],
        update: Callable[..., tuple[Any, Any]],
        offers: Callable[[Any], bool],
        offer: Callable[[Any, Any], Any],
        settles: Callable[[Any], bool],
        settle: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
    ) -> Synced:
        self = super().__new__(cls, init, update)
        self.offers = offers
        self.offer = offer
        self.settles = settles
        self.settle = settle
        return self
