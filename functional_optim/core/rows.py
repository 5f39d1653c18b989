"""The leaves of a tree in one pure step: measurements and updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.execution import Leaf, measure, run_all_stored, slots_without_gradient
from functional_optim.core.first_slots import explain
from functional_optim.core.numbers import Numbers
from functional_optim.core.rule import Placement, turns_of
from functional_optim.core.scalars import Caster, Key, StepScalars
from functional_optim.core.sparse import densified, run_rows
from functional_optim.core.storage import Slots
from functional_optim.core.totals import Missing, Totals, nothing_measured, over_groups, sum_parts
from functional_optim.core.traits import check_rules, for_shards, trial_of, unchecked


class Kind(NamedTuple):
    """The common properties of all leaves with the same rules of a chain."""

    placements: tuple[Placement, ...]
    at: tuple[int, ...]
    """Their indices among the chain's rules."""
    columns: tuple[int, ...]
    """The indices of their slots among all of the chain's, rule by rule."""
    ends: tuple[tuple[int, int], ...]
    """For each rule, the range of its slots in `columns`."""
    whole: bool
    """Whether these are all of the chain's slots, in their order."""

    @classmethod
    def of(
        cls,
        placements: tuple[Placement, ...],
        at: tuple[int, ...],
        names: Sequence[tuple[str, ...]],
        keys: tuple[str, ...],
    ) -> Kind:
        """Rules and the names of their slots. keys: those of the whole chain."""
        ends: list[tuple[int, int]] = []
        columns: list[int] = []
        for own in names:
            ends.append((len(columns), len(columns) + len(own)))
            columns += [keys.index(name) for name in own]
        return cls(placements, at, tuple(columns), tuple(ends), columns == list(range(len(keys))))

    def pick(self, slots: tuple[Any, ...]) -> list[Slots]:
        """The slots of each rule, out of all of the chain's."""
        own = slots if self.whole else tuple([slots[j] for j in self.columns])
        return [own[start:end] for start, end in self.ends]

    def put(self, slots: tuple[Any, ...], new: Sequence[Slots]) -> list[Any]:
        """All of a chain's slots, with new ones of these rules."""
        flat = [x for own in new for x in own]
        if self.whole:
            return flat
        kept = list(slots)
        for j, x in zip(self.columns, flat, strict=True):
            kept[j] = x
        return kept


class Row(NamedTuple):
    """A leaf in a step. slots, turns: for each rule that acts on it."""

    kind: Kind
    p: Tensor
    g: Any
    slots: list[Slots]
    turns: tuple[int, ...] = ()


def in_turns(rows: Sequence[Row | None]) -> list[Row | None]:
    """The leaves of a tree with their turns."""
    live = [row for row in rows if row is not None]
    turns = iter(turns_of([(x.kind.placements, x.kind.at, x.p) for x in live]))
    return [None if row is None else row._replace(turns=next(turns)) for row in rows]


class RowGroup(NamedTuple):
    """The rows of one kind that have gradients. at: their indices among all of the tree."""

    kind: Kind
    at: list[int]
    rows: list[Row]

    def reindexed(self, at: tuple[int, ...]) -> RowGroup:
        """The same, if only these of the chain's rules have scalars."""
        mine = tuple([at.index(i) for i in self.kind.at])
        return self._replace(kind=self.kind._replace(at=mine))

    def leaves(self, cast: Caster) -> list[Leaf]:
        """The leaves, with the numbers of their rules out of the chain's first."""
        known: dict[Any, list[Numbers]] = {}
        leaves = []
        for _, p, g, slots, turns in self.rows:
            where = (p.dtype, p.device)
            if where not in known:
                numbers = cast(p)
                known[where] = [numbers[i] for i in self.kind.at if i < len(numbers)]
            leaves.append(Leaf(g, p, slots, known[where], turns=turns))
        return leaves


def grouped(rows: Sequence[Row | None]) -> list[RowGroup]:
    """The rows with gradients, grouped by kind."""
    groups: dict[tuple[int, ...], RowGroup] = {}
    for k, row in zip(range(len(rows)), rows, strict=True):
        if row is not None and row.g is not None:
            kind = row.kind
            if kind.at not in groups:
                groups[kind.at] = RowGroup(kind, [], [])
            groups[kind.at].at.append(k)
            if row.g.layout is not torch.strided:
                row = row._replace(g=densified(kind.placements, row.g))
            groups[kind.at].rows.append(row)
    return list(groups.values())


def check_groups(groups: list[RowGroup], step: StepScalars) -> None:
    """Raise ValueError for an unsupported rule, the first time that it is run.

    The rules behind a gate are checked with the scalars of a step in which it is open. step: before
    its first scalar.
    """
    numbers: list[Numbers] | None = None
    for group in groups:
        kinds = {(row.p.dim(), row.p.dtype): row.p for row in group.rows}
        for p in kinds.values():
            if unchecked(group.kind.placements, p):
                if numbers is None:
                    always = [x._replace(gate=0) for x in step.placements]
                    trial = (always, step.time, step.carry, step.extra, step.together)
                    numbers = trial_of(StepScalars(*trial))
                check_rules(group.kind.placements, [numbers[i] for i in group.kind.at], p)


def measured(groups: list[RowGroup], step: StepScalars) -> Numbers:
    """The measurement of the next rule of a step, over all leaves on which it acts."""
    placement = step.placements[len(step.numbers)]
    parts = _parts(groups, step)
    return over_groups(placement, sum_parts(parts) if parts else None)


def summed_elsewhere(
    groups: list[RowGroup], step: StepScalars, key: Key, totals: Totals
) -> Numbers:
    """The same if other trees contribute; raises `Missing` if their parts are unknown."""
    i = len(step.numbers)
    placement = step.placements[i]
    if placement.reduce_groups and key not in totals.agenda:
        return measured(groups, step)
    known = totals.next()
    if known is None:
        shut = totals.shut([step.opened(i)] if placement.gate else [])
        raise Missing(key, [] if shut else _parts(groups, step))
    return known or nothing_measured(placement)


def _parts(groups: list[RowGroup], step: StepScalars) -> list[tuple[Tensor, ...]]:
    """The measurements of the next rule of a step on each leaf on which it acts."""
    if step.is_shut():
        return []
    numbers = step.to_measure()
    last = len(numbers) - 1
    cast = Caster(numbers)
    parts: dict[int, tuple[Tensor, ...]] = {}
    for group in groups:
        if last in group.kind.at:
            mine = group.kind.placements[: group.kind.at.index(last) + 1]
            mine = _on_shards(mine, group)
            for k, leaf in zip(group.at, group.leaves(cast), strict=True):
                parts[k] = measure(mine, leaf)
    return [parts[k] for k in sorted(parts)]


def stepped(groups: list[RowGroup], cast: Caster) -> dict[int, tuple[Any, list[Slots]]]:
    """For each leaf with a gradient its update and its new slots."""
    results: dict[int, tuple[Any, list[Slots]]] = {}
    for group in groups:
        placements, leaves = _on_shards(group.kind.placements, group), group.leaves(cast)
        dense = [leaf for leaf in leaves if leaf.g.layout is torch.strided]
        run = run_all_stored if torch.compiler.is_compiling() else _explained
        found = iter(run(placements, dense))
        for k, leaf in zip(group.at, leaves, strict=True):
            strided = leaf.g.layout is torch.strided
            results[k] = next(found) if strided else run_rows(placements, leaf)
    return results


def _on_shards(placements: Sequence[Placement], group: RowGroup) -> Sequence[Placement]:
    """The rules, those of others as DTensors need them."""
    if all(x.rule.own for x in placements):
        return placements
    return for_shards(placements, [row.p for row in group.rows])


def _explained(placements: Sequence[Placement], leaves: Sequence[Leaf]) -> Any:
    """`run_all_stored`, with a ValueError for slots of other parameters."""
    try:
        return run_all_stored(placements, leaves)
    except Exception:
        for leaf in leaves:
            explain([x.rule for x in placements], leaf.p, leaf.slots)
        raise


def absent_slots(row: Row, at: tuple[int, ...], numbers: list[Numbers]) -> list[Slots]:
    """The slots of a leaf without a gradient. at: the rules that have these numbers."""
    new = list(row.slots)
    for k, (i, placement) in enumerate(zip(row.kind.at, row.kind.placements, strict=True)):
        if placement.rule.runs.absent is not None and i in at:
            given = numbers[at.index(i)]
            new[k] = slots_without_gradient(placement.rule, row.p, new[k], given)
    return new
