"""How the tensors of an optimizer object are stepped: the plan that one step leaves for the next.

`param_groups`, `state`, gradients and even the tensors in them are replaced from outside by half
the ecosystem, so all of them are read at every step. What may be kept is what was built from them,
as long as they are still the same objects; the smallest difference discards the plan.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from functional_optim import base, kernels, numeric, sharded
from functional_optim.adapters.names import named
from functional_optim.adapters.numbers import Column, Integers, Readings, owned
from functional_optim.adapters.whole import WholeTree
from functional_optim.combine import extra_names
from functional_optim.engine import Cohort, Turn, advance, agenda_of, how_to, same_leaves
from functional_optim.leafwise import Leafwise
from functional_optim.looks import Looks
from functional_optim.rules import Numbers, init_slots

if TYPE_CHECKING:
    from functional_optim.adapters.optimizer import Runs

grad_of = attrgetter("grad")


class Team:
    """Tensors of one group that have stepped together: one cohort, one step count.

    tx: what acts on them. first: the name and the tensor of the first.
    places: which they are among all parameters that have a gradient; None: all of them, once the
    plan is complete. step: None if the optimizer counts none. carried: the columns of carried
    numbers, by key. sparse: are their gradients?
    """

    def __init__(
        self,
        group: int,
        tx: Leafwise,
        first: tuple[str, Tensor],
        cohort: Cohort,
        places: list[int] | None,
        time: float,
        step: Column | Integers | None,
        carried: dict[str, Column],
        sparse: bool,
    ) -> None:
        self.group = group
        self.tx = tx
        self.first = first
        self.cohort = cohort
        self.places = places
        self.time = time
        self.step = step
        self.carried = carried
        self.sparse = sparse
        self.idle: list[Numbers] = [()] * len(tx.layout.carry)

    def carry(self) -> list[Numbers]:
        """What each link carries, as it is kept."""
        if not self.carried:
            return self.idle
        return [tuple([self.carried[key].read() for key in keys]) for keys in self.tx.layout.carry]

    def untouched(self) -> bool:
        """Has nobody else written to the step counts or the carried numbers?"""
        if self.step is not None and not self.step.untouched():
            return False
        return not self.carried or all(c.untouched() for c in self.carried.values())

    def finish(self, carry: list[Numbers]) -> bool:
        """Write the step count and the carried numbers back; True if new tensors hold some."""
        self.time += 1
        if self.step is not None:
            self.step.write(self.time)
        if not self.carried:
            return False
        moved = False
        for keys, values in zip(self.tx.layout.carry, carry, strict=True):
            for key, value in zip(keys, values, strict=True):
                moved |= self.carried[key].write(value)
        return moved


class Seen:
    """The objects of an optimizer as they were: parameters, their gradients' looks, state.

    Compared by identity, in C where the library for it is there.
    numbers: keys of the state whose tensors hold step counts and carried numbers.
    """

    def __init__(self, optimizer: Runs, numbers: set[str]) -> None:
        self.params = tuple(map(tuple, _param_lists(optimizer)))
        params = list(chain.from_iterable(self.params))
        grads = list(map(grad_of, params))
        self.states = tuple(optimizer.state.values())
        dicts = [x if isinstance(x, dict) else {} for x in self.states]
        self.values = tuple([tuple(x.values()) for x in dicts])
        slots = [
            value
            for mine in dicts
            for name, value in mine.items()
            if name not in numbers and isinstance(value, Tensor)
        ]
        live = [p for p, g in zip(params, grads, strict=True) if g is not None]
        self.looks = Looks(grads, [*live, *slots], self.params, self.states, self.values)

    def gradients(self, optimizer: Runs) -> list[Tensor] | None:
        """The gradients, if everything else is as it was: of parameters that have one."""
        grads = self.looks.look("gradients", optimizer.param_groups, optimizer.state)
        if grads is not NotImplemented:
            return grads
        lists = _param_lists(optimizer)
        states = optimizer.state.values()
        unchanged = (
            len(lists) == len(self.params)
            and all(map(_same_objects, lists, self.params))
            and _same_objects(states, self.states)
            and all(
                _same_objects(mine.values(), known)
                for mine, known in zip(states, self.values, strict=True)
                if isinstance(mine, dict)
            )
        )
        found = list(map(grad_of, chain.from_iterable(lists)))
        return self.looks.fit(found) if unchanged else None


class Plan:
    """Everything that a step needs, built from an optimizer's groups and state."""

    def __init__(self, optimizer: Runs) -> None:
        self.hyper: list[dict[str, Any]] = []
        self.wheres: list[Any] = []
        self.constants: list[dict[str, Any] | None] = []
        self.teams: list[Team] = []
        self.wholes: list[WholeTree] = []
        numbers = {"step"}
        read = Readings()
        chains: list[Leafwise] = []
        at = 0
        for k, group in enumerate(optimizer.param_groups):
            hyper = host_values(group)
            tx = optimizer.checked_transform({**group, **hyper}, in_step=True)
            self.hyper.append(hyper)
            self.constants.append(_constants(group))
            if not isinstance(tx, Leafwise):
                self.wheres.append(None)
                self.wholes.append(WholeTree(optimizer, k, tx))
                at += sum(p.grad is not None for p in group["params"])
                continue
            chains.append(tx)
            self.wheres.append([link.where for link in tx.links])
            numbers.update(chain.from_iterable(tx.layout.carry))
            teams: dict[Any, list[int]] = {}
            live = [(name, p) for name, p in named(group) if p.grad is not None]
            for i, (name, p) in enumerate(live):
                part, g = tx.on(name, p), p.grad
                if part is None or g is None:
                    continue
                optimizer.check_gradient(p, g, group)
                sharded.check_beside(name, g, "the gradient", p)
                new = not optimizer.state.get(p)
                fill_state(optimizer, p, part)
                check_slots(name, p, optimizer.state.get(p) or {}, part)
                signature = (part, g.layout, *_signature(optimizer, p, part, new, read))
                teams.setdefault(signature, []).append(i)
            for (part, _, *known), members in teams.items():
                some = [live[i] for i in members]
                places = [at + i for i in members]
                self.teams.append(self._team(optimizer, k, part, known, some, places))
            at += len(live)
            optimizer.check_parts(group, tx)
        self.agenda = agenda_of([(tx.links, tx.layout.counts) for tx in chains if tx.meets])
        if len(self.teams) == 1 and len(self.teams[0].cohort.params) == at:
            self.teams[0].places = None
        self.numbers = numbers
        self.seen = Seen(optimizer, numbers)
        self.restless = bool(self.wholes) or optimizer.integer_steps
        self.asking = any(asks(part.tx) for part in (*self.teams, *self.wholes))
        self.mesh = sharded.mesh_of(
            [p for group in optimizer.param_groups for p in group["params"]]
        )

    def _team(
        self,
        optimizer: Runs,
        k: int,
        tx: Leafwise,
        known: list[float],
        members: list[tuple[str, Tensor]],
        places: list[int],
    ) -> Team:
        time, *values = known
        params = [p for _, p in members]
        states = [optimizer.state.get(p) or {} for p in params]
        slots = [
            [tuple([state.get(key) for key in keys]) for keys in tx.layout.slots]
            for state in states
        ]
        grads = [p.grad for p in params if p.grad is not None]
        dense = grads[0].layout is torch.strided
        how = how_to(optimizer.compile) if dense else "apart"
        cohort = Cohort(tx.links, params, slots, grads, how=how, counts=tx.layout.counts)
        step = None
        if optimizer.counts_steps:
            integers = optimizer.integer_steps
            step = Integers(states, "step") if integers else Column(states, "step", time)
        keys = chain.from_iterable(tx.layout.carry)
        carried = {key: Column(states, key, value) for key, value in zip(keys, values, strict=True)}
        return Team(k, tx, members[0], cohort, places, time, step, carried, not dense)

    def fresh(self) -> list[Tensor]:
        """The gradients, right after the plan was made."""
        grads = map(grad_of, chain.from_iterable(self.seen.params))
        return [g for g in grads if g is not None]

    def gradients(self, optimizer: Runs) -> list[Tensor] | None:
        """The gradients, if the plan still holds; new numbers in the groups are taken over here."""
        grads = self.seen.gradients(optimizer)
        if grads is None:
            return None
        for team in self.teams:
            if not team.untouched():
                return None
        return grads if self._take_numbers(optimizer) else None

    def _take_numbers(self, optimizer: Runs) -> bool:
        for k, group in enumerate(optimizer.param_groups):
            if _identical(group, self.constants[k]):
                continue
            hyper = self._new_numbers(k, group)
            if same_values(hyper, self.hyper[k]):
                continue
            tx = optimizer.checked_transform({**group, **hyper}, in_step=True)
            if isinstance(tx, Leafwise) and not same_leaves(tx.links, self.wheres[k]):
                return False
            for whole in self.wholes:
                if whole.group == k:
                    whole.tx = tx
            for team in self.teams:
                if team.group == k:
                    part = tx.on(*team.first) if isinstance(tx, Leafwise) else None
                    if part is None or not team.cohort.relink(part.links):
                        return False
                    team.tx = part
            self.hyper[k] = hyper
        return True

    def _new_numbers(self, k: int, group: dict[str, Any]) -> dict[str, Any]:
        """A group's hyperparameters; cheap if a few plain numbers replaced others."""
        seen = self.constants[k]
        if seen is not None and group.keys() == seen.keys():
            changed = {key: x for key, x in group.items() if seen[key] is not x}
            if all(type(x) in PLAIN_NUMBERS for x in changed.values()):
                seen.update(changed)
                return {**self.hyper[k], **changed}
        self.constants[k] = _constants(group)
        return host_values(group)

    def run(self, optimizer: Runs, grads: list[Tensor], loss: Any) -> None:
        """Step every tensor. grads: as the plan's `gradients` gave them."""
        extra = extra_of(loss, self.mesh) if self.asking else {}
        turns = []
        for team in self.teams:
            mine = grads if team.places is None else [grads[i] for i in team.places]
            if team.sparse:
                group = optimizer.param_groups[team.group]
                mine = [optimizer.dense_gradient(g, group) for g in mine]
            turns.append(Turn(team.cohort, mine, team.time + 1, team.carry(), extra))
        for whole in self.wholes:
            whole.run(extra)
        advance(turns, self.agenda)
        pairs = zip(self.teams, turns, strict=True)
        moved = [team.finish(turn.carried) for team, turn in pairs]
        if self.restless or any(moved):
            self.seen = Seen(optimizer, self.numbers)


def asks(tx: base.GradientTransformation) -> bool:
    """Does a part read the loss?"""
    return "value" in extra_names(tx)


def extra_of(loss: Any, mesh: Any = None) -> dict[str, Any]:
    """The extra arguments of a step in an optimizer object: `value`, the closure's loss.

    mesh: of sharded parameters. All processes must go one way, so all get the mean of their losses.

    Raises:
        RuntimeError: if there was no closure.
    """
    if loss is None:
        raise RuntimeError(
            "this recipe reads the loss; call opt.step(closure) with a function that computes the "
            "loss and its gradients, and returns the loss. A GradScaler steps without a closure, "
            "as under Lightning's 16-mixed precision: take bfloat16, which needs no scaler."
        )
    if mesh is not None:
        return {"value": sharded.mean_over(loss, mesh)}
    if isinstance(loss, Tensor):
        plain = loss.device.type == "cpu" and not torch.compiler.is_compiling()
        recorded = torch.is_grad_enabled() or kernels.bypass()
        return {"value": loss.item() if plain and not recorded else numeric.float64(loss)}
    return {"value": float(loss)}


def fill_state(optimizer: Runs, p: Tensor, tx: Leafwise, *, recorded: bool = False) -> None:
    """Give p what its state lacks: everything at its first step, a new slot after a load.

    recorded: by autograd, back to the parameter and the hyperparameters that it is made from.
    """
    if not optimizer.state.get(p):
        for link in tx.links:
            if link.slots is not None and not link.slots._fields:
                init_slots(link, p.detach())  # which may refuse p
    if not _keeps_state(optimizer, tx):
        return
    mine = optimizer.state[p]
    if optimizer.counts_steps and "step" not in mine:
        mine["step"] = 0 if optimizer.integer_steps else owned(numeric.stored(0.0))
    for link, slot_keys, carry_keys in zip(tx.links, tx.layout.slots, tx.layout.carry, strict=True):
        for key, value in zip(carry_keys, link.carry or (), strict=True):
            if key not in mine:
                first = numeric.stored(value)
                mine[key] = first.clone() if recorded else owned(first)
        if any(mine.get(key) is None for key in slot_keys):
            start = init_slots(link, p if recorded else p.detach())
            for key, slot in zip(slot_keys, start, strict=True):
                if mine.get(key) is None and slot is not None:
                    mine[key] = slot


def check_slots(name: str, p: Tensor, state: dict[str, Any], tx: Leafwise) -> None:
    """Raise ValueError for a slot of another size, or shared by others, than the parameter."""
    for link, keys in zip(tx.links, tx.layout.slots, strict=True):
        for key in keys:
            slot = state.get(key)
            if link.flat and isinstance(slot, Tensor) and slot.dim() == p.dim() > 0:
                sharded.check_beside(name, slot, f"the slot {key!r}", p)


PLAIN_NUMBERS = (float, int, bool)


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
    return seen is not None and kernels.same_entries(group, seen)


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


def _signature(
    optimizer: Runs, p: Tensor, tx: Leafwise, new: bool, read: Readings
) -> tuple[float, ...]:
    """What tensors that step together have in common: finished steps, carried numbers.

    An optimizer that keeps no step count, as torch's SGD, knows only whether it was here before.
    """
    mine = optimizer.state.get(p) or {}
    time = read(mine["step"]) if optimizer.counts_steps else float(not new)
    return (time, *[read(mine[key]) for keys in tx.layout.carry for key in keys])


def _param_lists(optimizer: Runs) -> list[list[Tensor]]:
    return [group["params"] for group in optimizer.param_groups]


def _same_objects(a: Collection[Any], b: Collection[Any]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))
