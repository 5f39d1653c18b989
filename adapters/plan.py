"""How the tensors of an optimizer object are stepped: the plan that one step leaves for the next.

`param_groups`, `state`, gradients and even the tensors in them are replaced from outside by half
the ecosystem, so all of them are read at every step. What may be kept is what was built from them,
as long as they are still the same objects; the smallest difference discards the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.adapters.numbers import Column, Integers, owned
from functional_optim.adapters.whole import WholeTree
from functional_optim.engine import Cohort, advance
from functional_optim.leafwise import Leafwise
from functional_optim.rules import Numbers, init_slots

if TYPE_CHECKING:
    from functional_optim.adapters.optimizer import Runs


class Entry(NamedTuple):
    """A parameter as the plan saw it."""

    p: Tensor
    memory: Memory
    dtype: torch.dtype
    layout: torch.layout | None
    state: Any
    slots: list[tuple[str, Tensor, Memory]]
    numbers: list[tuple[str, Any]]


Memory = tuple[int, int, tuple[int, ...]]
"""Where a tensor lies, and how: an assignment to `.data` changes one of them."""


class Team:
    """Tensors of one group that have stepped together: one cohort, one step count.

    step: None if the optimizer counts none. carried: the columns of carried numbers, by key.
    """

    def __init__(
        self,
        group: int,
        tx: Leafwise,
        cohort: Cohort,
        time: float,
        step: Column | Integers | None,
        carried: dict[str, Column],
    ) -> None:
        self.group = group
        self.tx = tx
        self.cohort = cohort
        self.time = time
        self.step = step
        self.carried = carried

    def carry(self) -> list[Numbers]:
        """What each link carries, as it is kept."""
        layout = self.tx.layout
        return [tuple([self.carried[key].read() for key in keys]) for keys in layout.carry]

    def untouched(self) -> bool:
        """Has nobody else written to the step counts or the carried numbers?"""
        columns = self.carried.values()
        return (self.step is None or self.step.untouched()) and all(c.untouched() for c in columns)

    def finish(self, carry: list[Numbers]) -> None:
        """Write the step count and the carried numbers back."""
        self.time += 1
        if self.step is not None:
            self.step.write(self.time)
        for keys, values in zip(self.tx.layout.carry, carry, strict=True):
            for key, value in zip(keys, values, strict=True):
                self.carried[key].write(value)


class Plan:
    """Everything that a step needs, built from an optimizer's groups and state."""

    def __init__(self, optimizer: Runs) -> None:
        self.entries: list[list[Entry]] = []
        self.hyper: list[dict[str, Any]] = []
        self.seen: list[dict[str, Any] | None] = []
        self.teams: list[Team] = []
        self.wholes: list[WholeTree] = []
        for k, group in enumerate(optimizer.param_groups):
            hyper = host_values(group)
            tx = optimizer.checked_transform({**group, **hyper})
            self.hyper.append(hyper)
            self.seen.append(_constants(group))
            if not isinstance(tx, Leafwise):
                self.wholes.append(WholeTree(optimizer, k, tx))
                self.entries.append([_entry(optimizer, p, None) for p in group["params"]])
                continue
            teams: dict[Any, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    optimizer.check_gradient(p, p.grad, group)
                    new = not optimizer.state.get(p)
                    fill_state(optimizer, p, tx)
                    signature = (p.grad.layout, *_signature(optimizer, p, tx, new))
                    teams.setdefault(signature, []).append(p)
            for (_, time, *_), members in teams.items():
                self.teams.append(self._team(optimizer, k, tx, time, members))
            self.entries.append([_entry(optimizer, p, tx) for p in group["params"]])

    def _team(
        self, optimizer: Runs, k: int, tx: Leafwise, time: float, members: list[Tensor]
    ) -> Team:
        states = [optimizer.state.get(p) or {} for p in members]
        slots = [
            [tuple([state.get(key) for key in keys]) for keys in tx.layout.slots]
            for state in states
        ]
        dense = all(p.grad is None or p.grad.layout is torch.strided for p in members)
        cohort = Cohort(tx.links, members, slots, compiled=optimizer.compile and dense)
        step = None
        if optimizer.counts_steps:
            step = (Integers if optimizer.integer_steps else Column)(states, "step")
        carried = {key: Column(states, key) for keys in tx.layout.carry for key in keys}
        return Team(k, tx, cohort, time, step, carried)

    def holds(self, optimizer: Runs) -> bool:
        """Is all as it was? New numbers in the groups are taken over here."""
        groups, state = optimizer.param_groups, optimizer.state
        if len(groups) != len(self.entries):
            return False
        for group, entries in zip(groups, self.entries, strict=True):
            params = group["params"]
            if len(params) != len(entries):
                return False
            for p, (same, memory, dtype, layout, mine, slots, numbers) in zip(
                params, entries, strict=True
            ):
                if p is not same or (None if p.grad is None else p.grad.layout) is not layout:
                    return False
                if layout is None:
                    continue
                if _memory(p) != memory or p.dtype is not dtype:
                    return False
                if state.get(p) is not mine:
                    return False
                for key, number in numbers:
                    if mine.get(key) is not number:
                        return False
                for key, slot, place in slots:
                    if mine.get(key) is not slot or _memory(slot) != place:
                        return False
        return all(team.untouched() for team in self.teams) and self._take_numbers(optimizer)

    def _take_numbers(self, optimizer: Runs) -> bool:
        for k, group in enumerate(optimizer.param_groups):
            if _identical(group, self.seen[k]):
                continue
            hyper = host_values(group)
            self.seen[k] = _constants(group)
            if same_values(hyper, self.hyper[k]):
                continue
            tx = optimizer.checked_transform({**group, **hyper})
            for whole in self.wholes:
                if whole.group == k:
                    whole.tx = tx
            for team in self.teams:
                if team.group == k:
                    if not (isinstance(tx, Leafwise) and team.cohort.relink(tx.links)):
                        return False
                    team.tx = tx
            self.hyper[k] = hyper
        return True

    def run(self, optimizer: Runs) -> None:
        """Step every tensor."""
        grads = [[p.grad for p in team.cohort.params if p.grad is not None] for team in self.teams]
        for team, mine in zip(self.teams, grads, strict=True):
            if mine[0].layout is not torch.strided:
                group = optimizer.param_groups[team.group]
                mine[:] = [optimizer.dense_gradient(g, group) for g in mine]
        for whole in self.wholes:
            whole.run()
        carries = advance(
            [team.cohort for team in self.teams],
            grads,
            [team.time + 1 for team in self.teams],
            [team.carry() for team in self.teams],
            {},
        )
        for team, carry in zip(self.teams, carries, strict=True):
            team.finish(carry)


def fill_state(optimizer: Runs, p: Tensor, tx: Leafwise) -> None:
    """Give p what its state lacks: everything at its first step, a new slot after a load."""
    if not _keeps_state(optimizer, tx):
        return
    mine = optimizer.state[p]
    if optimizer.counts_steps and "step" not in mine:
        mine["step"] = 0 if optimizer.integer_steps else owned(numeric.stored(0.0))
    for link, slot_keys, carry_keys in zip(tx.links, tx.layout.slots, tx.layout.carry, strict=True):
        for key, value in zip(carry_keys, link.carry or (), strict=True):
            if key not in mine:
                mine[key] = owned(numeric.stored(value))
        if any(mine.get(key) is None for key in slot_keys):
            for key, slot in zip(slot_keys, init_slots(link, p.detach()), strict=True):
                if mine.get(key) is None and slot is not None:
                    mine[key] = slot


def host_values(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters, those in CPU tensors as Python numbers."""
    return {
        key: _host(value) for key, value in group.items() if key not in ("params", "param_names")
    }


def _constants(group: dict[str, Any]) -> dict[str, Any] | None:
    """A group's entries, if none of them can change in place."""
    values = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    inner = [x for value in values.values() for x in (value if type(value) is tuple else (value,))]
    return None if any(isinstance(x, (Tensor, list, dict)) for x in inner) else dict(group)


def _identical(group: dict[str, Any], seen: dict[str, Any] | None) -> bool:
    """Are a group's entries the very objects that were seen?"""
    if seen is None or len(seen) != len(group):
        return False
    get = group.get
    return all(get(key) is value for key, value in seen.items())


def _host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else value
    if isinstance(value, (tuple, list)):  # a new one: a list may be edited in place
        return tuple([_host(x) for x in value])
    return value


def same_values(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Are two sets of hyperparameters equal? Tensors on other devices are told by identity."""
    return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)


def _equal(x: Any, y: Any) -> bool:
    if x is y:
        return not isinstance(x, Tensor)  # its value may have changed in place
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return False
    if isinstance(x, tuple) and isinstance(y, tuple):
        return len(x) == len(y) and all(_equal(a, b) for a, b in zip(x, y, strict=True))
    return bool(x == y)


def _keeps_state(optimizer: Runs, tx: Leafwise) -> bool:
    layout = tx.layout
    return optimizer.counts_steps or any(layout.slots) or any(layout.carry)


def _signature(optimizer: Runs, p: Tensor, tx: Leafwise, new: bool) -> tuple[float, ...]:
    """What tensors that step together have in common: finished steps, carried numbers.

    An optimizer that keeps no step count, as torch's SGD, knows only whether it was here before.
    """
    mine = optimizer.state.get(p) or {}
    time = float(mine["step"]) if optimizer.counts_steps else float(not new)
    return (time, *[float(mine[key]) for keys in tx.layout.carry for key in keys])


def _entry(optimizer: Runs, p: Tensor, tx: Leafwise | None) -> Entry:
    mine = optimizer.state.get(p)
    layout = None if p.grad is None else p.grad.layout
    slots: list[tuple[str, Tensor, Memory]] = []
    numbers: list[tuple[str, Any]] = []
    if mine and tx is not None:
        keys = [key for keys in tx.layout.slots for key in keys if key in mine]
        slots = [(key, mine[key], _memory(mine[key])) for key in keys]
        keys = ["step", *[key for keys in tx.layout.carry for key in keys]]
        numbers = [(key, mine[key]) for key in keys if isinstance(mine.get(key), Tensor)]
    return Entry(p, _memory(p), p.dtype, layout, mine, slots, numbers)


def _memory(x: Tensor) -> Memory:
    return x.data_ptr(), x.numel(), x.stride()
