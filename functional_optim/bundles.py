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
    split,
    with_holes,
)
from functional_optim.tapes import Tape, Unsuitable

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

    def write(self, results: Sequence[Tensor]) -> None:
        """Put new values of parameter and slots in their places."""
        for views, result in zip(self.columns, results, strict=True):
            if len(views) == 1:
                views[0].copy_(result)
            else:
                torch._foreach_copy_(views, result.split(self.sizes))  # pyright: ignore[reportPrivateImportUsage]


class Bundle:
    """Tensors with the same dtypes, slots and device, whose rules are elementwise.

    members: their places among the tensors of the cohort.
    """

    def __init__(self, members: list[int], params: list[Tensor], slots: list[Any]) -> None:
        self.members = members
        self.params = [params[i] for i in members]
        self.holes = [[slot is None for slot in own] for own in slots[members[0]]]
        rows = [[params[i], *present(slots[i])] for i in members]
        columns = [[flattened(x) for x in column] for column in zip(*rows, strict=True)]
        self.pieces = [Piece(parts, columns) for parts in _cut([p.numel() for p in self.params])]
        self.tapes: dict[Any, Tape | None] = {}

    def step(
        self, links: tuple[Link, ...], shut: Any, grads: list[Tensor], numbers: list[Numbers]
    ) -> None:
        """Step every tensor and its slots, in place. shut: what gates say, as in a `Pack`."""
        flat = self._flat(grads)
        plain = [x for own in numbers for x in own]
        tape = self._tape(links, shut, flat[0], plain, list(map(len, numbers)))
        for piece in self.pieces:
            given = [piece.gather(flat), *piece.read()]
            if tape is None:
                piece.write(self._new(links, given, numbers))
                continue
            tape(given, plain)
            if len(piece.parts) > 1:
                piece.write(given[1:])

    def _new(
        self, links: Sequence[Link], given: list[Tensor], numbers: Sequence[Numbers]
    ) -> list[Tensor]:
        """New values of parameter and slots, from those and the gradient."""
        g, p, *slots = given
        u, new = run_stored(links, g, p, with_holes(slots, self.holes), numbers)
        return [base.add(p, u), *present(new)]

    def _tape(
        self, links: tuple[Link, ...], shut: Any, g: Tensor, plain: list[Any], counts: list[int]
    ) -> Tape | None:
        """The rule as calls into old buffers, recorded at the first step; None if it cannot be."""
        if not all(type(x) is float for x in plain):
            return None
        if shut not in self.tapes:

            def body(given: list[Tensor], numbers: list[float]) -> list[Tensor]:
                return self._new(links, given, split(numbers, counts))

            first = self.pieces[0].columns
            dtypes = [g.dtype, *[column[0].dtype for column in first]]
            try:
                self.tapes[shut] = Tape(body, dtypes, len(plain), g.device)
            except Unsuitable:
                self.tapes[shut] = None
        return self.tapes[shut]

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
