"""Slots and operations along each dimension of a tensor: two for a matrix, more for a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.linalg import symmetric_product

Sides = tuple[Tensor | None, ...]
"""A value for each dimension, first that of the rows of a matrix; None: the identity."""

ORDINALS = ("left", "right", "third", "fourth", "fifth")
"""The dimensions of a tensor, in the names of slots."""


def named(what: str) -> tuple[str, ...]:
    """The names of the slots of each dimension."""
    return tuple([f"{x}_{what}" for x in ORDINALS])


FACTORS, BASES, EIGENVALUES = named("factor"), named("basis"), named("eigenvalues")


def behind(own: Sequence[Tensor | None], lead: int = 0) -> Tensor | None:
    """The tensors of the second and later dimensions, as one slot.

    For a matrix it is that of its columns, for a tensor with more dimensions a vector that
    concatenates all. own: one for each dimension of ORDINALS, None for missing ones. lead: 1 for a
    batch.
    """
    _, right, *others = own
    there = [x for x in (right, *others) if x is not None]
    if there[1:]:
        return torch.cat([x.flatten(lead) for x in there], -1)
    return there[0] if there else None


def each_behind(x: Tensor | None, shapes: Sequence[torch.Size | None]) -> tuple[Tensor | None, ...]:
    """The inverse of `behind` for a batch. shapes: those of a single tensor, after a 1."""
    there = [shape for shape in shapes if shape is not None]
    if x is None:
        return (None,) * len(shapes)
    several = there[1:]
    cut = iter(x.split([shape.numel() for shape in there], -1) if several else [x])
    found = [None if shape is None else next(cut) for shape in shapes]
    return tuple(
        y.reshape(len(x), *shape[1:]) if several and y is not None and shape is not None else y
        for y, shape in zip(found, shapes, strict=True)
    )


def for_each(name: str, shape: Sequence[int], make: Callable[[int], Any]) -> list[Any]:
    """The tensor of each dimension, and None for missing dimensions.

    Raises:
        ValueError: for too many dimensions.
    """
    if len(shape) > len(ORDINALS):
        raise ValueError(
            f"{name} takes tensors of up to {len(ORDINALS)} dimensions, but got a parameter of "
            f"shape {tuple(shape)}; flatten it, with as_matrix."
        )
    return [*[make(n) for n in shape], *[None] * (len(ORDINALS) - len(shape))]


def _place(G: Tensor, i: int, A: Tensor) -> int:
    """The index of the i-th dimension in a tensor, or in a batch of them; its slot A is (n, n)."""
    return A.dim() - 2 + i


def others(G: Tensor, i: int, A: Tensor) -> int:
    """Number of elements of a tensor per index of its i-th dimension; at least 1."""
    at, lead = _place(G, i, A), A.dim() - 2
    return max(math.prod([n for j, n in enumerate(G.shape) if j >= lead and j != at]), 1)


def turned(G: Tensor, i: int, Q: Tensor | None, *, back: bool = False) -> Tensor:
    """Qᵀ times the i-th dimension of a tensor, or of a batch; back: Q times. None: unchanged.

    Example::

        >>> import torch
        >>> from functional_optim.transforms.bases import turned
        >>> turned(torch.tensor([[1.0, 2.0]]), 1, torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        tensor([[2., 1.]])
    """
    if Q is None:
        return G
    at, lead = _place(G, i, Q), Q.dim() - 2
    if at == G.dim() - 1:
        if i > 1:
            return (G.flatten(lead, -2) @ (Q.mT if back else Q)).reshape(G.shape)
        return G @ (Q.mT if back else Q)
    rows = G.flatten(lead, at - 1) if i > 1 else G
    if i == 0:
        return ((Q if back else Q.mT) @ G.flatten(lead + 1)).reshape(G.shape)
    rows = rows.flatten(lead + 2)
    return (((Q if back else Q.mT)[..., None, :, :]) @ rows).reshape(G.shape)


def gram(G: Tensor, i: int, A: Tensor) -> Tensor:
    """G Gᵀ, with the i-th dimension of a tensor, or of a batch, as rows."""
    at, lead = _place(G, i, A), A.dim() - 2
    if at == G.dim() - 1:
        rows = G.flatten(lead, -2) if i > 1 else G
        return symmetric_product(rows.mT, rows.mT)
    rows = (G if i == 0 else G.movedim(at, lead)).flatten(lead + 1)
    return symmetric_product(rows, rows)


def along(values: Tensor, i: int, n: int) -> Tensor:
    """Factors for the i-th of n dimensions, broadcastable to a tensor."""
    return values[(..., *[slice(None) if j == i else None for j in range(n)])]
