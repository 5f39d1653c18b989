"""The plan of a step of trees, for `compile`: its numbers are in a functional state."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.core import memory
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.lift import State, count_keys
from functional_optim.core.numbers import Numbers
from functional_optim.core.paths import chosen
from functional_optim.core.recording import Kept
from functional_optim.core.storage import present
from functional_optim.core.totals import reduction_order
from functional_optim.engine.executor import How, Write
from functional_optim.engine.guards import TensorGuard, version_of
from functional_optim.engine.missing_grad import WithoutGradient, place_of
from functional_optim.engine.plan import (
    PlanEntry,
    PlanLeaf,
    StepContext,
    StepPlan,
    filling,
    turns_in,
)


class TreeNumbers:
    """The numbers of a functional state: its step count, carried scalars and hyperparameters.

    captured: whether the device's numbers count, as replays change them without the host. recorded:
    slots that an init recorded by autograd has made. fixed: hyperparameters that do not change,
    written again if somebody else has written them, or the state has others.
    """

    def __init__(self, state: State, *, captured: bool = False) -> None:
        self.captured = captured and state.step.device.type != "cpu"
        self.recorded: list[Tensor] = []
        self.fixed: dict[str, float] = {}
        self.noted: tuple[Any, list[Tensor], list[int]] = (None, [], [])
        """The hyperparameters of the last step, and those of them that do not change with their
        versions."""
        self.renews = True
        self.known: dict[str, Known] = {}
        self.read(state)

    def read(self, state: State) -> None:
        """Take in the state of a step.

        The host reads the numbers of a device only if somebody else has written them since the last
        step, as torch's version counters tell. Its own it always reads: collectives, `x.data` and
        other processes write without raising a version.
        """
        self.state = state
        self.written: dict[str, Any] = {}
        self.time = self._read(COUNT, state.step) + 1
        self.carry = {key: self._read(key, x) for key, x in state.carry.items()}

    def _read(self, key: str, x: Tensor) -> Any:
        if self.captured:
            return numeric.float64(x)
        tensor, version, value = self.known.get(key, UNKNOWN)
        if tensor is not x or version != version_of(x):
            return float(x.item())
        return numeric.float64(x) if value is None else value

    def writing(self, key: str, value: Any) -> Write:
        """The write of a carried scalar."""
        self.written[key] = value
        return filling(self.state.carry[key], value)

    def writes(self) -> list[Write]:
        """The writes of what all leaves share."""
        self.written[COUNT] = self.time
        writes: list[Write] = [filling(self.state.step, self.time)]
        hyper, (known, tensors, versions) = self.state.hyper, self.noted
        self.renews = hyper is not known or list(map(VERSION, tensors)) != versions
        if self.renews:
            writes += [filling(hyper[key], value) for key, value in self.fixed.items()]
            writes += [slot.detach_ for slot in self.recorded]  # the step itself was not recorded
        return writes

    def finish(self) -> None:
        """Note what was written."""
        if self.renews:
            self.recorded, hyper = [], self.state.hyper
            tensors = [hyper[key] for key in self.fixed]
            if any(x.is_inference() for x in tensors):  # which have no versions
                tensors, hyper = [], None
            self.noted = hyper, tensors, list(map(VERSION, tensors))
        if not self.captured and self.state.step.device.type != "cpu":
            for key, value in self.written.items():
                x = self.state.step if key is COUNT else self.state.carry[key]
                self.known[key] = x, version_of(x), _stored(value, x)


VERSION = attrgetter("_version")
"""The version counter of a tensor."""

COUNT = ""
"""Stands for the step count among the keys of carried scalars."""


Known = tuple[Tensor | None, Any, float | None]
"""A number that a step has written: its tensor, the version of that, and the value as it is stored,
or None if only the device knows it. A plain tuple: one is made in each step."""

UNKNOWN: Known = (None, 0, None)


def _stored(value: Any, x: Tensor) -> float | None:
    """A number as a tensor keeps it, if the host knows it."""
    if not isinstance(value, Tensor):
        narrow = x.dtype is torch.float32
        return float(ctypes.c_float(value).value if narrow else value)
    return value.item() if value.device.type == "cpu" else None


class TreeEntry(PlanEntry):
    """Leaves of a tree on which the same rules act.

    changing: the hyperparameters that may have another value in every step, with the index of their
    rule.
    """

    def __init__(
        self,
        tx: Leafwise,
        leaves: list[PlanLeaf],
        places: list[int] | None,
        how: How,
        numbers: TreeNumbers,
        kept: Kept,
    ) -> None:
        super().__init__(tx, leaves, places, how, kept=kept)
        self.numbers = numbers
        self.idle: list[Numbers] = [()] * len(tx.layout.carry)
        self.changing: list[tuple[str, int, numeric.Hyper]] = []
        placements, stored = self.tensors.placements, numbers.state.hyper
        for i, (placement, own) in enumerate(zip(placements, tx.layout.hyper, strict=True)):
            for key, (_, value) in zip(own, placement.rule.each_hyper(), strict=True):
                if key in stored and numeric.is_static(value):
                    numbers.fixed[key] = value
                elif key in stored:
                    self.changing.append((key, i, value))

    def time(self) -> Any:
        """The number of this step."""
        return self.numbers.time

    def carry(self) -> list[Numbers]:
        """What each rule carries from its last step."""
        stored = self.numbers.carry
        if not stored:
            return self.idle
        return [tuple([stored[key] for key in keys]) for keys in self.tx.layout.carry]

    def writes(self, context: StepContext) -> list[Write]:
        """The writes of what each rule carries to its next step, and of its hyperparameters."""
        state, writes = self.numbers.state, []
        if state.carry:
            writes += [self.numbers.writing(k, x) for k, x in self.carried(context)]
        for key, i, value in self.changing:
            now = numeric.at(value, context.time_of(i))
            writes.append(filling(state.hyper[key], now))
        return writes


class TreePlan(StepPlan):
    """The plan of a step of trees, for all steps with the same tensors.

    Raises ValueError, when it is made, if tensors that are written share memory.
    """

    def __init__(
        self,
        tx: Leafwise,
        grads: Any,
        state: Any,
        params: Any,
        how: How,
        kept: Kept,
        *,
        captured: bool = False,
    ) -> None:
        self.kept = kept
        for key in count_keys(tx.placements, tx.layout):
            if state.carry[key].dtype is not torch.float64:
                state.carry[key] = state.carry[key].to(torch.float64)
        self.keys = tx.layout.keys
        self.structure, self.outline = tree.structure(params), tree.outline(params)
        trees = [grads, params, *[state.slots[key] for key in self.keys]]
        given, *columns = tree.places(self.structure, *trees)
        self.given = [g for g in given if g is not None]
        check_apart(self.keys, params, given, columns)
        leaves, *slots = [[x for x in column if isinstance(x, Tensor)] for column in columns]
        self.guard = TensorGuard(given, leaves, [*chain(*slots)], tuple(chain(*columns)))
        self.given = list(map(self.guard.apart, self.given))
        self.numbers = TreeNumbers(state, captured=captured)
        slots = [dict(zip(self.keys, row, strict=True)) for row in zip(*columns[1:], strict=True)]
        items = list(tree.items(params))
        turns = turns_in({0: tx}, [(0, path, p) for path, p in items])
        rows = [
            PlanLeaf(path, p, g, own, its)
            for (path, p), g, own, its in zip(
                items, given, slots or [{}] * len(given), turns, strict=True
            )
        ]
        entries = self._entries(tx, rows, how if self.guard.dense else "apart")
        order = reduction_order([(tx.placements, tx.layout.counts)]) if tx.communicates else ()
        super().__init__(entries, _absent(tx, rows, entries), order)

    def _entries(self, tx: Leafwise, rows: list[PlanLeaf], how: How) -> list[TreeEntry]:
        """Leaves on which the same rules act, together."""
        members: dict[Leafwise, list[tuple[int, PlanLeaf]]] = {}
        live = [leaf for leaf in rows if leaf.g is not None]
        for i, leaf in enumerate(live):
            part = tx.on(leaf.name, leaf.p)
            if part is not None:
                members.setdefault(part, []).append((i, leaf))
        entries = []
        for part, some in members.items():
            places = [i for i, _ in some] if len(some) < len(live) else None
            leaves = [leaf for _, leaf in some]
            entry = TreeEntry(part, leaves, places, how, self.numbers, self.kept)
            slots = [x for row in entry.tensors.slots for x in present(row)]
            self.numbers.recorded += [slot for slot in slots if slot.grad_fn is not None]
            if how != "apart":
                entry.tensors.written += slots
            entries.append(entry)
        if tx.communicates:  # all numbers go on, those of rules that act on nothing here too
            entries.append(TreeEntry(tx, [], [], how, self.numbers, self.kept))
        return entries

    def gradients(self, grads: Any, state: Any, params: Any) -> list[Tensor] | None:
        """The gradients, if the tensors are the same and the gradients like those."""
        try:
            slots = [state.slots[key] for key in self.keys]
        except (TypeError, KeyError, AttributeError):
            return None
        return self.guard.trees(self.structure, self.outline, grads, params, *slots)


def check_apart(
    keys: Sequence[str], params: Any, given: list[Any], columns: list[list[Any]]
) -> None:
    """Raise ValueError if two tensors that are written share memory.

    given: the gradients. columns: the parameters, and the slots under each key.
    """
    live = [i for i, g in enumerate(given) if g is not None]
    some = [(i, k) for i in live for k, own in enumerate(columns) if own[i] is not None]

    def name(at: int) -> str:
        i, k = some[at]
        path = [path for path, _ in tree.items(params)][i]
        whose = f"parameter {path!r}"
        return whose if k == 0 else f"the slot {keys[k - 1]!r} of {whose}"

    memory.check_apart([columns[k][i] for i, k in some], name)


def _absent(
    tx: Leafwise, rows: list[PlanLeaf], entries: Sequence[PlanEntry]
) -> list[WithoutGradient]:
    """The leaves without a gradient, for the rules whose slots go on there, too."""
    found = []
    carries = [entry.tx.layout.carry for entry in entries]
    for (placement, carry), keys in zip(
        zip(tx.placements, tx.layout.carry, strict=True), tx.layout.slots, strict=True
    ):
        mine = [
            (leaf.p, tuple([leaf.slots[key] for key in keys]))
            for leaf in (rows if placement.rule.runs.absent else ())
            if leaf.g is None and chosen(placement.where, leaf.name, leaf.p)
        ]
        place = place_of(carry, carries) if mine else None
        found += [] if place is None else [WithoutGradient(*place, mine)]
    return found
