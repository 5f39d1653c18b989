"""The distribution of matrix computations over processes, and its communication.

A matrix rule needs whole matrices. Either every process gathers and computes each matrix, or the
matrices are distributed: each has an owner, to which the others send their shards, and which sends
back the shards of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core import sharding

Result = tuple[Tensor, tuple[Any, ...]]
"""An update and new slots."""


class OwnerGroup(NamedTuple):
    """Distribution of matrices over processes. group: those that have the same plain tensors; None:
    the default group. DTensors store which processes share them."""

    group: Any = None


class Partition(NamedTuple):
    """How processes share a tensor.

    shape: of the whole. group: the processes that share it. dim: the dimension along which it is
    sharded; None: it is replicated.
    """

    shape: torch.Size
    group: Any
    dim: int | None

    @classmethod
    def of(cls, x: Any, group: Any = None) -> Partition | None:
        """That of a DTensor, or of a plain tensor that all processes of a group have.

        None for a DTensor with other placements than one shard along one mesh dimension.
        """
        if not sharding.is_sharded(x):
            return cls(x.shape, group, None)
        cut = [i for i, where in enumerate(x.placements) if not where.is_replicate()]
        if not cut:
            return cls(x.shape, x.device_mesh.get_group(0), None)
        from torch.distributed.tensor import Shard

        (first, *others), mesh = cut, x.device_mesh
        where = x.placements[first]
        if others or type(where) is not Shard:
            return None
        return cls(x.shape, mesh.get_group(first), where.dim % x.dim())

    def cut(self, whole: Tensor) -> list[Tensor]:
        """The shards of all processes, in their order, along the sharded dimension."""
        assert self.dim is not None
        n, size = torch.distributed.get_world_size(self.group), whole.shape[self.dim]
        each = -(-size // n)
        at = [min(k * each, size) for k in range(n + 1)]
        return [whole.narrow(self.dim, a, b - a) for a, b in pairwise(at)]


class Partitions(NamedTuple):
    """The sharding of a local tensor, and of each slot of each rule; None for a plain slot."""

    part: Partition
    slots: tuple[tuple[Partition | None, ...], ...]


def slot_parts_of(slots: Sequence[Any]) -> tuple[Partition | None, ...] | None:
    """The sharding of each slot, None for a plain one.

    None if `Partition` cannot describe that of one.
    """
    parts = [Partition.of(x) if sharding.is_sharded(x) else None for x in slots]
    pairs = zip(slots, parts, strict=True)
    return None if any(y is None and sharding.is_sharded(x) for x, y in pairs) else tuple(parts)


Key = tuple[int, int]
"""A tensor of a matrix: the index of the matrix, and 0 for its update, k for the k-th slot."""


class Transfer(NamedTuple):
    """A tensor that is sent to the owner of its matrix, or received from it.

    like: a tensor without data, like the whole. here: the local shard; None: nothing.
    """

    key: Key
    part: Partition
    like: Tensor
    here: Tensor | None

    @classmethod
    def of(cls, key: Key, part: Partition, x: Tensor) -> Transfer:
        """A tensor of which this process has x."""
        return cls(key, part, torch.empty(part.shape, dtype=x.dtype, device="meta"), x)

    @property
    def divided(self) -> bool:
        """Whether it is sharded."""
        return self.part.dim is not None

    def piece(self, rank: int) -> torch.Size:
        """The shape of the shard of a process."""
        return self.part.cut(self.like)[rank].shape


def owners_of(shapes: Sequence[torch.Size], n: int) -> list[int]:
    """The rank of each matrix's owner, to balance the cost of products.

    The most expensive matrices first, each to the process with the lowest cost so far.
    """
    load = [0] * n
    owners = [0] * len(shapes)
    cost = [math.prod(shape) * min(shape[-2:], default=1) for shape in shapes]
    for i in sorted(range(len(shapes)), key=lambda i: -cost[i]):
        owners[i] = load.index(min(load))
        load[owners[i]] += cost[i]
    return owners


def run_owned(
    run: Callable[[list[int], list[Tensor], list[tuple[Any, ...]]], list[Result]],
    us: Sequence[Tensor],
    slots: Sequence[tuple[Any, ...]],
    parts: Sequence[Partition],
    slot_parts: Sequence[Sequence[Partition | None]],
    *,
    spread: bool,
) -> list[Result]:
    """Run a matrix rule on whole ones. Returns this process's parts of the results.

    All processes of a group call it with the same matrices in the same order.

    Args:
        run: the rule on some matrices, by their indices, with whole updates and slots.
        us: the local shards of the updates.
        slots: its slots, or their local shards.
        parts: the sharding of each parameter.
        slot_parts: the sharding of each slot; None: it is a plain tensor.
        spread: whether each matrix has one owner; otherwise every process computes all.
    """
    results: list[Result] = [(u, ()) for u in us]
    alike: dict[Any, list[int]] = {}
    for i, part in enumerate(parts):
        alike.setdefault(part.group, []).append(i)
    for group, some in alike.items():
        ranks = Ranks(group, {i: parts[i].shape for i in some}, us[0].device, spread=spread)
        old = {(i, k): x for i in some for k, x in enumerate((us[i], *slots[i])) if x is not None}
        moving = []
        for (i, k), x in old.items():
            part = slot_parts[i][k - 1] if k else parts[i]
            moving.append(Transfer.of((i, k), part or Partition(x.shape, group, None), x))
        whole = {**old, **ranks.gathered([x for x in moving if x.divided])}
        mine = [i for i in some if ranks.owns(i)]
        given = [tuple([whole.get((i, 1 + k)) for k in range(len(slots[i]))]) for i in mine]
        found = run(mine, [whole[i, 0] for i in mine], given)
        new = {
            (i, k): x
            for i, (u, own) in zip(mine, found, strict=True)
            for k, x in enumerate((u, *own))
            if x is not None
        }
        back = [x._replace(here=_as(new.get(x.key), x.like.dtype)) for x in moving]
        here = ranks.handed_out(back)
        for i in some:
            own = [here.get((i, k)) for k in range(1, 1 + len(slots[i]))]
            results[i] = (here[i, 0], tuple(own))
    return results


def _as(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype)


class Ranks:
    """The processes of a group, and the owner of each matrix. spread: otherwise each process has
    all."""

    def __init__(
        self, group: Any, shapes: dict[int, torch.Size], device: torch.device, *, spread: bool
    ) -> None:
        sharding.check_member("matrix_owners", group)
        self.group = group
        self.device = device
        self.n = torch.distributed.get_world_size(group)
        self.rank = torch.distributed.get_rank(group)
        self.owner = None
        if spread:
            owners = owners_of([*shapes.values()], self.n)
            self.owner = dict(zip(shapes, owners, strict=True))

    def owns(self, matrix: int) -> bool:
        """Whether this process computes it."""
        return self.owner is None or self.owner[matrix] == self.rank

    def owned_by(self, moving: Sequence[Transfer], rank: int) -> list[Transfer]:
        """The tensors of the matrices of a process."""
        owner = self.owner
        return [x for x in moving if owner is None or owner[x.key[0]] == rank]

    def gathered(self, moving: Sequence[Transfer]) -> dict[Key, Tensor]:
        """The gathered tensors of the matrices that this process computes."""
        found: dict[Key, Tensor] = {}
        for some in _by_dtype(moving):
            mine = self.owned_by(some, self.rank)
            shapes = [[x.piece(k) for x in mine] for k in range(self.n)]
            if self.owner is None:
                came = self._collected(some, shapes)
            else:
                going = [[x.here for x in self.owned_by(some, k)] for k in range(self.n)]
                came = self._exchanged(going, shapes, some)
            for j, x in enumerate(mine):
                assert x.part.dim is not None
                found[x.key] = torch.cat([pieces[j] for pieces in came], x.part.dim)
        return found

    def handed_out(self, moving: Sequence[Transfer]) -> dict[Key, Tensor]:
        """The local shards of the owners' results, and all tensors that are not sharded."""
        divided = [x for x in moving if x.divided]
        whole = [x for x in moving if not x.divided]
        if self.owner is None:
            parts = {x.key: x.part.cut(_there(x))[self.rank] for x in divided}
            return {**parts, **{x.key: _there(x) for x in whole}}
        found: dict[Key, Tensor] = {}
        for some in _by_dtype(divided):
            mine = [x.part.cut(_there(x)) for x in self.owned_by(some, self.rank)]
            going = [[pieces[k] for pieces in mine] for k in range(self.n)]
            each = [self.owned_by(some, k) for k in range(self.n)]
            shapes = [[x.piece(self.rank) for x in own] for own in each]
            found.update(_named(each, self._exchanged(going, shapes, some)))
        for some in _by_dtype(whole):
            each = [self.owned_by(some, k) for k in range(self.n)]
            shapes = [[x.like.shape for x in own] for own in each]
            found.update(_named(each, self._collected(each[self.rank], shapes, some)))
        return found

    def _exchanged(
        self,
        going: Sequence[Sequence[Tensor | None]],
        shapes: Sequence[Sequence[torch.Size]],
        some: Sequence[Transfer],
    ) -> list[list[Tensor]]:
        """The tensors received from each process, of these shapes, in an all-to-all."""
        sent = [self._flat(own, some) for own in going]
        sizes = [sum(map(math.prod, own)) for own in shapes]
        came = sent[0].new_empty(sum(sizes))
        given = [x.numel() for x in sent]
        torch.distributed.all_to_all_single(came, torch.cat(sent), sizes, given, group=self.group)
        return [_apart(flat, own) for flat, own in zip(came.split(sizes), shapes, strict=True)]

    def _collected(
        self,
        mine: Sequence[Transfer],
        shapes: Sequence[Sequence[torch.Size]],
        some: Sequence[Transfer] | None = None,
    ) -> list[list[Tensor]]:
        """The tensors of all processes, of these shapes, in an all-gather padded to the largest."""
        sizes = [sum(map(math.prod, own)) for own in shapes]
        flat, most = self._flat([x.here for x in mine], some or mine), max(sizes)
        padded = torch.nn.functional.pad(flat, (0, most - flat.numel()))
        came = flat.new_empty(most * self.n)
        if most:
            _all_gather()(came, padded, group=self.group)
        each = zip(came.view(self.n, most), sizes, shapes, strict=True)
        return [_apart(row[:size], own) for row, size, own in each]

    def _flat(self, tensors: Sequence[Tensor | None], some: Sequence[Transfer]) -> Tensor:
        """Tensors as one vector; `some`: a tensor of their dtype, for an empty list."""
        known = [x.reshape(-1) for x in tensors if x is not None]
        if known:
            return torch.cat(known)
        return torch.empty(0, dtype=some[0].like.dtype, device=self.device)


def _all_gather() -> Any:
    """The collective that gathers equal vectors, by its name in this version of torch."""
    given = torch.distributed
    return getattr(given, "all_gather_single", None) or given.all_gather_into_tensor


def _there(x: Transfer) -> Tensor:
    assert x.here is not None
    return x.here


def _named(
    each: Sequence[Sequence[Transfer]], came: Sequence[Sequence[Tensor]]
) -> list[tuple[Key, Tensor]]:
    pairs = [
        pair for own, got in zip(each, came, strict=True) for pair in zip(own, got, strict=True)
    ]
    return [(x.key, tensor) for x, tensor in pairs]


def _by_dtype(moving: Sequence[Transfer]) -> list[list[Transfer]]:
    alike: dict[torch.dtype, list[Transfer]] = {}
    for x in moving:
        alike.setdefault(x.like.dtype, []).append(x)
    return [*alike.values()]


def _apart(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    cut = flat.split([math.prod(shape) for shape in shapes]) if shapes else []
    return [x.reshape(shape) for x, shape in zip(cut, shapes, strict=True)]
