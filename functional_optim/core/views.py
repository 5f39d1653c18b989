"""How a rule of matrices sees a parameter: as one matrix, or as several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.sharding import by_rows

Run = tuple[int, int]
"""The height of some matrices that stand below each other, and how many they are."""


class MatrixView(NamedTuple):
    """A parameter as matrices (out, in); `as_matrix` documents the first fields.

    assumed: whether this is what a rule takes a parameter for until `as_matrix` says otherwise.
    block: the most rows and columns of a matrix, which is divided into several if it has more; a
    vector is then a column. None: no limit, and vectors are left as they are.
    """

    kernel: Literal["flatten", "batch"] = "flatten"
    heads: int | tuple[int, ...] | None = None
    split: int | tuple[int, ...] | None = None
    transposed: bool = False
    assumed: bool = False
    block: int | None = None

    def keeps(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of this shape is seen as it is."""
        plain = self.heads is None and self.split is None and not self.transposed
        fits = self.block is None or max(shape, default=0) <= self.block
        return (len(shape) < 2 and self.block is None) or (plain and len(shape) == 2 and fits)

    def runs(self, shape: Sequence[int]) -> list[Run]:
        """The matrices of a parameter from top to bottom, neighbours of one height together.

        Raises:
            ValueError: if it cannot be divided so.
        """
        if len(shape) < 2:
            return [(math.prod(shape), 1)]
        rows = shape[1] if self.transposed else shape[0]
        split, heads = self.split, self.heads
        sizes = (rows // split,) * split if isinstance(split, int) else split or (rows,)
        counts = heads if isinstance(heads, tuple) else (heads or 1,) * len(sizes)
        if sum(sizes) != rows or len(counts) != len(sizes):
            raise ValueError(
                f"as_matrix was asked for split={split} and heads={heads}, but a parameter of "
                f"shape {tuple(shape)} has {rows} outputs; pass sizes whose sum that is, and one "
                "number of heads, or one for each size."
            )
        if any(size % count for size, count in zip(sizes, counts, strict=True)):
            raise ValueError(
                f"as_matrix was asked for heads={heads}, but a parameter of shape {tuple(shape)} "
                f"has parts of {', '.join(map(str, sizes))} outputs; pass numbers that divide them."
            )
        heights = [n // k for n, k in zip(sizes, counts, strict=True) for _ in range(k)]
        return [(height, len([*some])) for height, some in groupby(heights)]

    def parts(self, x: Tensor, shape: Sequence[int]) -> list[Tensor]:
        """The matrices of each run: (k, out, in).

        x: a tensor of this shape, or several, with one dimension more in front; k counts these,
        too.
        """
        x = self._as_matrices(x, len(shape))
        runs = self.runs(shape)
        cut = x.split([height * count for height, count in runs], -2) if len(runs) > 1 else [x]
        several = math.prod(x.shape[:-2])
        matrices = [
            part.reshape(several * count, height, x.shape[-1])
            for part, (height, count) in zip(cut, runs, strict=True)
        ]
        if self.block is None:
            return matrices
        return [block for matrix in matrices for block in _blocks(matrix, self.block)]

    def joined(self, parts: Sequence[Tensor], shape: Sequence[int], like: Tensor) -> Tensor:
        """The inverse of `parts`. like: what was taken apart."""
        lead = like.shape[: like.dim() - len(shape)]
        out, into, *kernel = (*shape, 1, 1)[: max(len(shape), 2)]
        if self.transposed and len(shape) > 1:
            out, into = into, out
        each = [*lead, math.prod(kernel)] if self.kernel == "batch" else [*lead]
        columns = into if self.kernel == "batch" else into * math.prod(kernel)
        runs = self.runs(shape)
        if self.block is not None:
            supply, several = iter(parts), math.prod(each)
            sizes = [(several * count, height, columns) for height, count in runs]
            parts = [_unblocked(supply, size, self.block) for size in sizes]
        pairs = zip(parts, runs, strict=True)
        x = torch.cat([part.reshape(*each, n * k, columns) for part, (n, k) in pairs], -2)
        if len(shape) < 2:
            return x.reshape(like.shape)
        if self.kernel == "batch":
            x = x.movedim(-3, -1)
        x = x.reshape(*lead, out, into, *kernel)
        return x.transpose(len(lead), len(lead) + 1) if self.transposed else x

    def _as_matrices(self, x: Tensor, dim: int) -> Tensor:
        """A tensor, or several, with the rows and columns of the view as its last dimensions."""
        first = x.dim() - dim
        if dim < 2:
            x = x.reshape(*x.shape[:first], -1, 1) if x.numel() else x[..., None]
            return x[..., None, :, :] if self.kernel == "batch" else x
        if self.transposed:
            x = x.transpose(first, first + 1)
        x = x.flatten(first + 2) if dim > 2 else x[..., None]
        return x.movedim(-1, -3) if self.kernel == "batch" else x.flatten(-2)


def _cuts(n: int, block: int) -> list[Run]:
    """How a side of length n is divided into blocks: their length, and how many there are."""
    whole, rest = divmod(n, block)
    return [(block, whole)] * (whole > 0) + [(rest, 1)] * (rest > 0 or n == 0)


def _blocks(x: Tensor, block: int) -> list[Tensor]:
    """Matrices (k, m, n) divided into blocks, those of one shape together."""
    k, m, n = x.shape
    rows, columns = _cuts(m, block), _cuts(n, block)
    return [
        part.reshape(k, i, h, j, w).transpose(2, 3).reshape(k * i * j, h, w)
        for strip, (h, i) in zip(x.split([h * i for h, i in rows], -2), rows, strict=True)
        for part, (w, j) in zip(strip.split([w * j for w, j in columns], -1), columns, strict=True)
    ]


def _unblocked(blocks: Iterator[Tensor], size: tuple[int, int, int], block: int) -> Tensor:
    """The inverse of `_blocks`. size: (k, m, n)."""
    k, m, n = size
    strips = [
        [
            next(blocks).reshape(k, i, j, h, w).transpose(2, 3).reshape(k, i * h, j * w)
            for w, j in _cuts(n, block)
        ]
        for h, i in _cuts(m, block)
    ]
    return torch.cat([torch.cat(strip, -1) for strip in strips], -2)


def seen_init(view: MatrixView, init: Callable[[Tensor], Any], p: Tensor) -> Any:
    """The slots of a parameter: those of its matrices in one tensor, for each slot of the rule.

    The first dimension counts the matrices. Where they are of several heights, the tensors of all
    of them lie one after the other in a vector.
    """
    if view.keeps(p.shape):
        return init(p)
    each = [(len(part), init(part[0])) for part in view.parts(p, p.shape)]
    columns = zip(*[own for _, own in each], strict=True)
    made = [
        _packed([torch.stack([x] * n) for x, (n, _) in zip(column, each, strict=True)])
        if column[0] is not None
        else None
        for column in columns
    ]
    return type(each[0][1])(*made)


def seen_update(
    view: MatrixView,
    init: Callable[[Tensor], Any] | None,
    update: Callable[..., tuple[Tensor, Any]],
    u: Tensor,
    slots: Any,
    p: Tensor,
    arguments: Sequence[Any],
    name: str = "of matrices",
) -> tuple[Tensor, Any]:
    """A variant of a rule that takes batches, on the matrices of a parameter, or of several.

    p: one of these parameters. name: of the rule, for an error.

    Raises:
        ValueError: for an update of another shape, which could be taken for one of this shape when
            the matrices are joined.
    """
    if view.keeps(p.shape):
        return update(u, slots, *arguments)
    parts = view.parts(u, p.shape)
    lead = u.shape[: u.dim() - p.dim()]
    mine = [slots] * len(parts)
    if slots:
        assert init is not None
        shapes_of = _shapes if torch.compiler.is_compiling() else _known  # Dynamo knows no cache
        known = shapes_of(view, init, p.shape, p.dtype)
        columns = [_unpacked(x, [own[i] for own in known]) for i, x in enumerate(slots)]
        mine = [type(slots)(*own) for own in zip(*columns, strict=True)]
    done = [update(x, own, *arguments) for x, own in zip(parts, mine, strict=True)]
    for (found, _), x in zip(done, parts, strict=True):
        if found.shape != x.shape:
            raise ValueError(
                f"update of the rule {name!r} returned a tensor of shape {tuple(found.shape)} for "
                f"matrices of shape {tuple(x.shape)}; return one of the same shape."
            )
    new = ()
    if slots:
        columns = zip(*[own for _, own in done], strict=True)
        new = type(slots)(*[_packed([*x], lead) for x in columns])
    return view.joined([x for x, _ in done], p.shape, u), new


def _shapes(
    view: MatrixView, init: Callable[[Tensor], Any], shape: torch.Size, dtype: torch.dtype
) -> list[list[torch.Size | None]]:
    """For each run of matrices the shapes of its slots, behind the number of the matrices."""
    parts = view.parts(torch.empty(shape, dtype=dtype, device="meta"), shape)
    made = [(len(part), init(part[0])) for part in parts]
    return [[x if x is None else torch.Size((n, *x.shape)) for x in own] for n, own in made]


_known = lru_cache(_shapes)


def _packed(column: list[Any], lead: Sequence[int] = ()) -> Tensor | None:
    """The slots of all matrices as one tensor. lead: the number of parameters, if it is several."""
    if column[0] is None:
        return None
    if len(column) == 1:
        (x,) = column
        return x.reshape(*lead, len(x) // max(math.prod(lead), 1), *x.shape[1:]) if lead else x
    each = max(math.prod(lead), 1)
    return torch.cat([by_rows(x).reshape(*lead, x.numel() // each) for x in column], -1)


def _unpacked(x: Tensor | None, shapes: Sequence[torch.Size | None]) -> list[Tensor | None]:
    """The inverse of `_packed`: for each run of matrices its slots, in one batch."""
    known = [shape for shape in shapes if shape is not None]
    if x is None or not known:
        return [None] * len(shapes)
    if len(known) == 1:
        own = known[0][1:]
        return [x.reshape(math.prod(x.shape[: x.dim() - len(own)]), *own)]
    cut = x.split([shape.numel() for shape in known], -1)
    several = math.prod(x.shape[:-1])
    pairs = zip(cut, known, strict=True)
    return [part.reshape(several * shape[0], *shape[1:]) for part, shape in pairs]
