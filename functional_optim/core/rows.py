"""The leaves of a tree in one step: what they measure, and how they are stepped, purely."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.execution import (
    Leaf,
    measure,
    run_all_stored,
    run_rows,
    slots_without_gradient,
)
from functional_optim.core.rule import Numbers, Placement
from functional_optim.core.scalars import (
    Caster,
    Key,
    Missing,
    StepScalars,
    Totals,
    nothing_measured,
    over_groups,
    sum_parts,
)
from functional_optim.core.storage import Slots
from functional_optim.core.turns import turns_of


class Row(NamedTuple):
    """A leaf in a step.

    at: which of the chain's rules act on it. placements, names, turns: of these.
    """

    placements: tuple[Placement, ...]
    names: tuple[tuple[str, ...], ...]
    at: tuple[int, ...]
    p: Tensor
    g: Any
    slots: list[Slots]
    turns: tuple[int, ...] = ()

    def leaf(self, cast: Caster) -> Leaf:
        """The leaf, with the numbers of its rules out of the chain's first."""
        numbers = cast(self.p)
        own = [numbers[i] for i in self.at if i < len(numbers)]
        return Leaf(self.g, self.p, self.slots[: len(own)], own, turns=self.turns)


def in_turns(rows: list[Row | None]) -> list[Row | None]:
    """The leaves of a tree with their turns."""
    turns = iter(turns_of([(x.placements, x.at, x.p) for x in rows if x is not None]))
    return [None if row is None else row._replace(turns=next(turns)) for row in rows]


def measured(rows: list[Row | None], step: StepScalars) -> Numbers:
    """The measurement of the next rule of a step, over all leaves on which it acts."""
    placement = step.placements[len(step.numbers)]
    parts = _parts(rows, step)
    return over_groups(placement, sum_parts(parts) if parts else None)


def summed_elsewhere(
    rows: list[Row | None], step: StepScalars, key: Key, totals: Totals
) -> Numbers:
    """The same where other trees have a part in it; raises `Missing` if theirs is not known."""
    i = len(step.numbers)
    placement = step.placements[i]
    if placement.reduce_groups and key not in totals.agenda:
        return measured(rows, step)
    known = totals.next()
    if known is None:
        shut = totals.shut([step.opened(i)] if placement.gate else [])
        raise Missing(key, [] if shut else _parts(rows, step))
    return known or nothing_measured(placement.rule)


def _parts(rows: list[Row | None], step: StepScalars) -> list[tuple[Tensor, ...]]:
    """The measurements of the next rule of a step on each leaf on which it acts."""
    if step.is_shut():
        return []
    numbers = step.to_measure()
    there = [row for row in rows if row is not None and len(numbers) - 1 in row.at]
    cast = Caster(numbers)
    parts = []
    for row in there:
        leaf = row.leaf(cast)
        parts.append(measure(row.placements[: len(leaf.numbers)], leaf))
    return parts


def stepped(rows: list[Row | None], cast: Caster) -> list[tuple[Any, dict[str, Any]]]:
    """Each leaf's update and new slots by name."""
    results: list[tuple[Any, dict[str, Any]]] = [(None, {})] * len(rows)
    groups: dict[tuple[int, ...], list[int]] = {}

    def keep(k: int, row: Row, u: Any, new: list[Slots]) -> None:
        named = zip(row.names, new, strict=True)
        results[k] = (u, {key: x for own, mine in named for key, x in zip(own, mine, strict=True)})

    for k, row in enumerate(rows):
        if row is None:
            continue
        if row.g.layout is torch.strided:
            groups.setdefault(row.at, []).append(k)
        else:
            keep(k, row, *run_rows(row.placements, row.leaf(cast)))
    for members in groups.values():
        mine = [row for k in members if (row := rows[k]) is not None]
        leaves = [row.leaf(cast) for row in mine]
        for k, row, result in zip(
            members, mine, run_all_stored(mine[0].placements, leaves), strict=True
        ):
            keep(k, row, *result)
    return results


def absent_slots(row: Row, at: tuple[int, ...], numbers: list[Numbers]) -> dict[str, Any]:
    """The slots by name of a leaf without a gradient. at: the rules that have these numbers."""
    new: dict[str, Any] = {}
    for i, (rule, *_), names, mine in zip(
        row.at, row.placements, row.names, row.slots, strict=True
    ):
        if rule.absent is not None and i in at:
            kept = slots_without_gradient(rule, row.p, mine, numbers[at.index(i)])
            new.update(zip(names, kept, strict=True))
    return new
