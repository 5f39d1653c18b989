"""Any tensors, one by one: what no other executor takes, and steps that are traced or recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim.core import base, sharding
from functional_optim.core.execution import Leaf, measure, run_all_stored, run_stored
from functional_optim.core.rule import Placement
from functional_optim.core.scalars import BoundScalars, Caster
from functional_optim.core.sparse import checked_rows, densified
from functional_optim.core.storage import Slots, present
from functional_optim.core.traits import for_shards
from functional_optim.engine.executor import Executor, How, Runner, Write, write

LARGE = 1 << 28
"""Bytes of parameters and slots of which not all results are held at once."""


class PerTensorExecutor(Executor):
    """Runs rules on each tensor as written: of any type, layout and device, including sparse."""

    @classmethod
    def accepts(
        cls, placements: tuple[Placement, ...], g: Tensor, p: Tensor, slots: list[Slots], how: How
    ) -> Hashable | None:
        """Everything."""
        return cls

    def prepare(self, grads: list[Tensor], scalars: BoundScalars) -> Runner:
        """Itself: nothing is compiled."""
        return self

    def measure(self, grads: list[Tensor], scalars: BoundScalars) -> list[Sequence[Any]]:
        """What the last of the rules measures, tensor by tensor."""
        cast, placements = Caster(scalars.numbers), self._placements(scalars)
        found = []
        for i in self.members:
            p, g = self._before(i), densified(self.group.placements, grads[i])
            found.append(measure(placements, self._leaf(i, g, p, cast)))
        return found

    def step(self, grads: list[Tensor], scalars: BoundScalars) -> list[Write]:
        """The step of every tensor: rules have run by then.

        On large DTensors, and with large slots in other memory, they run while the step is written:
        a whole model may consist of them, and all results at once would need its memory.
        """
        placements, cast = self._placements(scalars), Caster(scalars.numbers)
        grads = [densified(placements, g) for g in grads]
        writes: list[Write] = []
        away = any(placement.rule.storage.home is not None for placement in placements)
        dense = [i for i in self.members if grads[i].layout is torch.strided]
        large = {i for i in dense if away or sharding.is_sharded(self.group.params[i])}
        if self._bytes(large) <= LARGE:
            large.clear()
        for i in self.members:
            if grads[i].layout is not torch.strided:
                leaf = self._leaf(i, grads[i], self.group.params[i], cast)
                writes.append(_rows_stepped(placements, leaf))
        for some in (
            [dense]
            if any(placement.rule.runs.batched for placement in placements)
            else [[i] for i in dense]
        ):
            step = partial(self._stepped, some, grads, placements, cast)
            late = len(some) == 1 and some[0] in large
            writes += [partial(_now, step, self.group.params[some[0]])] if late else step()
        return writes

    def _placements(self, scalars: BoundScalars) -> Sequence[Placement]:
        """The rules of a task, as its tensors need them."""
        return for_shards(scalars.placements, [self.group.params[i] for i in self.members])

    def _bytes(self, members: Collection[int]) -> int:
        """The size of whole parameters and slots: all processes take the same way."""
        group = self.group
        every = [x for i in members for x in (group.params[i], *present(group.slots[i]))]
        return sum([x.numel() * x.dtype.itemsize for x in every])

    def _stepped(
        self,
        members: list[int],
        grads: list[Tensor],
        placements: Sequence[Placement],
        cast: Caster,
    ) -> list[Write]:
        params, slots = self.group.params, self.group.slots
        leaves = [self._leaf(i, grads[i], self._before(i), cast) for i in members]
        writes: list[Write] = []
        for i, (u, new) in zip(members, run_all_stored(placements, leaves), strict=True):
            if self.group.replace:
                writes.append(partial(self._replace, i, u, new))
            else:
                writes.append(partial(write, params[i], base.add(params[i], u), slots[i], new))
        return writes

    def _replace(self, i: int, u: Tensor, new: list[Slots]) -> None:
        self.group.params[i].add_(u)
        self.group.slots[i] = new

    def _leaf(self, i: int, g: Tensor, p: Tensor, cast: Caster) -> Leaf:
        return Leaf(g, p, self.group.slots[i], cast(p), turns=self.group.turns[i])

    def _before(self, i: int) -> Tensor:
        """A parameter as rules read it: autograd keeps that, and the tensor is about to change."""
        p = self.group.params[i]
        return p.clone() if self.group.replace else p


def _now(step: Callable[[], list[Write]], p: Tensor) -> None:
    """Run the rules of a tensor, and write."""
    try:
        writes = step()
    except Exception as error:
        error.add_note(
            f"functional_optim: the rules of a parameter of shape {tuple(p.shape)} failed while "
            "the step was written, so parameters before it are changed; load a checkpoint before "
            "you go on."
        )
        raise
    for one in writes:
        one()


def _rows_stepped(placements: Sequence[Placement], leaf: Leaf) -> Write:
    """The step of the rows that have a sparse gradient, in place."""
    at, rows = checked_rows(placements, leaf)
    u, new = run_stored(placements, rows)
    new_p = base.add(rows.p, u)

    def write() -> None:
        leaf.p.index_put_(at, new_p)
        for own, fresh in zip(leaf.slots, new, strict=True):
            for slot, value in zip(own, fresh, strict=True):
                if slot is not None:
                    slot.index_put_(at, value)

    return write
