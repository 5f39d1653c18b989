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
from functional_optim.adapters.whole import WholeTree
from functional_optim.engine import Cohort, advance
from functional_optim.leafwise import Leafwise
from functional_optim.rules import Numbers, init_slots

if TYPE_CHECKING:
    from functional_optim.adapters.optimizer import Runs


class Entry(NamedTuple):
    """A parameter as the plan saw it."""

    p: Tensor
    pointer: int
    dtype: torch.dtype
    layout: torch.layout | None
    state: dict[str, Any] | None
    slots: list[tuple[str, Tensor]]


class Team:
    """Tensors of one group that have stepped together: one cohort, one step count.

    Their `step` tensors, and those of each carried number, are views of one vector: advancing all
    of them is one `fill_`, and one version counter tells whether somebody else changed one.
    """

    def __init__(self, group: int, tx: Leafwise, cohort: Cohort, time: float) -> None:
        self.group = group
        self.tx = tx
        self.cohort = cohort
        self.time = time
        self.carry: list[Numbers] = []
        self.step: Tensor | None = None
        self.integers: list[dict[str, Any]] = []
        self.carried: dict[str, Tensor] = {}
        self.versions: list[tuple[Tensor, int]] = []

    def untouched(self) -> bool:
        """Has nobody else written to the step counts or the carried numbers?"""
        return all(vector._version == version for vector, version in self.versions) and all(
            state["step"] == self.time for state in self.integers
        )

    def finish(self, carry: list[Numbers]) -> None:
        """Write the step count and the carried numbers back."""
        self.time += 1
        self.carry = carry
        if self.step is not None:
            self.step.fill_(self.time)
        for state in self.integers:
            state["step"] = int(self.time)
        for keys, values in zip(self.tx.layout.carry, carry, strict=True):
            for key, value in zip(keys, values, strict=True):
                self.carried[key].fill_(value)
        self.note_versions()
        if self.carried:
            self.carry = [
                tuple([self.carried[key][0].item() for key in keys])
                for keys in self.tx.layout.carry
            ]

    def note_versions(self) -> None:
        """Remember the vectors as they are now."""
        vectors = [self.step] if self.step is not None else []
        self.versions = [(v, v._version) for v in [*vectors, *self.carried.values()]]


class Plan:
    """Everything that a step needs, built from an optimizer's groups and state."""

    def __init__(self, optimizer: Runs) -> None:
        self.entries: list[list[Entry]] = []
        self.hyper: list[dict[str, Any]] = []
        self.teams: list[Team] = []
        self.wholes: list[WholeTree] = []
        for k, group in enumerate(optimizer.param_groups):
            hyper = host_values(group)
            tx = optimizer.checked_transform({**group, **hyper})
            self.hyper.append(hyper)
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
            for (_, time, *carried), members in teams.items():
                self.teams.append(self._team(optimizer, k, tx, time, carried, members))
            self.entries.append([_entry(optimizer, p, tx) for p in group["params"]])

    def _team(
        self,
        optimizer: Runs,
        k: int,
        tx: Leafwise,
        time: float,
        carried: list[float],
        members: list[Tensor],
    ) -> Team:
        states = [optimizer.state.get(p) or {} for p in members]
        slots = [
            [tuple([state.get(key) for key in keys]) for keys in tx.layout.slots]
            for state in states
        ]
        dense = all(p.grad is None or p.grad.layout is torch.strided for p in members)
        cohort = Cohort(tx.links, members, slots, compiled=optimizer.compile and dense)
        team = Team(k, tx, cohort, time)
        if optimizer.integer_steps:
            team.integers = states
        elif optimizer.counts_steps:
            team.step = _share(states, "step")
        supply = iter(carried)
        team.carry = [tuple([next(supply) for _ in keys]) for keys in tx.layout.carry]
        for keys in tx.layout.carry:
            for key in keys:
                team.carried[key] = _share(states, key)
        team.note_versions()
        return team

    def holds(self, optimizer: Runs) -> bool:
        """Is all as it was? New numbers in the groups are taken over here."""
        groups, state = optimizer.param_groups, optimizer.state
        if len(groups) != len(self.entries):
            return False
        for group, entries in zip(groups, self.entries, strict=True):
            params = group["params"]
            if len(params) != len(entries):
                return False
            for p, (same, pointer, dtype, layout, mine, slots) in zip(params, entries, strict=True):
                if p is not same or (None if p.grad is None else p.grad.layout) is not layout:
                    return False
                if layout is None:
                    continue
                if p.data_ptr() != pointer or p.dtype is not dtype or state.get(p) is not mine:
                    return False
                if mine is not None:
                    for key, slot in slots:
                        if mine.get(key) is not slot:
                            return False
        return all(team.untouched() for team in self.teams) and self._take_numbers(optimizer)

    def _take_numbers(self, optimizer: Runs) -> bool:
        for k, group in enumerate(optimizer.param_groups):
            hyper = host_values(group)
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
            [team.carry for team in self.teams],
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
        mine["step"] = 0 if optimizer.integer_steps else numeric.stored(0.0)
    for link, slot_keys, carry_keys in zip(tx.links, tx.layout.slots, tx.layout.carry, strict=True):
        for key, value in zip(carry_keys, link.carry or (), strict=True):
            if key not in mine:
                mine[key] = numeric.stored(value).clone()
        if any(mine.get(key) is None for key in slot_keys):
            for key, slot in zip(slot_keys, init_slots(link, p.detach()), strict=True):
                if mine.get(key) is None and slot is not None:
                    mine[key] = slot


def host_values(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters, those in CPU tensors as Python numbers."""
    return {
        key: _host(value) for key, value in group.items() if key not in ("params", "param_names")
    }


def _host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else value
    if isinstance(value, tuple):
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
    keys = [key for keys in tx.layout.slots for key in keys] if tx else []
    slots = [(key, mine[key]) for key in keys if key in mine] if mine else []
    layout = None if p.grad is None else p.grad.layout
    return Entry(p, p.data_ptr(), p.dtype, layout, mine, slots)


def _share(states: list[dict[str, Any]], key: str) -> Tensor:
    """Make the 0-dim tensors under one key views of one new vector."""
    first = states[0][key]
    vector = torch.stack([torch.as_tensor(state[key], device=first.device) for state in states])
    for i, state in enumerate(states):
        state[key] = vector[i]
    return vector


def step_apart(optimizer: Runs, *, replace: bool) -> None:
    """Step without a plan: traced by torch.compile, or (replace) recorded by autograd.

    Each parameter is a cohort of its own, with its own `step` tensor as the time: in a graph there
    is no comparing of tensors' values.
    """
    cohorts, grads, times, carries, layouts = [], [], [], [], []
    for group in optimizer.param_groups:
        tx = optimizer.checked_transform(group)
        if not isinstance(tx, Leafwise):
            raise TypeError(
                "a step that is traced by torch.compile or recorded by autograd needs a recipe "
                "made of one-tensor rules; this one also has a transformation of whole trees."
            )
        for p in group["params"]:
            if p.grad is None:
                continue
            optimizer.check_gradient(p, p.grad, group)
            new = not optimizer.state.get(p)
            fill_state(optimizer, p, tx)
            mine = optimizer.state.get(p) or {}
            slots = [tuple([mine.get(key) for key in keys]) for keys in tx.layout.slots]
            cohorts.append(Cohort(tx.links, [p], [slots], compiled=False, replace=replace))
            grads.append([p.grad])
            if optimizer.counts_steps:
                times.append(numeric.float64(mine["step"] + 1))
            else:
                times.append(1.0 if new else 2.0)
            carries.append(
                [tuple([mine[key].to(torch.float64) for key in keys]) for keys in tx.layout.carry]
            )
            layouts.append(tx.layout)
    carried = advance(cohorts, grads, times, carries, {})
    for cohort, layout, numbers in zip(cohorts, layouts, carried, strict=True):
        mine = optimizer.state.get(cohort.params[0])
        if not mine:
            continue
        if optimizer.counts_steps:
            with torch.no_grad():
                mine["step"] += 1
        for keys, values in zip(layout.carry, numbers, strict=True):
            for key, value in zip(keys, values, strict=True):
                mine[key] = numeric.stored(value)
        if replace:
            for keys, values in zip(layout.slots, cohort.slots[0], strict=True):
                mine.update(zip(keys, values, strict=True))
