"""DTensors: each process steps its shards, which are plain tensors.

An element-wise rule needs nothing else. For a matrix rule the shards are gathered in between,
see `products.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core import sharding
from functional_optim.core.codecs import InBlocks
from functional_optim.core.memory import same_looks
from functional_optim.core.numbers import tensor_of
from functional_optim.core.ownership import Partition, Partitions, slot_parts_of
from functional_optim.core.rule import Placement, Rule
from functional_optim.core.scalars import BoundScalars
from functional_optim.core.storage import Slots, present, stored_slots
from functional_optim.core.traits import adds_up, is_elementwise
from functional_optim.engine.executor import Executor, How, Runner, Write
from functional_optim.engine.products import ProductExecutor


class ShardExecutor(Executor):
    """DTensors that one mesh divides in one way: the local shards are a separate group.

    An element-wise rule does to a shard what it does to that part of the whole tensor; matrix rules
    get whole ones. What is measured on shards is completed over the mesh, once for all tensors. The
    guard of the plan tells whether a shard has moved.
    """

    through_memory = True

    def __init__(self, group: Any, members: list[int], grads: list[Tensor]) -> None:
        super().__init__(group, members, grads)
        self.spec: Any = self.params[0]
        self._build(self._locals(grads))

    def _build(self, grads: list[Tensor]) -> None:
        """Make a group of the local shards. grads: of these."""
        params = list(map(sharding.shard, self.params))
        slots = [
            [_local(x.rule, own, p) for x, own in zip(self.group.placements, mine, strict=True)]
            for mine, p in zip(self.slots, self.params, strict=True)
        ]
        self.same_looks = same_looks(grads)
        parts = [_shared(p, own) for p, own in zip(self.params, self.slots, strict=True)]
        given = self.group.placements, params, slots, grads
        self.inner = self.group.of(*given, turns=self.turns, parts=parts)

    @classmethod
    def accepts(
        cls, placements: tuple[Placement, ...], g: Tensor, p: Tensor, slots: list[Slots], how: How
    ) -> Hashable | None:
        """DTensors, with slots that are divided as the parameter is.

        Rules that take batches may have plain slots, too, which each process has all of, but no
        packed ones: whole matrices are not in the blocks of their parts.
        """
        spec = _spec(p)
        if spec is None or how == "apart" or not sharding.is_sharded(g):
            return None
        batched = [x.rule.runs.batched for x in placements]
        divided = how != "eager" and p.is_contiguous() and Partition.of(p) is not None
        if any(batched) and not divided:
            return None
        for own, some, x in zip(slots, batched, placements, strict=True):
            if some and (x.rule.storage.codecs or slot_parts_of(own) is None):
                return None
            if not some and not (_beside(x.rule, own, p, spec) and is_elementwise(x, p)):
                return None
            if not adds_up(x, p):
                return None
        return (spec, any(batched))

    def prepare(self, grads: list[Tensor], scalars: BoundScalars) -> Runner | None:
        """Itself, once the group of the shards is ready for the task.

        None if a rule that takes matrices would run on shards there: only products gather them.
        """
        self.inner.prepare(self._given(grads), scalars)
        batched = any(x.rule.runs.batched for x in self.group.placements)
        gather = all(isinstance(x, ProductExecutor) for x in self.inner.executors)
        return self if gather or not batched else None

    def measure(self, grads: list[Tensor], scalars: BoundScalars) -> list[Sequence[Any]]:
        """What is measured on the shards, as one DTensor of parts for each number."""
        given = self._given(grads)
        found = self.inner.prepare(given, scalars).measure(given, scalars)
        return [[over_mesh(x, self.spec) for x in part] for part in found]

    def step(self, grads: list[Tensor], scalars: BoundScalars) -> list[Write]:
        """The step of the shards."""
        given = self._given(grads)  # which may make another inner group
        return self.inner.prepare(given, scalars).step(given, scalars)

    def keeps_memory(self) -> bool:
        """Whether the group of the shards does."""
        return self.inner.keeps_memory()

    def _given(self, grads: list[Tensor]) -> list[Tensor]:
        """The local gradients; others than those before need another group."""
        given = self._locals(grads)
        if not self.same_looks(*given):
            self._build(given)
        return given

    def _locals(self, grads: list[Tensor]) -> list[Tensor]:
        """The local gradients; products do not take those that are negated lazily."""
        return [sharding.shard(g).resolve_neg() for g in self.mine(grads)]


def over_mesh(x: Any, spec: Any) -> Any:
    """A number of this process as its part of a sum over the processes that divide a tensor.

    spec: that tensor.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, placed = spec.device_mesh, spec.placements
    placements = [Replicate() if where.is_replicate() else Partial() for where in placed]
    number = tensor_of(x).to(torch.float64)
    return DTensor.from_local(number.to(mesh.device_type), mesh, placements, run_check=False)


def _beside(rule: Rule, slots: Slots, p: Any, spec: Hashable) -> bool:
    """Whether an element-wise rule can step the shards of slots together with those of a
    parameter."""
    if any(_spec(x) != spec for x in present([slots])):
        return False
    if not rule.storage.codecs:
        return all(x.shape == p.shape for x in present([slots]))
    return all(
        own.whole is None or own.whole.shape == p.shape
        if own.codec is None
        else isinstance(own.codec, InBlocks)
        for own in stored_slots(rule, slots)
    )


def _local(rule: Rule, slots: Slots, p: Any) -> Slots:
    """The slots of a local shard; packed ones in the blocks that a plain tensor of it has."""
    if not rule.storage.codecs:
        return tuple(map(sharding.shard, slots))
    shape = sharding.shard(p).shape
    packed: dict[int, Tensor] = {}
    for own in stored_slots(rule, slots):
        if isinstance(own.codec, InBlocks):
            mine = own.codec.local(own.packed, shape)
            packed.update({id(x): y for x, y in zip(own.packed, mine, strict=True)})
    return tuple([packed[id(x)] if id(x) in packed else sharding.shard(x) for x in slots])


def _shared(p: Any, slots: Sequence[Slots]) -> Partitions:
    """What the local part of a parameter, and of its slots, is a part of."""
    part = Partition.of(p) or Partition(p.shape, None, None)  # of no interest to element-wise rules
    return Partitions(part, tuple([slot_parts_of(own) or () for own in slots]))


def _spec(x: Any) -> Hashable | None:
    """By which mesh, and how, a tensor is divided; None if it is none, or the sum of its parts."""
    placements = getattr(x, "placements", None)
    if placements is None or any(where.is_partial() for where in placements):
        return None
    return (x.device_mesh, tuple(placements))
