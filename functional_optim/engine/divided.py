"""DTensors sharded along rows, for rules with reductions.

Each process steps its rows. A sum over all rows, such as a norm or the mean of a column, is
computed over local rows, and reduced over the processes once for many tensors. So nothing is
gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim import kernels
from functional_optim.core import sharding
from functional_optim.core.memory import laid_out_like
from functional_optim.core.ownership import Partition
from functional_optim.core.rule import Placement, takes_turns
from functional_optim.core.scalars import BoundScalars
from functional_optim.core.small import sizes_of
from functional_optim.core.storage import Slots, present
from functional_optim.engine.executor import How, Runner, Write
from functional_optim.engine.native import KernelExecutor, Served, kind_of
from functional_optim.engine.shards import over_mesh
from functional_optim.kernels.graph import Graph

BUCKET = 1 << 23
"""Elements of tensors whose passes run together, with stored intermediate values."""


class DividedExecutor(KernelExecutor):
    """DTensors on a CPU that one mesh dimension shards along their first dimension."""

    def __init__(self, group: Any, members: list[int], grads: list[Tensor]) -> None:
        super().__init__(group, members, grads)
        self.spec: Any = self.params[0]
        partition = Partition.of(self.spec)
        assert partition is not None
        self.processes = partition.group

    @classmethod
    def accepts(
        cls, placements: tuple[Placement, ...], g: Tensor, p: Tensor, slots: list[Slots], how: How
    ) -> Hashable | None:
        """Real tensors with plain slots, or slots with the same placements."""
        if how not in ("compiled", "strict") or not (sharding.is_sharded(p) and p.dim()):
            return None
        if any(x.rule.runs.batched or x.rule.storage.codecs for x in placements):
            return None
        spec, own = _spec(p), sharding.shard(p)
        if (
            spec is None
            or spec[1] is None
            or _spec(g) != spec
            or own.device.type != "cpu"
            or p.is_complex()
        ):
            return None
        for x in present(slots):
            where = _spec(x) if sharding.is_sharded(x) else (None, None)
            if where is None or (where[1] == 0 and where != spec):
                return None
        every = (p, *present(slots))  # a single row is contiguous however the whole tensor lies
        if not all(x.is_contiguous() for x in (*every, *map(sharding.shard, every))):
            return None
        return (spec, *kind_of(g, p, slots))

    def whole(
        self, g: Tensor, p: Tensor, slots: list[Slots], scalars: BoundScalars
    ) -> tuple[Tensor, Tensor, list[Slots]]:
        """Tensors of the global shapes, without values."""
        return _whole(g), _whole(p), [tuple(map(_whole, own)) for own in slots]

    def prepare(self, grads: list[Tensor], scalars: BoundScalars) -> Runner | None:
        """The task on the rows of this process; None if a rule has no kernel for it."""
        try:
            return self._task(grads, scalars)
        except kernels.Unsuitable:
            return None

    def _task(self, grads: list[Tensor], scalars: BoundScalars) -> DividedTask | None:
        if takes_turns(scalars.placements):
            return None
        used, found = len(scalars.placements), self.graphs(grads, scalars)
        sources = [kernels.source_of(own.graph) for own in found]
        if scalars.goal != "step" and not all(x.blocks for x in sources):
            return None  # its sums are reduced later
        for own in found:
            for i, graph in zip(own.members, own.graphs, strict=True):
                _check(graph, self.params[i], self.slots[i][:used])
        kernels.prefetch(sources)
        natives: list[tuple[Served, kernels.Native]] = []
        for own in found:
            native = own.loaded(strict=self.group.strict)
            if native is None:
                return None
            natives.append((own, native))
        return DividedTask(self, used, natives)

    def keeps_memory(self) -> bool:
        """Yes: values that last from one pass to the next."""
        return True

    def combine(self, how: kernels.Combination, x: Tensor) -> Callable[[], Tensor]:
        """Begin to reduce a vector over the processes; the result waits for that."""
        dist = torch.distributed
        if how == "sum":
            work: Any = dist.all_reduce(x, group=self.processes, async_op=True)
            return lambda: (work.wait(), x)[1]
        # a maximum there may drop NaN
        every = [torch.empty_like(x) for _ in range(dist.get_world_size(self.processes))]
        work = dist.all_gather(every, x, group=self.processes, async_op=True)
        return lambda: (work.wait(), getattr(torch.stack(every), f"a{how}")(0))[1]


class DividedTask:
    """Runs a task for the tensors of an executor.

    Launches run on two lanes with scratch memory each. While the processes put together what one
    lane has reduced, the other one computes.
    """

    def __init__(
        self,
        executor: DividedExecutor,
        used: int,
        natives: Sequence[tuple[Served, kernels.Native]],
    ) -> None:
        self.executor = executor
        pairs = zip(executor.params, executor.slots, strict=True)
        rows = [list(map(sharding.shard, (p, *present(slots[:used])))) for p, slots in pairs]
        self.shards = [row[0] for row in rows]
        launches = self._launched(rows, natives)
        self.lanes = [launches[::2], launches[1::2]]
        for lane in self.lanes:
            needed = max([launch.needed for _, launch in lane], default=0)
            memory = torch.empty(needed, dtype=torch.uint8, device="cpu")
            for _, launch in lane:
                launch.use(memory)

    def measure(self, grads: list[Tensor], scalars: BoundScalars) -> list[Sequence[Any]]:
        """The measurements on the rows of this process, as partial sums of a DTensor."""
        spec = self.executor.spec
        return [
            [over_mesh(x, spec) for x in one] for one in _alternate(self._passes(grads, scalars))
        ]

    def step(self, grads: list[Tensor], scalars: BoundScalars) -> Sequence[Write]:
        """The step of the rows of this process."""
        return [partial(_alternate, self._passes(grads, scalars))]

    def _passes(self, grads: list[Tensor], scalars: BoundScalars) -> list[list[kernels.Passes]]:
        """The passes of the launches on each lane."""
        given = [sharding.shard(g) for g in self.executor.mine(grads)]
        given = [laid_out_like(g.resolve_neg(), p) for g, p in zip(given, self.shards, strict=True)]
        return [
            [launch.passes([given[i] for i in own], scalars) for own, launch in lane]
            for lane in self.lanes
        ]

    def _launched(
        self, rows: list[list[Tensor]], natives: Sequence[tuple[Served, kernels.Native]]
    ) -> list[tuple[list[int], kernels.DividedLaunch]]:
        found: list[tuple[list[int], kernels.DividedLaunch]] = []
        for own, native in natives:
            for some in _buckets([self.executor.params[i].numel() for i in own.members]):
                members = [own.members[k] for k in some]
                launch = kernels.DividedLaunch(
                    native,
                    [own.graphs[k].sizes_of(sizes_of(rows[own.members[k]][0])) for k in some],
                    [list(map(Tensor.data_ptr, rows[i])) for i in members],
                    [own.constants[k] for k in some],
                    torch.get_num_threads(),
                    wholes=[own.sizes[k][0] for k in some],
                    combine=self.executor.combine,
                )
                found.append((members, launch))
        return found


def _alternate(lanes: Sequence[Sequence[kernels.Passes]]) -> list[tuple[float, ...]]:
    """Run the passes on all lanes, one lane to its next pause and then the other: what each launch
    measures."""
    found: list[tuple[float, ...]] = []
    waiting = list(map(_one_by_one, lanes))
    while waiting:
        lane = waiting.pop(0)
        try:
            next(lane)
            waiting.append(lane)
        except StopIteration as end:
            found += end.value
    return found


def _one_by_one(
    lane: Sequence[kernels.Passes],
) -> Generator[None, None, list[tuple[float, ...]]]:
    found: list[tuple[float, ...]] = []
    for one in lane:
        found.append((yield from one))
    return found


def _buckets(sizes: Sequence[int]) -> list[list[int]]:
    """Tensors that are stepped together, in their order: the same in all processes."""
    found: list[list[int]] = []
    filled = 0
    for i, size in enumerate(sizes):
        if not found or filled + size > BUCKET:
            found.append([])
            filled = 0
        found[-1].append(i)
        filled += size
    return found


def _spec(x: Any) -> tuple[Any, int | None] | None:
    """The group of processes that share a tensor, and 0 if it is sharded along its first dimension;
    None for other placements."""
    partition = Partition.of(x) if sharding.is_sharded(x) else None
    if partition is None or partition.dim not in (0, None):
        return None
    return (partition.group, partition.dim)


def _whole(x: Tensor | None) -> Any:
    """A tensor of this kind with the global shape, without values."""
    return None if x is None else torch.empty(x.shape, dtype=x.dtype, device="cpu")


def _check(graph: Graph, p: Tensor, slots: Sequence[Slots]) -> None:
    """Raise Unsuitable unless a graph treats rows like a whole tensor, except for reductions."""
    if graph.block or graph.reads_places or not graph.sizes or graph.parts[0][:1] != (0,):
        raise kernels.Unsuitable("rows of a tensor")
    for x, node in zip(present(slots), graph.inputs[2:], strict=True):
        divided = sharding.is_sharded(x) and _spec(x) == _spec(p)
        if divided != (0 in node.axes) or (
            divided and len(sharding.shard(x)) != len(sharding.shard(p))
        ):
            raise kernels.Unsuitable("a slot that is not divided as its parameter is")
