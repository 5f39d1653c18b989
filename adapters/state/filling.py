"""What a step puts into the states of parameters before it writes, and takes out again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.adapters.stepping.columns import owned
from functional_optim.core import base, memory
from functional_optim.core.cells import CELLS
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.storage import init_slots, stands_beside

if TYPE_CHECKING:
    from functional_optim.adapters.base import OptimizerBase
    from functional_optim.engine.plan import PlanLeaf

Made = list[tuple[Tensor, str]]
"""Entries of the state, by parameter and key, that a step has made but not yet written to."""


def fill_state(
    optimizer: OptimizerBase,
    name: str,
    p: Tensor,
    tx: Leafwise,
    made: Made,
    *,
    recorded: bool = False,
    device: torch.device | None = None,
) -> None:
    """Give p what its state lacks: everything at its first step, a new slot after a load.

    made: what is new is noted there first. recorded: by autograd, back to the parameter and the
    hyperparameters that it is made from. device: of the numbers; None: the CPU, or wherever they
    are.
    """
    if not optimizer.state.get(p):
        for rule, _, _ in tx.rules:
            if rule.storage.slots is not None and not rule.storage.fields:
                init_slots(rule, p.detach())  # which may refuse p
    if not (optimizer.counts_steps or any(tx.layout.slots) or any(tx.layout.carry)):
        return
    mine = optimizer.state[p]
    if optimizer.counts_steps and "step" not in mine:
        made.append((p, "step"))
        mine["step"] = 0 if optimizer.integer_steps else owned(numeric.stored(0.0, device))
    elif device is not None and isinstance(mine.get("step"), Tensor):
        mine["step"] = _there(mine["step"], device)
    for key, value in tx.carried.items():
        if key not in mine:
            first = numeric.stored(value, device)
            made.append((p, key))
            mine[key] = first.clone() if recorded else owned(first)
        elif type(value) is int and mine[key].dtype is torch.float32:  # a count of before
            mine[key] = owned(mine[key].to(torch.float64))
        if device is not None:
            mine[key] = _there(mine[key], device)
    for rule, keys, _ in tx.rules:
        if any(mine.get(key) is None for key in keys):
            _check_form(name, mine, keys)
            start = init_slots(rule, p if recorded else p.detach(), name)
            for key, slot in zip(keys, start, strict=True):
                if mine.get(key) is None and slot is not None:
                    made.append((p, key))
                    mine[key] = slot


def _there(x: Tensor, device: torch.device) -> Tensor:
    """A number on a device, as it is or as a new one."""
    return x if x.device == device else owned(x.to(device))


def _check_form(name: str, state: dict[str, Any], keys: Sequence[str]) -> None:
    """Raise RuntimeError if a state has the slots of a rule in another form than it needs."""
    stems = {_stem(key) for key in keys}
    others = [key for key in state if _stem(key) in stems and key not in keys]
    if others:
        raise RuntimeError(
            f"the state of parameter {name!r} has {', '.join(others)}, but `stored` now says "
            f"{', '.join(keys)}; leave it as it was at the first step, or make a new optimizer and "
            "load this one's state_dict(), which packs and unpacks slots."
        )


def _stem(key: str) -> str:
    """The name of a slot, without how it is packed."""
    name, _, kind = key.rpartition(".")
    return name if name and (kind in CELLS or kind == "scale") else key


def put_into_stacks(leaves: Sequence[PlanLeaf], tx: Leafwise) -> None:
    """Make the slots of rules that take batches parts of one tensor for each shape.

    A step then reads and writes them without a copy. Those of one turn are next to each other.

    leaves: those that step together.
    """
    for i, (rule, keys, _) in enumerate(tx.rules):
        alike: dict[Any, list[dict[str, Any]]] = {}
        in_order = sorted(leaves, key=lambda leaf, i=i: leaf.turns[i] if leaf.turns else 0)
        storage = rule.storage
        stacked = rule.runs.batched and storage.home is None and not storage.codecs
        for leaf in in_order if stacked else ():
            mine = [leaf.slots.get(key) for key in keys]
            if all(x is None or memory.has_address(x) for x in mine):
                looks = [x if x is None else (x.shape, x.dtype, x.device) for x in mine]
                kind = (leaf.p.shape, leaf.p.dtype, *looks)
                alike.setdefault(kind, []).append(leaf.slots)
        for states in alike.values():
            for key in keys:
                slots = [mine[key] for mine in states if mine.get(key) is not None]
                if len(slots) < 2 or memory.whole(slots) is not None:
                    continue
                for mine, part in zip(states, torch.stack(slots).unbind(), strict=True):
                    mine[key] = part


def check_slots(name: str, p: Tensor, state: dict[str, Any], tx: Leafwise) -> None:
    """Raise TypeError or ValueError for a slot of p's shape that cannot be kept for p."""
    for rule, keys, _ in tx.rules:
        for k, key in enumerate(keys):
            slot = state.get(key)
            if slot is not None and stands_beside(rule, k, slot, p, name):
                base.check_slot(name, key, slot, p, away=rule.storage.home is not None)


def discard(optimizer: OptimizerBase, made: Made) -> None:
    """Take new entries out of the state again, for a step that did not happen.

    An algorithm that counts no steps would take a parameter with a state for one that has stepped.
    """
    for p, key in made:
        mine = optimizer.state.get(p)
        if mine is not None:
            mine.pop(key, None)
            if not mine:
                del optimizer.state[p]


class Names:
    """The tensors that a step writes in place, with names for errors."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.names: list[tuple[str, str]] = []

    def add(
        self, name: str, p: Tensor, state: dict[str, Any] | None = None, tx: Leafwise | None = None
    ) -> None:
        """A parameter and, if it has a state, its slots."""
        self.tensors.append(p)
        self.names.append((name, ""))
        for key in chain.from_iterable(tx.layout.slots if tx is not None else ()):
            slot = state.get(key) if state else None
            if isinstance(slot, Tensor):
                self.tensors.append(slot)
                self.names.append((name, key))

    def check_apart(self) -> None:
        """Raise ValueError if two of them share memory."""
        memory.check_apart(self.tensors, self._name)

    def _name(self, i: int) -> str:
        name, key = self.names[i]
        return f"the slot {key!r} of parameter {name!r}" if key else f"parameter {name!r}"
