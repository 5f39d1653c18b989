"""Tensors that several processes share (DTensor): how they are gathered, and divided again.

Every function here leaves a plain tensor as it is.
"""

from __future__ import annotations

from typing import Any


def is_sharded(x: Any) -> bool:
    """Do several processes share it?"""
    return hasattr(x, "placements")


def whole(x: Any) -> Any:
    """All of a sharded tensor, as a plain one."""
    full = getattr(x, "full_tensor", None)
    return x if full is None else full()


def part(x: Any) -> Any:
    """What this process has of a sharded tensor, as a plain one."""
    local = getattr(x, "to_local", None)
    return x if local is None else local()


def complete(x: Any) -> Any:
    """A sum along a divided dimension, added up over the ranks that have a part of it.

    DTensor puts that off until somebody reads the sum, and cannot save one that it has put off.
    """
    placements = getattr(x, "placements", ())
    if not any(where.is_partial() for where in placements):
        return x
    from torch.distributed.tensor import Replicate

    return x.redistribute(
        placements=[Replicate() if where.is_partial() else where for where in placements]
    )


def placed_like(x: Any, like: Any) -> Any:
    """x, whole or a DTensor, divided between the ranks as `like` is.

    DTensor gathers a dimension of size 1 in operations that could broadcast along it.
    """
    placements = getattr(like, "placements", None)
    if placements is None or placements == getattr(x, "placements", None):
        return x
    if hasattr(x, "redistribute"):
        return x.redistribute(placements=placements)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, like.device_mesh, placements, src_data_rank=None)


def from_part(part: Any, like: Any) -> Any:
    """The DTensor, divided like another one, of which this process has that part."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
