"""The checked parameters of a step, with complete states.

What a step changes before it writes is taken back if the step fails.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.adapters.state.capturing import number_device
from functional_optim.adapters.state.names import check_count, named, names_of
from functional_optim.adapters.stepping.columns import Readings, owned
from functional_optim.adapters.stepping.loss import multiply
from functional_optim.checkpoint.errors import described
from functional_optim.core import base, draws, memory
from functional_optim.core.cells import CELLS
from functional_optim.core.first_slots import init_slots
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.storage import Slots, stands_beside
from functional_optim.engine.plan import PlanLeaf, turns_in

if TYPE_CHECKING:
    from functional_optim.adapters.base import OptimizerBase


Changes = list[tuple[Tensor, str | Tensor]]
"""What a step has changed before it writes: new entries of the state, by parameter and key, and
gradients that were divided, with the scale."""


def begin_state(
    optimizer: OptimizerBase,
    k: int,
    name: str,
    p: Tensor,
    tx: Leafwise,
    made: Changes,
    place: str,
    *,
    recorded: bool = False,
) -> None:
    """Add missing entries to the state of a parameter of group k: all at its first step, a new slot
    after a load.

    made: new entries are recorded there first. place: see `noise_places`. recorded: whether
    autograd records them, back to the parameter and the hyperparameters.
    """
    device = number_device(optimizer, optimizer.param_groups[k], p)  # else the current one, or CPU
    if not optimizer.state.get(p):
        for rule, _, _ in tx.rules:
            if rule.storage.slots is not None and not rule.storage.fields:
                init_slots(rule, p.detach())  # which may refuse p
    if not (optimizer.counts_steps or any(tx.layout.slots) or any(tx.layout.carry)):
        return
    mine = optimizer.state[p]
    check_numbers(name, mine, [*tx.carried, *(["step"] if optimizer.counts_steps else [])])
    if optimizer.counts_steps and "step" not in mine:
        made.append((p, "step"))
        mine["step"] = 0 if optimizer.integer_steps else owned(numeric.stored(0.0, device))
    elif isinstance(mine.get("step"), (int, float)) and not optimizer.integer_steps:
        mine["step"] = owned(numeric.stored(float(mine["step"]), device))
    elif device is not None and isinstance(mine.get("step"), Tensor):
        mine["step"] = _there(mine["step"], device)
    for key, value in tx.carried.items():
        if key not in mine:
            first = numeric.stored(value, device)
            made.append((p, key))
            mine[key] = first.clone() if recorded else owned(first)
        elif type(value) is int and mine[key].dtype is torch.float32:  # an older count
            mine[key] = owned(mine[key].to(torch.float64))
        if device is not None:
            mine[key] = _there(mine[key], device)
    for rule, keys, _ in tx.rules:
        if any(mine.get(key) is None for key in keys):
            with draws.within(place):
                start = init_slots(rule, p if recorded else p.detach(), name)
            _check_form(name, mine, keys, start)
            for key, slot in zip(keys, start, strict=True):
                if mine.get(key) is None and slot is not None:
                    made.append((p, key))
                    mine[key] = slot


def noise_places(optimizer: OptimizerBase, k: int, tx: Leafwise) -> dict[Tensor, str]:
    """Where each parameter of a group is for random numbers, apart from all that have its name:
    indices begin at 0 in each group, and two modules may have equal names."""
    groups = optimizer.param_groups
    own = set(names_of(groups[k]) or ())
    drawing = any(rule.draws for rule, _, _ in tx.rules)
    seen = Counter([name for each in groups[:k] if drawing for name, _ in named(each)])
    found = {}
    for name, p in named(groups[k]):
        alone, again = k > 0 and name not in own, drawing and seen[name]
        found[p] = f"{k}." if alone else f"{again}:" if again else ""
        seen[name] += 1
    return found


def check_numbers(
    name: str, state: Any, keys: Iterable[str], counts: Sequence[str] = ("step",)
) -> None:
    """Raise TypeError for a state that is not a dict, or in which a scalar is not a number.

    counts: keys whose values may be Python numbers.
    """
    if not isinstance(state, MutableMapping):
        raise TypeError(
            f"the state of parameter {name!r} is a {type(state).__name__}, not a dict; delete the "
            "entry from opt.state, and the next step begins it again."
        )
    for key, x in [(key, state[key]) for key in keys if key in state]:
        counted = key in counts and isinstance(x, (int, float))
        number = isinstance(x, Tensor) and x.numel() == 1 and x.dtype is not torch.bool
        if not counted and not number:
            raise TypeError(
                f"{key!r} in the state of parameter {name!r} is a {described(x)}; put a 0-dim "
                "tensor there, or delete the entry, and it begins again."
            )


def _there(x: Tensor, device: torch.device) -> Tensor:
    """A scalar on a device, unchanged or as a new tensor."""
    return x if x.device == device else owned(x.to(device))


def _check_form(name: str, state: dict[str, Any], keys: Sequence[str], start: Slots) -> None:
    """Raise RuntimeError if a state has the slots of a rule in another format.

    start: the first slots, None for those that this parameter does not have.
    """
    older = [repr(key) for key in state if str(key).endswith(".seed") and key not in keys]
    if older and any(key.endswith("noise_key") for key in keys):
        raise RuntimeError(
            f"the state of parameter {name!r} has {', '.join(older)}, of a version in which "
            "add_noise had another state, which cannot be continued; replace the state of each "
            'parameter with the number of finished steps, {"step": …}, for new noise.'
        )
    own = [key for key, slot in zip(keys, start, strict=True) if slot is not None]
    stems = set(map(_stem, own))
    others = [key for key in state if _stem(key) in stems and key not in own]
    if others:
        raise RuntimeError(
            f"the state of parameter {name!r} has {', '.join(others)}, but `stored` now says "
            f"{', '.join(own)}; keep the value of the first step, or create a new optimizer and "
            "load this one's state_dict(), which packs and unpacks slots."
        )


def _stem(key: str) -> str:
    """The name of a slot, without how it is packed."""
    name, _, kind = key.rpartition(".")
    return name if name and (kind in CELLS or kind == "scale") else key


def put_into_stacks(leaves: Sequence[PlanLeaf], tx: Leafwise) -> None:
    """Make the slots of rules that take batches parts of one tensor per shape.

    A step then reads and writes them without a copy. Those of one turn are adjacent.

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
    """Raise TypeError or ValueError for a slot of p's shape that cannot be used for p."""
    for rule, keys, _ in tx.rules:
        for k, key in enumerate(keys):
            slot = state.get(key)
            if slot is not None and stands_beside(rule, k, slot, p, name):
                base.check_slot(name, key, slot, p, away=rule.storage.home is not None)


@torch.no_grad()
def discard(optimizer: OptimizerBase, made: Changes) -> None:
    """Take back the changes of a failed step.

    An algorithm that counts no steps would treat a parameter with a state as one that has stepped,
    and gradients would be divided twice.
    """
    while made:
        p, key = made[-1]
        if isinstance(key, Tensor):
            multiply(p, key.to(p.device).reshape(()))
        elif (mine := optimizer.state.get(p)) is not None:
            mine.pop(key, None)
            if not mine:
                del optimizer.state[p]
        made.pop()


class Names:
    """The tensors that a step writes in place, with names for errors."""

    def __init__(self) -> None:
        self.rows: list[tuple[Tensor, str]] = []

    def add(self, name: str, p: Tensor, slots: Mapping[str, Any]) -> None:
        """A parameter, and those of its slots that are tensors."""
        self.rows.append((p, f"parameter {name!r}"))
        for key, x in slots.items():
            if isinstance(x, Tensor):
                self.rows.append((x, f"the slot {key!r} of parameter {name!r}"))

    def check(self) -> None:
        """Raise ValueError if two of them share memory, RuntimeError if one cannot be written."""
        memory.check_apart([x for x, _ in self.rows], lambda i: self.rows[i][1])
        fixed = [name for x, name in self.rows if x.is_inference()]
        if fixed and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{fixed[0]} was made in torch.inference_mode, so a step outside of that mode "
                "cannot write to it; make it outside, or replace it with its clone()."
            )


def live_params(group: dict[str, Any]) -> list[tuple[str, Tensor, Tensor]]:
    """The parameters of a group that have a gradient, with their names."""
    return [(name, p, p.grad) for name, p in named(group) if p.grad is not None]


Turns = dict[tuple[int, str], tuple[int, ...]]
"""The turns of parameters for the rules that act on them, by group and name."""


Row: TypeAlias = tuple[int, Leafwise, PlanLeaf, bool]
"""A parameter on which rules act: its index among the gradients of the group, the rules, the
parameter with its state, and whether this is its first step."""


def turns_of_params(optimizer: OptimizerBase, chains: Sequence[tuple[int, Leafwise]]) -> Turns:
    """The turns that parameters take over all groups."""
    transforms = dict(chains)
    places = [(k, name, p) for k in transforms for name, p in named(optimizer.param_groups[k])]
    turns = turns_in(transforms, places)
    return {(k, name): own for (k, name, _), own in zip(places, turns, strict=True) if own}


def checked_leaves(
    optimizer: OptimizerBase,
    k: int,
    tx: Leafwise,
    turns: Turns,
    made: Changes,
    names: Names,
    *,
    recorded: bool = False,
) -> list[Row]:
    """The checked parameters of a group on which its rules act, with complete states.

    Args:
        optimizer: the optimizer.
        k: the index of the group.
        tx: the transformation of the group.
        turns: those of all parameters.
        made: receives the new entries of the state.
        names: receives the tensors that are written.
        recorded: as in `begin_state`.
    """
    group = optimizer.param_groups[k]
    places = noise_places(optimizer, k, tx)
    if any(placement.where for placement in tx.placements):
        check_count(group)
    found = []
    for i, (name, p, g) in enumerate(live_params(group)):
        part = tx.on(name, p)
        if part is None:
            continue
        optimizer.check_gradient(p, g, group)
        base.check_gradient(name, g, p)
        mine, keys = optimizer.state.get(p) or {}, list(chain.from_iterable(part.layout.slots))
        known = mine if isinstance(mine, MutableMapping) else {}  # where others keep entries, too
        new = all(known.get(key) is None for key in keys)
        begin_state(optimizer, k, name, p, part, made, places[p], recorded=recorded)
        mine = optimizer.state.get(p) or {}
        check_slots(name, p, mine, part)
        names.add(name, p, {key: mine.get(key) for key in keys})
        found.append((i, part, PlanLeaf(name, p, g, mine, turns.get((k, name), ())), new))
    return found


def signature(
    optimizer: OptimizerBase, leaf: PlanLeaf, tx: Leafwise, new: bool, read: Readings
) -> tuple[Any, ...]:
    """The common data of tensors that step together: finished steps, carried scalars, and the
    device of both.

    An optimizer without a step count, such as torch's SGD, only knows whether it is the first step.
    """
    time = read(leaf.slots["step"]) if optimizer.counts_steps else float(not new)
    if not 0 <= time < math.inf:  # or NaN
        raise ValueError(
            f"'step' in the state of parameter {leaf.name!r} is {time}; put the number of "
            "finished steps there, or delete the entry, and it begins again."
        )
    numbers = [leaf.slots[key] for key in own_numbers(tx)]
    held = [leaf.slots["step"], *numbers] if optimizer.counts_steps else numbers
    devices = {str(x.device) for x in held if isinstance(x, Tensor)}
    return time, tuple(map(read, numbers)), tuple(sorted(devices))


def own_numbers(tx: Leafwise) -> list[str]:
    """The keys of the carried scalars that are separate for each parameter."""
    return [key for rule, _, keys in tx.rules if not rule.runs.shared for key in keys]
