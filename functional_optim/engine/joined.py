"""Tensors of one kind, stepped eagerly together: small ones concatenated, large ones in pieces.

An element-wise rule does not depend on the boundaries of tensors. Concatenating 99 biases and norms
saves the calls of 98; a piece that fits into the cache saves the memory traffic of a rule's fifteen
operations.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core import base, memory
from functional_optim.core.execution import Leaf, measure, run_stored
from functional_optim.core.memory import laid_out_like
from functional_optim.core.numbers import Numbers, form_of
from functional_optim.core.recording import Body, with_missing
from functional_optim.core.rule import Placement, takes_turns
from functional_optim.core.scalars import BoundScalars, Caster
from functional_optim.core.storage import Slots, present
from functional_optim.engine.executor import Executor, How, Runner, Write
from functional_optim.engine.native import in_memory, kind_of

PIECE = 1 << 18
"""Elements that are stepped at once. Smaller pieces need more calls: 2^17 takes 1.1 of the time,
2^16 1.4. The temporaries of larger ones leave the third-level cache."""

FREED = 1 << 22
"""Elements of a tensor whose release makes glibc keep freed memory of up to its size. Otherwise it
returns each temporary of a piece to the system, and page faults take three times the step."""


class Piece:
    """A part of one tensor, or several whole ones. parts: the index of each tensor, and its
    range."""

    def __init__(self, parts: list[tuple[int, int, int]], columns: list[list[Tensor]]) -> None:
        self.parts = parts
        self.sizes = [stop - start for _, start, stop in parts]
        self.columns = [[column[i][a:b] for i, a, b in parts] for column in columns]

    def gather(self, flat: Sequence[Tensor]) -> Tensor:
        """This piece of flattened tensors."""
        return _joined([flat[i][a:b] for i, a, b in self.parts])

    def read(self) -> list[Tensor]:
        """This piece of parameter and slots."""
        return [_joined(views) for views in self.columns]

    def write(self, u: Tensor, slots: Sequence[Tensor]) -> None:
        """Add the update to the parameter, and write new slots."""
        params, *columns = self.columns
        if len(params) == 1 and not u.is_complex():
            params[0].add_(u)  # one operation less than a sum that is written back
        else:
            _put(params, base.add(_joined(params), u), self.sizes)
        for views, result in zip(columns, slots, strict=True):
            _put(views, result, self.sizes)


class JoinedExecutor(Executor):
    """Tensors of the same dtypes, slots and device under element-wise rules, without kernels."""

    through_memory = True

    def __init__(self, group: Any, members: list[int], grads: list[Tensor]) -> None:
        super().__init__(group, members, grads)
        self.missing = [[slot is None for slot in own] for own in self.slots[0]]
        pairs = zip(self.params, self.slots, strict=True)
        rows = [[p, *present(mine)] for p, mine in pairs]
        columns = [[_flattened(x) for x in column] for column in zip(*rows, strict=True)]
        self.pieces = [Piece(parts, columns) for parts in _cut([p.numel() for p in self.params])]
        torch.empty(FREED, device="cpu")  # and released at once

    @classmethod
    def accepts(
        cls, placements: tuple[Placement, ...], g: Tensor, p: Tensor, slots: list[Slots], how: How
    ) -> Hashable | None:
        """Plain tensors of one layout, where rounding does not depend on the index."""
        if (
            how != "eager"
            or any(x.rule.storage.seed is not None or x.rule.runs.batched for x in placements)
            or not in_memory(g, [p, *present(slots)])
            or any(x.shape != p.shape for x in present(slots))
        ):
            return None
        return kind_of(g, p, slots)

    def prepare(self, grads: list[Tensor], scalars: BoundScalars) -> Runner | None:
        """This object, if all rules are element-wise, and measurements are sums over elements."""
        if takes_turns(scalars.placements):
            return None
        forms = tuple(map(form_of, scalars.numbers))
        count = len(scalars.placements)
        missing = [tuple(own) for own in self.missing[:count]]
        body = Body(scalars.placements, missing, forms, scalars.goal, self.group.kept)
        rows = zip(self.mine(grads), self.params, self.slots, strict=True)
        return self if all(body.is_flat(g, p, own[:count]) for g, p, own in rows) else None

    def step(self, grads: list[Tensor], scalars: BoundScalars) -> list[Write]:
        """The step of every tensor.

        The rule has by then run on the first piece: one that raises does so before anything is
        written.
        """
        flat = self._flat(grads)
        numbers = Caster(scalars.numbers)(self.params[0])
        first, *rest = self.pieces
        new = self._new(scalars.placements, [first.gather(flat), *first.read()], numbers)

        def write() -> None:
            first.write(*new)
            for piece in rest:
                given = [piece.gather(flat), *piece.read()]
                piece.write(*self._new(scalars.placements, given, numbers))

        return [write]

    def _new(
        self, placements: Sequence[Placement], given: list[Tensor], numbers: Sequence[Numbers]
    ) -> tuple[Tensor, list[Tensor]]:
        """The update and new slots, from the gradient, the parameter and its slots."""
        g, p, *slots = given
        u, new = run_stored(placements, Leaf(g, p, with_missing(slots, self.missing), numbers))
        first, *rest = memory.apart([u, *present(new)], given[1:])
        return first, rest

    def measure(self, grads: list[Tensor], scalars: BoundScalars) -> list[Sequence[Tensor]]:
        """The measurements of the last rule, piece by piece."""
        flat = self._flat(grads)
        numbers, placements = Caster(scalars.numbers)(self.params[0]), scalars.placements
        parts = []
        for piece in self.pieces:
            p, *given = piece.read()
            slots = with_missing(given, self.missing)[: len(placements)]
            parts.append(measure(placements, Leaf(piece.gather(flat), p, slots, numbers)))
        return parts

    def _flat(self, grads: list[Tensor]) -> list[Tensor]:
        return [_flattened(g) for g in map(laid_out_like, self.mine(grads), self.params)]


def _flattened(x: Tensor) -> Tensor:
    """A dense tensor of any layout as a vector over its memory."""
    return x.detach().as_strided((x.numel(),), (1,))


def _joined(views: list[Tensor]) -> Tensor:
    return views[0] if len(views) == 1 else torch.cat(views)


def _put(views: list[Tensor], result: Tensor, sizes: list[int]) -> None:
    """Write a result into the tensors that were joined for it."""
    if len(views) == 1:
        views[0].copy_(result)
    else:
        torch.split_with_sizes_copy(result, sizes, out=views)


def _cut(sizes: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    pieces: list[list[tuple[int, int, int]]] = []
    small: list[tuple[int, int, int]] = []
    filled = 0
    for i, size in enumerate(sizes):
        if size >= PIECE // 4:
            pieces += [[(i, at, min(at + PIECE, size))] for at in range(0, size, PIECE)]
            continue
        if filled + size > PIECE:
            pieces.append(small)
            small, filled = [], 0
        small.append((i, 0, size))
        filled += size
    return [*pieces, small] if small else pieces
