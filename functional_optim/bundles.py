"""Tensors of one kind, stepped eagerly together: small ones joined, large ones in pieces.

An elementwise rule does not care where a tensor ends. Joining 99 biases and norms saves the calls
of 98; a piece that stays in the cache saves the memory traffic of a rule's fifteen operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim import base
from functional_optim.rules import (
    Link,
    Numbers,
    laid_out_like,
    measure,
    present,
    run_stored,
    with_holes,
)

PIECE = 1 << 17
"""Elements that are stepped at once."""


class Piece:
    """A part of one tensor, or several whole ones. parts: which tensor, and from where to where."""

    def __init__(self, parts: list[tuple[int, int, int]], columns: list[list[Tensor]]) -> None:
        self.parts = parts
        self.sizes = [stop - start for _, start, stop in parts]
        self.columns = [[column[i][a:b] for i, a, b in parts] for column in columns]

    def gather(self, flat: Sequence[Tensor]) -> Tensor:
        """This piece of tensors seen as 1-D."""
        return _joined([flat[i][a:b] for i, a, b in self.parts])

    def read(self) -> list[Tensor]:
        """This piece of parameter and slots."""
        return [_joined(views) for views in self.columns]

    def write(self, u: Tensor, slots: Sequence[Tensor]) -> None:
        """Add the update to the parameter, and put the new slots in their places."""
        params, *columns = self.columns
        if len(params) == 1 and params[0].dtype is u.dtype:
            params[0].add_(u)
        else:
            self._put(params, base.add(_joined(params), u))
        for views, slot in zip(columns, slots, strict=True):
            self._put(views, slot)

    def _put(self, views: list[Tensor], result: Tensor) -> None:
        if len(views) == 1:
            views[0].copy_(result)
        else:
            torch._foreach_copy_(views, result.split(self.sizes))  # pyright: ignore[reportPrivateImportUsage]


class Bundle:
    """Tensors with the same dtypes, slots and device, whose rules are elementwise.

    members: their places among the tensors of the cohort.
    """

    def __init__(
        self, links: tuple[Link, ...], members: list[int], params: list[Tensor], slots: list[Any]
    ) -> None:
        self.links = links
        self.members = members
        self.params = [params[i] for i in members]
        self.holes = [[slot is None for slot in own] for own in slots[members[0]]]
        rows = [[params[i], *present(slots[i])] for i in members]
        columns = [[flattened(x) for x in column] for column in zip(*rows, strict=True)]
        self.pieces = [Piece(parts, columns) for parts in _cut([p.numel() for p in self.params])]

    def step(self, grads: list[Tensor], numbers: list[Numbers]) -> None:
        """Step every tensor and its slots, in place."""
        flat = self._flat(grads)
        for piece in self.pieces:
            p, *given = piece.read()
            slots = with_holes(given, self.holes)
            u, new = run_stored(self.links, piece.gather(flat), p, slots, numbers)
            piece.write(u, present(new))

    def measure(
        self, links: Sequence[Link], grads: list[Tensor], numbers: list[Numbers]
    ) -> list[Sequence[Tensor]]:
        """What the last of these links measures, piece by piece."""
        flat = self._flat(grads)
        parts = []
        for piece in self.pieces:
            p, *given = piece.read()
            slots = with_holes(given, self.holes)[: len(links)]
            parts.append(measure(links, piece.gather(flat), p, slots, numbers))
        return parts

    def _flat(self, grads: list[Tensor]) -> list[Tensor]:
        mine = [grads[i] for i in self.members]
        return [flattened(g) for g in map(laid_out_like, mine, self.params)]


def flattened(x: Tensor) -> Tensor:
    """A dense tensor of any layout as a vector over its memory."""
    return x.detach().as_strided((x.numel(),), (1,))


def _joined(views: list[Tensor]) -> Tensor:
    return views[0] if len(views) == 1 else torch.cat(views)


def _cut(sizes: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    pieces: list[list[tuple[int, int, int]]] = []
    small: list[tuple[int, int, int]] = []
    filled = 0
    for i, size in enumerate(sizes):
        if size >= PIECE // 2:
            pieces += [[(i, at, min(at + PIECE, size))] for at in range(0, size, PIECE)]
            continue
        if filled + size > PIECE:
            pieces.append(small)
            small, filled = [], 0
        small.append((i, 0, size))
        filled += size
    return [*pieces, small] if small else pieces
