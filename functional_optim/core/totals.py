"""The totals of an update of whole trees that is one of several parts of a step."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core import modes
from functional_optim.core.rule import Numbers, Placement
from functional_optim.core.scalars import Key


class Missing(BaseException):
    """Raised by an update of whole trees, inside `Totals`, where it measures.

    key: the measurement. parts: what it has found here.
    """

    def __init__(self, key: Key, parts: Sequence[Sequence[Tensor]]) -> None:
        super().__init__(key)
        self.key = key
        self.parts = parts


class Totals:
    """The totals for an update of whole trees that is one of several parts of a step.

    An update that runs inside `with totals:` takes the totals of what it measures from `known`, in
    the order in which it asks. At the first one that is not there it is left by `Missing`. An
    update is pure, so it can be run again when that total has been summed over all parts.

    Args:
        alone: whether no other part measures, so that what is found here is the total.
        everyone: whether all numbers go on, whatever gradients there are in this part.
        agenda: the measurements that whoever runs the update sums over processes.
    """

    def __init__(
        self, *, alone: bool = False, everyone: bool = False, agenda: Iterable[Key] = ()
    ) -> None:
        self.alone = alone
        self.everyone = everyone
        self.agenda = frozenset(agenda)
        self.known: list[Numbers] = []
        self.asked = 0
        self.passed: Counter[str] = Counter()
        self.gates: list[Any] = []

    def __enter__(self) -> None:
        self.asked = 0
        self.passed.clear()
        self.gates.clear()
        self.outer = getattr(_local, "totals", None)
        _local.totals = self

    def __exit__(self, *error: object) -> None:
        _local.totals = self.outer

    def enter(self, placements: Iterable[Placement]) -> Counter[str]:
        """The number of rules of each name before these; adds these."""
        before = self.passed.copy()
        self.passed.update([placement.name for placement in placements])
        return before

    def next(self) -> Numbers | None:
        """The total that is asked for now; None if it is not known."""
        self.asked += 1
        return self.known[self.asked - 1] if self.asked <= len(self.known) else None

    def shut(self, gates: Iterable[Any]) -> bool:
        """Whether a gate keeps a measurement out of the sum: one of these, or one further out."""
        return not all(gate > 0 for gate in (*self.gates, *gates))


def given_totals() -> Totals | None:
    """The `Totals` inside of which an update runs, where it could be left."""
    if torch.compiler.is_compiling():
        return None
    totals = getattr(_local, "totals", None)
    return None if totals is None or modes.intercepted() else totals


_local = threading.local()
