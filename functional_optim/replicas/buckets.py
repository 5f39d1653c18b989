"""Many tensors as few vectors, for reductions over a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.core import sharding

Wait = Callable[[], Tensor]
"""Waits for a reduction, and returns its result."""


class Reduction:
    """A reduction on its way. `wait()` returns the averaged tree.

    Example::

        >>> import torch, functional_optim as fo
        >>> group = fo.replicas.Local()
        >>> group.start()
        >>> last = group.allreduce({"last.weight": torch.ones(2)})  # on its way meanwhile
        >>> first = group.allreduce({"first.weight": torch.zeros(2)})
        >>> {**first.wait(), **last.wait()}
        {'first.weight': tensor([0., 0.]), 'last.weight': tensor([1., 1.])}
    """

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish = finish

    def wait(self) -> Any:
        """The mean over the participants, a tree like the one that was given: new tensors.

        Waiting twice gives the same tree.
        """
        made = self._finish()
        self._finish = lambda: made
        return made


def reduce_in_buckets(values: Any, mean: Callable[[Tensor], Wait], bucket_bytes: int) -> Reduction:
    """Average a tree: one call of `mean` for every vector of at most bucket_bytes.

    Tensors of one dtype and device are laid end to end and cut into vectors; one tensor may span
    several. So each element is reduced exactly once, whatever the sizes.

    Args:
        values: pytree of floating-point or complex tensors (of a DTensor, this process's part).
        mean: starts the average of a vector over the participants; it may write into it.
        bucket_bytes: ≥ 1; at least one element goes into a vector.

    Raises:
        TypeError: for a leaf that is no dense floating-point or complex tensor.
    """
    leaves = tree.leaves(values)
    for path, x in tree.items(values):
        if not (isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())):
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(
                f"allreduce averages floating-point and complex tensors, but {path!r} is a {kind}; "
                "leave it out of the tree."
            )
        if x.layout is not torch.strided:
            raise TypeError(
                f"allreduce averages dense tensors, but {path!r} is sparse; make it dense."
            )
    plain = [_local(x) for x in leaves]
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, x in enumerate(plain):
        kinds.setdefault((x.dtype, x.device), []).append(i)
    waiting: list[tuple[list[int], Tensor, list[Wait]]] = []
    for (dtype, _), places in kinds.items():
        joined = torch.cat([plain[i].reshape(-1) for i in places])
        pieces = joined.split(max(1, bucket_bytes // dtype.itemsize)) if joined.numel() else ()
        waiting.append((places, joined, [mean(piece) for piece in pieces]))

    def finish() -> Any:
        made = list(leaves)
        for places, joined, waits in waiting:
            whole = torch.cat([wait() for wait in waits]) if waits else joined
            parts = whole.split([plain[i].numel() for i in places])
            for i, part in zip(places, parts, strict=True):
                made[i] = _like(part.view(plain[i].shape), leaves[i])
        return tree.with_leaves(values, made)

    return Reduction(finish)


def _local(x: Tensor) -> Tensor:
    """This process's part of a tensor, as real numbers."""
    x = sharding.part(x.detach())
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _like(values: Tensor, leaf: Tensor) -> Tensor:
    """What was averaged, in the form of the tensor that was given."""
    like = sharding.part(leaf)
    if like.is_complex():  # copied, as real neighbours may have put it at an odd place
        values = torch.view_as_complex(values.clone())
    if values.stride() != like.stride():
        values = torch.empty_like(like).copy_(values)
    return sharding.from_part(values, leaf) if sharding.is_sharded(leaf) else values
