"""Counts of the optimizer that are stored in the state of each parameter, in torch's format.

The carried scalars of a shared rule (gates, plateaus, measurements) are equal in all parameters on
which it acts. They advance in each step in which one of these has a gradient, also for those
without one. A parameter whose first gradient comes later receives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_optim import kernels, numeric
from functional_optim.adapters.state.capturing import is_capturable
from functional_optim.adapters.state.names import named
from functional_optim.adapters.stepping.columns import Column, Readings, owned
from functional_optim.adapters.stepping.leaves import (
    Changes,
    begin_state,
    check_numbers,
    noise_places,
)
from functional_optim.core.first_slots import init_slots_as
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.numbers import tensor_of
from functional_optim.core.rule import Placement
from functional_optim.core.storage import Slots
from functional_optim.engine.missing_grad import WithoutGradient, place_of
from functional_optim.engine.plan import StepContext

if TYPE_CHECKING:
    from functional_optim.adapters.base import OptimizerBase

STEPS = "optimizer_step"
"""The key of the optimizer's count of steps. A state has it only after a step in which no parameter
with a gradient in all steps had one; otherwise the largest `step` is the count. A saved state of an
optimizer with shared rules always has it: torch loads only keys that a new optimizer saves, too."""

COUNTS = "step", STEPS

Keys: TypeAlias = tuple[str, ...]

Parts: TypeAlias = Sequence[tuple[int, Leafwise]]
"""For each entry of a plan its group, and its rules."""


def counts_in(states: Iterable[dict[str, Any]]) -> list[Any]:
    """The counts of steps in some states; the largest one is that of the optimizer."""
    return [mine[key] for mine in states for key in COUNTS if key in mine]


class Holder(NamedTuple):
    """A parameter whose state has the scalars of a rule. slots: the keys of that rule's slots."""

    p: Tensor
    state: dict[str, Any]
    slots: Keys

    def own(self) -> Slots:
        """Its slots for that rule."""
        return tuple([self.state.get(key) for key in self.slots])


class SharedRule:
    """One shared rule, in all parameter groups that have it.

    keys: of the carried scalars. groups: the keys of its slots, by the indices of the groups.
    """

    def __init__(
        self, placement: Placement, count: int, keys: Keys, groups: dict[int, Keys]
    ) -> None:
        self.placement = placement
        self.count = count
        self.keys = keys
        self.groups = groups
        self.holders: list[Holder] = []

    def is_like(self, other: SharedRule) -> bool:
        """Whether a rule of another group is this one: of the same name, place and numbers."""
        a, b = self.placement, other.placement
        if (a.name, self.count, self.keys) != (b.name, other.count, other.keys):
            return False
        own, its = [kernels.static_key((x.rule.scalars, x.rule.hyper)) for x in (a, b)]
        return own == its

    def waiting(self, parts: Parts) -> WithoutGradient | None:
        """Parameters without a gradient whose slots also advance in such a step.

        parts: for each entry of the plan its group, and its rules.
        """
        rows = [(holder.p, holder.own()) for holder in self.holders if holder.p.grad is None]
        place = self.place(parts) if rows and self.placement.rule.runs.absent else None
        return None if place is None else WithoutGradient(*place, rows)

    def place(self, parts: Parts) -> tuple[int, int] | None:
        """The first entry that has the rule, and the rule's index in it."""
        return place_of(self.keys, [x.layout.carry if k in self.groups else () for k, x in parts])

    def look(self, optimizer: OptimizerBase) -> None:
        """Find the parameters whose state has the scalars. Those whose state is new since the last
        call get the scalars of the others."""
        first, known = self.holders[:1], {id(holder.p) for holder in self.holders}
        groups = optimizer.param_groups
        pairs = [(p, slots) for k, slots in self.groups.items() for p in groups[k]["params"]]
        every = [Holder(p, optimizer.state.get(p) or {}, slots) for p, slots in pairs]
        self.holders = [x for x in every if all(key in x.state for key in self.keys)]
        for holder in self.holders if first else ():
            if id(holder.p) not in known:
                holder.state.update({key: owned(first[0].state[key]) for key in self.keys})

    def agree(self, read: Readings) -> tuple[float, ...]:
        """Make the scalars of all parameters equal, and return them.

        Those of the parameter with the most finished steps are used. The slots of a rule are reset
        for parameters that were out of phase: they belong to other steps.
        """
        values = [tuple([read(k.state[key]) for key in self.keys]) for k in self.holders]
        steps = [read(k.state["step"]) if "step" in k.state else 0.0 for k in self.holders]
        best = max(range(len(values)), key=lambda i: (steps[i], values[i]))
        for holder, mine in zip(self.holders, values, strict=True):
            if all(map(_equal, mine, values[best])):
                continue
            for key, value in zip(self.keys, values[best], strict=True):
                holder.state[key].fill_(value)
            start = init_slots_as(self.placement.rule, holder.p.detach(), holder.own())
            for old, new in zip(holder.own(), start, strict=True):
                if old is not None and new is not None:
                    old.copy_(new)
        return values[best]


class SharedCounts:
    """The shared rules of an optimizer, and the count of its steps.

    chains: the groups that are made of one-tensor rules, by index, and their transformations.
    counts_steps: whether the optimizer has such rules, and counts steps.
    """

    def __init__(self, optimizer: OptimizerBase, chains: Iterable[tuple[int, Leafwise]]) -> None:
        self.optimizer = optimizer
        self.rules: list[SharedRule] = []
        self.counted: list[int] = []
        self.places: list[int] = []
        """For each shared rule of each group, its index among `rules`."""
        traced = torch.compiler.is_dynamo_compiling()  # which cannot compare functions
        given = optimizer._places_of_shared() if traced else ()
        found = False
        for k, tx in chains:
            self.counted.append(k)
            rows = zip(tx.placements, tx.layout.counts, tx.rules, strict=True)
            for placement, count, (rule, slots, keys) in rows:
                found |= rule.runs.shared
                if rule.runs.shared and keys:
                    new = SharedRule(placement, count, keys, {k: slots})
                    place = given[len(self.places)] if traced else self._place(new)
                    self.places.append(place)
                    if place == len(self.rules):
                        self.rules.append(new)
                    self.rules[place].groups[k] = slots
        self.counts_steps = found and optimizer.counts_steps
        for k in self.counted if self.counts_steps else ():
            for name, p in named(optimizer.param_groups[k]):
                check_numbers(name, optimizer.state.get(p) or {}, COUNTS, COUNTS)
        self.gather()

    def _place(self, new: SharedRule) -> int:
        """The index of the rule that a new one is like; the next index if there is none."""
        return [*[x.is_like(new) for x in self.rules], True].index(True)

    def groups(self) -> list[int]:
        """The indices of the groups that have shared rules."""
        return sorted({k for shared in self.rules for k in shared.groups})

    def gather(self) -> None:
        """Find the parameters with the numbers of the rules; see `SharedRule.look`."""
        for shared in self.rules:
            shared.look(self.optimizer)

    def start(self, chains: Parts, made: Changes) -> None:
        """Begin the states of parameters that have had no gradient, so that counts advance which no
        other state holds: other processes may have had one.

        chains: those that act on a part of the model. made: receives the new entries.
        """
        for k, tx in chains if self.counts_steps else ():
            group = self.optimizer.param_groups[k]
            rules = [x for x in self.rules if k in x.groups]
            for name, p in named(group):
                missing = [x.keys for x in rules if not x.holders]
                if not missing and self.known():
                    break
                part = tx.on(name, p)
                keys = [] if part is None else part.layout.carry
                if part is not None and (not self.known() or any(x in keys for x in missing)):
                    place = noise_places(self.optimizer, k, tx)[p]
                    begin_state(self.optimizer, k, name, p, part, made, place)
                    self.gather()

    def agree(self, read: Readings) -> None:
        """Make scalars equal; see `SharedRule.agree`."""
        for shared in self.rules:
            if shared.holders:
                shared.agree(read)

    def columns(self, read: Readings) -> dict[tuple[int, str], Column]:
        """The carried scalars of all parameters, in phase, by key and group."""
        found: dict[tuple[int, str], Column] = {}
        every = self.optimizer.param_groups
        for shared in self.rules:
            if not shared.holders:
                continue
            values = shared.agree(read)
            states = [holder.state for holder in shared.holders]
            for key, value in zip(shared.keys, values, strict=True):
                captured = any(is_capturable(self.optimizer, every[k]) for k in shared.groups)
                column = Column(states, key, value, captured=captured)
                found.update({(k, key): column for k in shared.groups})
        return found

    def time(self, read: Readings) -> float:
        """The number of finished steps."""
        return max(map(read, counts_in(self.states())), default=0.0)

    def traced_time(self) -> Any:
        """The number of this step, if values cannot be compared; None if it is the first."""
        counts = [tensor_of(numeric.float64(x)) for x in counts_in(self.states())]
        return torch.stack(counts).amax() + 1 if counts else None

    def write_apart(
        self, contexts: Sequence[StepContext], parts: Parts, t: Any, *, replace: bool
    ) -> None:
        """Write the scalars of those without a gradient, after separate steps of each parameter.

        t: the number of this step. replace: with new slots, for autograd.
        """
        if t is not None:
            states = self.states()
            stepped = [self.optimizer.state[x.tensors.params[0]] for x in contexts]
            if len(stepped) < len(states) or any(STEPS in mine for mine in states):
                for mine in stepped:
                    mine[STEPS] = numeric.stored(t, dtype=torch.float64)
        for shared in self.rules:
            place = shared.place(parts)
            if place is None:
                continue
            values = contexts[place[0]].carried[place[1]]
            rows = list(zip(shared.keys, values, shared.placement.rule.carry or (), strict=True))
            for holder in shared.holders:
                if holder.p.grad is None:
                    for key, value, first in rows:
                        dtype = numeric.carry_dtype(first)
                        holder.state[key] = numeric.stored(value, dtype=dtype).clone()
        for absent in self.waiting(parts):
            if not replace:
                for write in absent.step(contexts):
                    write()
                continue
            for (p, old), new in zip(absent.rows, absent.results(contexts), strict=True):
                mine = self.optimizer.state[p]
                keys = [key for slot in old for key, x in mine.items() if x is slot]
                mine.update(zip(keys, new, strict=True))

    def known(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """All parameters that have a state, with it, without the groups that are trees."""
        params = [p for k in self.counted for p in self.optimizer.param_groups[k]["params"]]
        found = [(p, self.optimizer.state.get(p)) for p in params]
        return [(p, mine) for p, mine in found if mine]

    def states(self) -> list[dict[str, Any]]:
        """The states of those parameters."""
        return [mine for _, mine in self.known()]

    def begin(self, made: Changes) -> None:
        """Put a count of 0 into new states."""
        if self.counts_steps:
            self.count(0.0, self.known(), made)

    def save(self, saved: dict[str, Any]) -> None:
        """Put the count into a state dict."""
        if not self.counts_steps:
            return
        time, state = self.time(Readings()), saved["state"]
        for k in self.counted:
            for index in saved["param_groups"][k]["params"]:
                if state.get(index):
                    count = numeric.stored(time, dtype=torch.float64)
                    state[index] = {**state[index], STEPS: count}

    def forget(self) -> None:
        """Remove the count where the largest `step` is the count."""
        states, read = self.states(), Readings()
        if not any(STEPS in mine for mine in states):
            return
        steps = [read(mine["step"]) for mine in states if "step" in mine]
        if steps and self.time(read) == max(steps):
            for mine in states:
                mine.pop(STEPS, None)

    def count(
        self, time: float, known: list[tuple[Tensor, dict[str, Any]]], made: Changes
    ) -> Column:
        """The column of the count itself, in the states of some parameters.

        made: receives the new entries.
        """
        for p, mine in known:
            if STEPS not in mine:
                made.append((p, STEPS))
            if not _is_count(mine.get(STEPS)):
                count = mine.get(STEPS, time)
                count = numeric.stored(count, torch.device("cpu"), dtype=torch.float64)
                mine[STEPS] = owned(count)
        return Column([mine for _, mine in known], STEPS, time)

    def waiting(self, parts: Parts) -> list[WithoutGradient]:
        """Updates of tensors without a gradient; see `SharedRule.waiting`."""
        found = [shared.waiting(parts) for shared in self.rules]
        return [absent for absent in found if absent is not None]


def _is_count(x: Any) -> bool:
    """Whether a number of a state is one that `SharedCounts.count` has put there."""
    ours = isinstance(x, Tensor) and x._base is not None and x.dim() == 0
    return ours and x.is_cpu and x.dtype is torch.float64


def _equal(x: float, y: float) -> bool:
    return x == y or (x != x and y != y)
