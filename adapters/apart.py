"""Stepping without a plan: traced, inside a transform of torch.func, or recorded by autograd."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from functional_optim import numeric
from functional_optim.adapters.names import named
from functional_optim.adapters.plan import asks, extra_of, fill_state
from functional_optim.engine import Cohort, Turn, advance
from functional_optim.layout import Layout
from functional_optim.leafwise import Leafwise

if TYPE_CHECKING:
    from functional_optim.adapters.optimizer import Runs


def step_apart(optimizer: Runs, loss: Any, *, replace: bool) -> None:
    """Step every parameter; with `replace`, put new tensors into the state for autograd.

    loss: what the closure returned, for links that read it.

    Each parameter is a cohort of its own, with its own `step` tensor as the time: in a graph there
    is no comparing of tensors' values.
    """
    turns: list[Turn] = []
    layouts = []
    for group in optimizer.param_groups:
        tx = optimizer.checked_transform(group, in_step=True)
        if not isinstance(tx, Leafwise):
            raise TypeError(
                "a step that torch.compile or make_fx traces, or autograd records, needs a recipe "
                "made of one-tensor rules; this one also has a transformation of whole trees."
            )
        for name, p in named(group):
            part = tx.on(name, p) if p.grad is not None else None
            if p.grad is None or part is None:
                continue
            optimizer.check_gradient(p, p.grad, group)
            new = not optimizer.state.get(p)
            fill_state(optimizer, p, part, recorded=replace)
            mine = optimizer.state.get(p) or {}
            links, layout = part.links, part.layout
            slots = [tuple([mine.get(key) for key in keys]) for keys in layout.slots]
            cohort = Cohort(
                links,
                [p],
                [slots],
                [p.grad],
                how="apart",
                counts=layout.counts,
                replace=replace,
            )
            if optimizer.counts_steps:
                time = numeric.float64(mine["step"] + 1)
            else:
                time = 1.0 if new else 2.0
            carry = [tuple([mine[key].to(torch.float64) for key in keys]) for keys in layout.carry]
            extra = extra_of(loss) if asks(part) else {}
            turns.append(Turn(cohort, [p.grad], time, carry, extra))
            layouts.append(layout)
    wide = replace and _keeps_doubles(optimizer, layouts, turns)
    with numeric.storing_wide() if wide else nullcontext():
        advance(turns)
        _write_back(optimizer, turns, layouts, replace=replace)


def _keeps_doubles(optimizer: Runs, layouts: Sequence[Layout], turns: Sequence[Turn]) -> bool:
    """Are all carried numbers in the state float64, as one that is checked numerically is?"""
    found = [
        optimizer.state[turn.cohort.params[0]][key].dtype
        for turn, layout in zip(turns, layouts, strict=True)
        for keys in layout.carry
        for key in keys
    ]
    return bool(found) and set(found) == {torch.float64}


def _write_back(
    optimizer: Runs, turns: Sequence[Turn], layouts: Sequence[Layout], *, replace: bool
) -> None:
    for turn, layout in zip(turns, layouts, strict=True):
        mine = optimizer.state.get(turn.cohort.params[0])
        if not mine:
            continue
        if optimizer.counts_steps:
            with torch.no_grad():
                mine["step"] += 1
        for keys, values in zip(layout.carry, turn.carried, strict=True):
            for key, value in zip(keys, values, strict=True):
                mine[key] = numeric.stored(value)
        if replace:
            for keys, values in zip(layout.slots, turn.cohort.slots[0], strict=True):
                mine.update(zip(keys, values, strict=True))
