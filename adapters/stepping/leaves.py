"""The parameters of an optimizer that a step concerns, checked, with all that their states need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from functional_optim.adapters.state.capturing import number_device
from functional_optim.adapters.state.filling import Made, Names, check_slots, fill_state
from functional_optim.adapters.state.names import named
from functional_optim.adapters.stepping.columns import Readings
from functional_optim.core import base
from functional_optim.core.leafwise import Leafwise
from functional_optim.engine.plan import PlanLeaf, turns_in

if TYPE_CHECKING:
    from functional_optim.adapters.base import OptimizerBase


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
    made: Made,
    names: Names,
    *,
    recorded: bool = False,
) -> list[Row]:
    """The parameters of a group on which its rules act, checked, with all that their state needs.

    Args:
        optimizer: the optimizer.
        k: the index of the group.
        tx: what the group asks for.
        turns: of all parameters.
        made: gets the entries of the state that are new.
        names: gets the tensors that are written.
        recorded: as in `fill_state`.
    """
    group = optimizer.param_groups[k]
    found = []
    for i, (name, p, g) in enumerate(live_params(group)):
        part = tx.on(name, p)
        if part is None:
            continue
        optimizer.check_gradient(p, g, group)
        base.check_gradient(name, g, p)
        new = not optimizer.state.get(p)
        device = number_device(optimizer, group, p)
        fill_state(optimizer, name, p, part, made, recorded=recorded, device=device)
        mine = optimizer.state.get(p) or {}
        check_slots(name, p, mine, part)
        names.add(name, p, mine, part)
        found.append((i, part, PlanLeaf(name, p, g, mine, turns.get((k, name), ())), new))
    return found


def signature(
    optimizer: OptimizerBase, leaf: PlanLeaf, tx: Leafwise, new: bool, read: Readings
) -> tuple[Any, ...]:
    """What tensors that step together have in common: finished steps, carried numbers, and the
    device of both.

    An optimizer that keeps no step count, as torch's SGD, knows only whether it was here before.
    """
    time = read(leaf.slots["step"]) if optimizer.counts_steps else float(not new)
    numbers = [leaf.slots[key] for key in own_numbers(tx)]
    held = [leaf.slots["step"], *numbers] if optimizer.counts_steps else numbers
    devices = {str(x.device) for x in held if isinstance(x, Tensor)}
    return time, tuple(map(read, numbers)), tuple(sorted(devices))


def own_numbers(tx: Leafwise) -> list[str]:
    """The keys of the carried numbers that each parameter has for itself."""
    return [key for rule, _, keys in tx.rules if not rule.runs.shared for key in keys]
