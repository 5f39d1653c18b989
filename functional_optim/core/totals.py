"""Totals of the measurements of rules: over tensors, over processes, over the parts of a step."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core import modes, sharding
from functional_optim.core.execution import Leaf, measure
from functional_optim.core.first_slots import init_slots
from functional_optim.core.numbers import Numbers
from functional_optim.core.rule import Placement
from functional_optim.core.scalars import Key


class Missing(BaseException):
    """Raised by an update of trees, inside `Totals`, when it measures.

    key: the measurement. parts: the local values.
    """

    def __init__(self, key: Key, parts: Sequence[Sequence[Tensor]]) -> None:
        super().__init__(key)
        self.key = key
        self.parts = parts


class Totals:
    """The totals for an update of trees that is one of several parts of a step.

    An update that runs inside `with totals:` takes the totals of its measurements from `known`, in
    order. At the first unknown one it raises `Missing`. An update is pure, so it can be run again
    when that total has been summed over all parts.

    Args:
        alone: whether no other part measures, so that the local value is the total.
        everyone: whether all scalars advance, even without gradients in this part.
        agenda: the measurements that the caller of the update sums over processes.
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
        """The number of earlier rules of each name; adds these."""
        before = self.passed.copy()
        self.passed.update([placement.name for placement in placements])
        return before

    def next(self) -> Numbers | None:
        """The next total; None if it is unknown."""
        self.asked += 1
        return self.known[self.asked - 1] if self.asked <= len(self.known) else None

    def shut(self, gates: Iterable[Any]) -> bool:
        """Whether a gate excludes a measurement from the sum: one of these, or an outer one."""
        return not all(gate > 0 for gate in (*self.gates, *gates))


def given_totals() -> Totals | None:
    """The `Totals` in which an update runs."""
    if torch.compiler.is_compiling():
        return None
    totals = getattr(_local, "totals", None)
    return None if totals is None or modes.intercepted() else totals


_local = threading.local()


def pass_over(placements: Iterable[Placement]) -> None:
    """Count rules that do not run, since no tensor is stepped: those after them keep their keys."""
    totals = given_totals()
    if totals is not None:
        totals.enter(placements)


def sum_parts(parts: Sequence[Sequence[Tensor]]) -> Numbers:
    """Sum what `reduce` measured on each tensor, element by element, in float64.

    Measurements of sharded tensors are themselves sharded (DTensors): their local shards are summed
    first, and then reduced together.
    """
    columns = list(zip(*parts, strict=True))
    plain = [[x for x in c if not sharding.is_sharded(x)] for c in columns]
    divided = [[x for x in c if sharding.is_sharded(x)] for c in columns]
    if any(divided):
        for own, more in zip(plain, sharding.completed_sums(divided), strict=True):
            own += more
    return tuple(map(_sum, plain))


def _sum(column: Sequence[Tensor]) -> Tensor:
    """The sum of 0-dim tensors, on the device of the first one that is not on the CPU."""
    if len(column) == 1:
        return column[0].to(torch.float64)
    devices = dict.fromkeys([x.device for x in column])
    if len(devices) > 1:
        device = next(device for device in devices if device.type != "cpu")
        column = [x.to(device, non_blocking=True) for x in column]
    return torch.stack(list(column)).to(torch.float64).sum()


def over_groups(placement: Placement, total: Numbers | None) -> Numbers:
    """A measurement, summed over the process groups of its rule. total: None without leaves.

    A process without leaves, or without gradients for them, contributes zeros.
    """
    if total is None:
        total = nothing_measured(placement)
    return (
        sharding.summed_over(total, placement.reduce_groups) if placement.reduce_groups else total
    )


def nothing_measured(placement: Placement) -> Numbers:
    """The total of a rule's measurement without tensors: zeros."""
    rule, p = placement.rule, torch.zeros((1, 1), device="cpu")
    given = rule.numbers_before(1.0, rule.carry or ())
    lookback = None if placement.lookback is None else 0
    alone = Placement(rule, lookback=lookback)
    return (0.0,) * len(measure([alone], Leaf(p, p, [init_slots(rule, p)], [given])))


ReductionOrder = Sequence[tuple[Key, Placement]]


def reduction_order(chains: Iterable[tuple[Sequence[Placement], Sequence[int]]]) -> ReductionOrder:
    """The measurements that rules sum over processes, in an order that is valid for all chains.

    chains: rules, each with its index among the rules of its name.
    """
    known: dict[Key, Placement] = {}
    plans: list[list[Key]] = []
    for placements, counts in chains:
        pairs = zip(placements, counts, strict=True)
        own = {(x.name, n): x for x, n in pairs if x.reduce_groups and x.rule.reduce is not None}
        known.update(own)
        plans.append(list(own))
    order: list[Key] = []
    while plans := [plan for plan in plans if plan]:
        order.append(next_measurement(plans))
        plans = [plan[1:] if plan[0] == order[-1] else plan for plan in plans]
    return [(key, known[key]) for key in order]


def next_measurement(plans: list[list[Key]]) -> Key:
    """The first measurement of a plan that no other plan has later: every part that needs it has
    reached it. plans: the remaining measurements of each part."""
    for key, *_ in plans:
        if all(key not in plan[1:] for plan in plans):
            return key
    names = " and ".join(sorted({plan[0][0] for plan in plans}))
    raise ValueError(
        f"two parameter groups measure {names} in different orders, so no sum over both exists; "
        "put these rules in the same order in both."
    )
