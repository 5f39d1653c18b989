"""Sharded tensors (DTensor): gathering and sharding.

Every function of one tensor returns a plain one unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.numbers import tensor_of


def is_sharded(x: Any) -> bool:
    """Whether it is a DTensor."""
    return type(x) is not Tensor and hasattr(x, "placements")


def whole(x: Any) -> Any:
    """A sharded tensor as a plain one, gathered."""
    full = getattr(x, "full_tensor", None)
    return x if full is None else full()


def part(x: Any) -> Any:
    """The local shard of a sharded tensor, as a plain tensor."""
    local = getattr(x, "to_local", None)
    return x if local is None else local()


def shard(x: Any) -> Any:
    """The local shard of a DTensor: its own memory, after pending communication.

    `to_local` creates a new view of a parameter at each call. None and plain tensors are returned
    unchanged.
    """
    local = unwaited_shard(x)
    wait = None if local is x else getattr(local, "wait", None)
    return local if wait is None else wait()


def unwaited_shard(x: Any) -> Any:
    """The local shard of a DTensor, also while something is still being sent to it."""
    return getattr(x, "_local_tensor", x)


def complete(x: Any) -> Any:
    """A sum along a sharded dimension, reduced over the ranks that share it.

    DTensor defers the reduction until the sum is read, and cannot save a deferred one.
    """
    return _replicated(x, lambda where: where.is_partial())


def _replicated(x: Any, some: Callable[[Any], Any]) -> Any:
    """A DTensor with some of its placements replicated; x, if it has none of these."""
    placements = getattr(x, "placements", ())
    if not any(map(some, placements)):
        return x
    from torch.distributed.tensor import Replicate

    return x.redistribute(
        placements=[Replicate() if some(where) else where for where in placements]
    )


def amax(x: Any, dims: Sequence[int]) -> Any:
    """The largest elements along dimensions, which are kept with size 1, of elements of 0 or more.

    For a process without elements of a DTensor torch raises an error, while the others would wait
    for it. Such a process adds a 0.
    """
    local = part(x)
    if not is_sharded(x) or all(local.shape[i] for i in dims):
        return x.amax(dims, keepdim=True)
    from torch.distributed.tensor import Partial

    sizes, shape = ([1 if i in dims else n for i, n in enumerate(y.shape)] for y in (local, x))
    placements = [
        Partial("max") if getattr(where, "dim", None) in dims else where for where in x.placements
    ]
    return from_part(local.new_zeros(sizes), x, torch.Size(shape), placements)


def by_rows(x: Any) -> Any:
    """A DTensor sharded only along its first dimension, so that it can be flattened; otherwise x.

    torch 2.11 refuses to flatten others, and later ones gather them.
    """
    return _replicated(x, lambda where: getattr(where, "dim", 0))


def is_divided_by_rows(x: Any) -> bool:
    """Whether a DTensor is sharded only along its first dimension."""
    cut = [where for where in getattr(x, "placements", ()) if not where.is_replicate()]
    return [type(where).__name__ for where in cut] == ["Shard"] and cut[0].dim == 0


def placed_like(x: Any, like: Any) -> Any:
    """x, plain or a DTensor, with the placements of `like`.

    DTensor gathers a dimension of size 1 in operations that could broadcast along it.
    """
    if not is_sharded(like):
        return x
    placements = like.placements
    if placements == getattr(x, "placements", None):
        return x
    if hasattr(x, "redistribute"):
        return x.redistribute(placements=placements)
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # distribute_tensor cannot be traced
    everywhere = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=placements)


def on_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """An update or a measurement of a rule that gets whole tensors for DTensors.

    Each process keeps its shards of an update and its slots.
    """

    def run(u: Any, slots: Any, *given: Any) -> Any:
        if not is_sharded(u):
            return function(u, slots, *given)
        own = type(slots)(*map(whole, slots)) if slots else slots
        found = function(whole(u), own, *map(whole, given))
        pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], tuple)
        if not pair or len(found[1]) != len(slots) or not isinstance(found[0], Tensor):
            return found  # a measurement, or an error for the caller
        new = [placed_like(x, old) for x, old in zip(found[1], slots, strict=True)]
        return placed_like(found[0], u), type(found[1])(*new) if new else found[1]

    return run


def gradient_of(p: Any, g: Any) -> Any:
    """A gradient, reduced and with the placements of its parameter; None, or a plain one,
    unchanged.

    In tensor parallelism gradients are partial sums, which every rule would reduce again.
    """
    return placed_like(g, p) if is_sharded(g) else g


def from_part(part: Any, like: Any, shape: torch.Size | None = None, placements: Any = None) -> Any:
    """The DTensor with the placements of another one and this local shard.

    shape, placements: of the whole, if they are not those of `like`.
    """
    from torch.distributed.tensor import DTensor

    stride = like.stride() if shape is None else torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part,
        like.device_mesh,
        placements or like.placements,
        run_check=False,
        shape=like.shape if shape is None else shape,
        stride=stride,
    )


def divided_dims(x: Any) -> list[tuple[int, int, int]]:
    """The shards of a DTensor: dimension, number of shards, and the index of the local one.

    For each placement, in the order in which they apply.
    """
    found: list[tuple[bool, tuple[int, int, int]]] = []
    mesh = x.device_mesh
    for i, where in enumerate(x.placements):
        if not (where.is_replicate() or where.is_partial()):
            strided = type(where).__name__ == "_StridedShard"  # shards the shards of others
            found.append((strided, (where.dim, mesh.size(i), mesh.get_coordinate()[i])))
    return [own for _, own in sorted(found, key=lambda x: x[0])]


def local_shape(shape: Sequence[int], like: Any) -> list[int]:
    """The shape of the local shard of a tensor with the placements of a DTensor."""
    sizes = list(shape)
    for dim, parts, mine in divided_dims(like):
        each = math.ceil(sizes[dim] / parts)
        sizes[dim] = max(0, min(each, sizes[dim] - mine * each))
    return sizes


def largest_part(x: Any) -> int:
    """The number of elements of the largest shard of a DTensor."""
    sizes = list(x.shape)
    for dim, parts, _ in divided_dims(x):
        sizes[dim] = math.ceil(sizes[dim] / parts)
    return math.prod(sizes)


def in_grid(own: Any, like: Any) -> Any:
    """Local tensors of one shape as a DTensor with the placements of another one.

    A dimension of the grid corresponds to each of `like`, if that is sharded.
    """
    grid = [1] * like.dim()
    for dim, parts, _ in divided_dims(like):
        grid[dim] *= parts
    local = own.reshape((1,) * like.dim() + own.shape)
    return from_part(local, like, torch.Size((*grid, *own.shape)))


def completed_sums(columns: Sequence[Sequence[Any]]) -> list[list[Tensor]]:
    """For each column of 0-dim DTensors, their sums as plain float64 tensors.

    Partial sums over one mesh are reduced in one vector.
    """
    from torch.distributed.tensor import DTensor

    results: list[list[Tensor]] = [[] for _ in columns]
    alike: dict[Any, dict[int, list[Tensor]]] = {}
    for i, column in enumerate(columns):
        for x in column:
            if all(map(_adds_up, x.placements)):
                mine = alike.setdefault((x.device_mesh, x.placements), {}).setdefault(i, [])
                mine.append(x.to_local().to(torch.float64).reshape(()))
            else:
                results[i].append(whole(x).to(torch.float64).reshape(()))
    for (mesh, placements), found in alike.items():
        vector = torch.stack([torch.stack(mine).sum() for mine in found.values()])
        total = DTensor.from_local(vector, mesh, placements, run_check=False).full_tensor()
        for i, x in zip(found, total.unbind(), strict=True):
            results[i].append(x)
    return results


def _adds_up(where: Any) -> bool:
    """Whether a number placed in this way is replicated or a partial sum."""
    return where.is_replicate() or (where.is_partial() and where.reduce_op == "sum")


class _Summed(torch.autograd.Function):
    """A sum over a process group; its gradient is the sum of the gradients. Takes batches."""

    @staticmethod
    def forward(x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Summed.apply(g, ctx.group), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _Summed.apply(*args), in_dims[0]


def summed_over(numbers: Sequence[Any], groups: Sequence[Any]) -> tuple[Any, ...]:
    """Numbers summed over process groups: Python floats if all are, else 0-dim float64 tensors.

    One all_reduce for each group; None is the default one.

    Raises:
        RuntimeError: without torch.distributed's process groups, or outside this one.
    """
    tensors = [x for x in numbers if isinstance(x, Tensor)]
    for group in groups:
        check_member("sharded_over", group)
    if tensors:
        here = tensors[0].device
        given = [torch.as_tensor(x, dtype=torch.float64, device=here) for x in numbers]
        vector = torch.stack([x.reshape(()) for x in given])
    else:  # filled: a trace would sum a constant once, while it is made
        given = [torch.full((), x, dtype=torch.float64, device="cpu") for x in numbers]
        vector = torch.stack(given)
    for group in groups:
        sent = vector.to(_device_of(group))
        if torch.compiler.is_compiling():
            sent = sent.clone()
            torch.distributed.all_reduce(sent, group=group)
        else:
            sent = _Summed.apply(sent, group)
        vector = sent.to(vector.device)
    unread = tensors or torch.compiler.is_compiling()
    return tuple(vector.unbind() if unread else vector.tolist())


def check_group(who: str, group: Any) -> None:
    """Raise TypeError unless a group is a process group of torch.distributed, or None.

    `new_group` returns a number in processes outside of the group: these may build the same chain.
    """
    known = group is None
    if not known and torch.distributed.is_available():
        outside = torch.distributed.GroupMember.NON_GROUP_MEMBER
        known = isinstance(group, torch.distributed.ProcessGroup) or (
            type(group) is type(outside) and group == outside
        )
    if not known:
        raise TypeError(
            f"{who} takes a process group of torch.distributed as group, but got {group!r}; pass "
            "what torch.distributed.new_group or get_group of a DeviceMesh returns, or None for "
            "the default group."
        )


def check_member(who: str, group: Any) -> None:
    """Raise RuntimeError unless this process can communicate in a group. who: the combinator."""
    if torch.compiler.is_compiling():
        return
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise RuntimeError(
            f"{who} needs torch.distributed, which is not initialized here; call "
            f"torch.distributed.init_process_group first, or leave {who} out."
        )
    if torch.distributed.get_rank(group) < 0:
        raise RuntimeError(
            f"this process is not in the process group that {who} was given; pass the group whose "
            "processes have these parameters."
        )


def _device_of(group: Any) -> str:
    """The device for communication: the same in all processes, also without any tensors."""
    for pair in torch.distributed.get_backend_config(group).split(","):
        device, backend = pair.split(":")
        if device != "cpu" and backend != "gloo" and torch.get_device_module(device).is_available():
            return device
    return "cpu"


def mean_over(x: Any, mesh: Any) -> Any:
    """The mean of a number over all processes of a device mesh: a Python float."""
    number = tensor_of(whole(x.detach()) if isinstance(x, Tensor) else x)
    total = number.to(mesh.device_type, torch.float64, copy=True).reshape(())
    for dim in range(mesh.ndim):
        torch.distributed.all_reduce(total, group=mesh.get_group(dim))
    return total.item() / mesh.size()


def mesh_of(tensors: Sequence[Any]) -> Any:
    """The device mesh of the first sharded tensor; None if there is none."""
    return next((x.device_mesh for x in tensors if is_sharded(x)), None)


def check_beside(name: str, x: Any, what: str, p: Any) -> None:
    """Raise ValueError unless x, a gradient or slot, has the shape and processes of p.

    name: of the parameter p. what: the text for x.
    """
    why = misplaced(x, p, shapes=True)
    if why is not None:
        advice = "make it as large as its parameter, or load a checkpoint of this model"
        if is_sharded(x) or is_sharded(p):
            advice = (
                "divide it over the same processes, with distribute_tensor(x, p.device_mesh, "
                "p.placements), or load a checkpoint through torch.distributed.checkpoint"
            )
        raise ValueError(f"{what} of parameter {name!r} {why}; {advice}.")


def misplaced(x: Any, p: Any, *, shapes: bool = False) -> str | None:
    """Why a gradient or slot does not match p, as "is …, but …"; None if it does.

    It must have the same processes; shapes: and the same shape.
    """
    mine, own = getattr(x, "device_mesh", None), getattr(p, "device_mesh", None)
    if (mine is own or mine == own) and not (shapes and x.shape != p.shape):
        return None
    return f"is {_described(x)}, but the parameter is {_described(p)}"


def _described(x: Any) -> str:
    if not is_sharded(x):
        return f"a plain tensor of shape {tuple(x.shape)}"
    return f"a DTensor of shape {tuple(x.shape)} on {x.device_mesh}"


def flat_parts(tensors: Sequence[Any]) -> list[bool]:
    """Whether each tensor is a local shard of parameters that FSDP1 has flattened.

    FullyShardedDataParallel marks its parameters, including those that it does not shard (NO_SHARD,
    or a single process), which have their shape, or all of their elements.
    """
    marked = [getattr(x, "_fsdp_flattened", False) is True for x in tensors]
    if not any(marked) or torch.distributed.get_world_size() == 1:
        return [False] * len(tensors)
    found = [x for x, mark in zip(tensors, marked, strict=True) if mark]
    originals = [x for x in found if not hasattr(x, "_unpadded_unsharded_size")]
    undivided = any(x.dim() != 1 for x in originals)
    return [mark and not (undivided or _is_all(x)) for x, mark in zip(tensors, marked, strict=True)]


def _is_all(x: Any) -> bool:
    """Whether this process has all elements of a FlatParameter."""
    size = getattr(x, "_unpadded_unsharded_size", None)
    return size is not None and x.numel() >= size.numel()
