"""Tensors without a gradient, for rules that also update their slots."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from functional_optim.core import memory
from functional_optim.core.execution import slots_without_gradient
from functional_optim.core.scalars import Caster
from functional_optim.core.storage import Slots
from functional_optim.engine.executor import Write
from functional_optim.engine.plan import StepContext


def place_of(
    keys: tuple[str, ...], carries: Sequence[tuple[tuple[str, ...], ...]]
) -> tuple[int, int] | None:
    """The first of some entries that has the rule with these carried scalars, and its index there.

    carries: for each entry, the keys of each rule.
    """
    return next(((k, own.index(keys)) for k, own in enumerate(carries) if keys in own), None)


class WithoutGradient:
    """The tensors of a rule without a gradient, and the update of their slots.

    entry: the index of an entry with the rule's scalars. at: its index among the rules there.
    """

    def __init__(self, entry: int, at: int, rows: list[tuple[Tensor, Slots]]) -> None:
        self.entry = entry
        self.at = at
        self.rows = rows

    def results(self, contexts: Sequence[StepContext]) -> list[Slots]:
        """The new slots of each tensor."""
        context = contexts[self.entry]
        placement, cast = context.placements[self.at], Caster([context.numbers[self.at]])
        return [
            slots_without_gradient(placement.rule, p, slots, cast(p)[0]) for p, slots in self.rows
        ]

    def step(self, contexts: Sequence[StepContext]) -> list[Write]:
        """The new slots, ready to be written in place."""
        return [
            partial(slot.copy_, x)
            for (_, slots), new in zip(self.rows, self.results(contexts), strict=True)
            for slot, x in zip(slots, memory.apart(new, slots), strict=True)
            if slot is not None and x is not slot
        ]
