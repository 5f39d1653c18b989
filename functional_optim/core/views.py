"""Views of a parameter for matrix rules: as one matrix, or as several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functional_optim.core import sharding

Run = tuple[int, int]
"""The height and the number of vertically stacked matrices."""


Kernel = Literal["flatten", "batch", "tensor", "auto"]
"""The view of convolution kernels for a matrix rule, see `as_matrix`."""


class Merged(NamedTuple):
    """Merging of adjacent dimensions. limit: the largest merged length; 1 removes dimensions of
    length 1, except for matrices.

    until: the number of dimensions to keep; they are then merged from the last on, as Distributed
    Shampoo does. None: greedily, from the first on, as SOAP's authors do.
    """

    limit: int
    until: float | None = None

    def __call__(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The merged lengths of a shape; a single one becomes a column."""
        if len(shape) < 2 or (self.limit == 1 and len(shape) == 2):
            return tuple(shape)
        first = self.until is None
        found = self._from_the_first(shape) if first else self._from_the_last(shape)
        return found if len(found) > 1 else (*found, 1)

    def _from_the_first(self, shape: Sequence[int]) -> tuple[int, ...]:
        found: list[int] = []
        length = 1
        for n in shape:
            if length * n <= self.limit:
                length *= n
            elif length > 1:
                found.append(length)
                length = n
            else:
                found.append(n)
        return (*found, length) if length != 1 or not found else tuple(found)

    def _from_the_last(self, shape: Sequence[int]) -> tuple[int, ...]:
        assert self.until is not None
        if 0 in shape:
            return (0,)
        if math.isinf(self.until):
            return tuple(shape)
        lengths = [n for n in reversed(shape) if n != 1] or [1]
        found, left = lengths[:1], len(lengths) - 1
        for n in lengths[1:]:
            if len(found) + left > self.until and found[-1] * n <= self.limit:
                found[-1] *= n
            else:
                found.append(n)
            left -= 1
        return tuple(reversed(found))


class MatrixView(NamedTuple):
    """A parameter as matrices (out, in), or as tensors; `as_matrix` documents the first fields.

    kernel: "tensor" keeps every parameter, or merges its dimensions. assumed: whether this is the
    default of a rule, which `as_matrix` replaces. block: the largest side of the rule's input;
    longer sides are split into blocks, and a vector is then a column. None: no limit, and vectors
    are unchanged. merged: the merging of dimensions.
    most: the number of dimensions that the rule supports; None: any number.
    """

    kernel: Kernel = "flatten"
    heads: int | tuple[int, ...] | None = None
    split: int | tuple[int, ...] | None = None
    transposed: bool = False
    stack: bool = False
    assumed: bool = False
    block: int | None = None
    merged: Merged | None = None
    most: int | None = None

    @property
    def divided(self) -> bool:
        """Whether the outputs belong to several matrices."""
        return self.heads is not None or self.split is not None

    def keeps(self, shape: Sequence[int]) -> bool:
        """Whether the view of a parameter of this shape is the parameter."""
        if self.block is None and len(shape) < 2:
            return True
        if self.block is not None and (len(shape) < 2 or max(shape) > self.block):
            return False
        if self.divided or self.transposed:
            return False
        if self.kernel == "tensor" and not self.stack:
            return self.merged is None or self.merged(shape) == tuple(shape)
        return len(shape) == 2 and (self.merged is None or self.merged(shape) == tuple(shape))

    def is_plain_stack(self) -> bool:
        """Whether a parameter of more than two dimensions is a stack of matrices that are
        contiguous in memory."""
        plain = not self.divided and not self.transposed
        return self.stack and plain and self.block is None and self.merged is None

    def is_local(self, p: Any) -> bool:
        """Whether each process has whole matrices of a stack, so that none needs another's."""
        return self.is_plain_stack() and p.dim() == 3 and sharding.is_divided_by_rows(p)

    def reshapes(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of this shape is viewed in another one, or along each dimension."""
        return len(shape) > 2 or not self.keeps(shape)

    def check(self, name: str, shape: Sequence[int], path: str = "") -> None:
        """Raise ValueError for an ambiguous parameter, and for one that cannot be divided.

        Matrices, and kernels of 2-D and 3-D convolutions, are identified by their dimensions. name:
        of the rule. path: of the parameter.
        """
        if self.divided:
            self._runs(self._outputs_first(shape), path)
        if not self.assumed or len(shape) in (0, 1, 2, 4, 5):
            return
        *several, m, n = shape
        kernel = "auto" if self.most is None or len(shape) <= 5 else "flatten"
        what = f"parameter {path!r}" if path else "parameter"
        where = repr(path or "*")
        raise ValueError(
            f"{name or 'a matrix rule'} got the {what} of shape {tuple(shape)}, which may be "
            f"a stack of {math.prod(several)} matrices {m, n}, or the kernel of a convolution; say "
            f"which, by as_matrix or the views of a recipe: views={{{where}: {{'stack': True}}}}, "
            f"or views={{{where}: {{'kernel': {kernel!r}}}}}; views=model knows torch.nn's kernels."
        )

    def _runs(self, shape: Sequence[int], path: str = "") -> list[Run]:
        """The matrices of a parameter from top to bottom, with adjacent ones of one height
        combined.

        shape: with the outputs first. path: of the parameter, for errors.

        Raises:
            ValueError: if it cannot be split this way.
        """
        if len(shape) < 2:
            return [(math.prod(shape), 1)]
        rows, split, heads = shape[0], self.split, self.heads
        what = f"the parameter {path!r}" if path else "a parameter"
        what = f"{what} of shape {tuple(self._outputs_first(shape))}"  # as the parameter has it
        sizes = (rows // split,) * split if isinstance(split, int) else split or (rows,)
        counts = heads if isinstance(heads, tuple) else (heads or 1,) * len(sizes)
        if sum(sizes) != rows or len(counts) != len(sizes):
            raise ValueError(
                f"as_matrix was asked for split={split} and heads={heads}, but {what} has {rows} "
                "outputs; pass sizes whose sum that is, and one number of heads, or one for each "
                "size."
            )
        if any(size % count for size, count in zip(sizes, counts, strict=True)):
            raise ValueError(
                f"as_matrix was asked for heads={heads}, but {what} has parts of "
                f"{', '.join(map(str, sizes))} outputs; pass numbers that divide them."
            )
        heights = [n // k for n, k in zip(sizes, counts, strict=True) for _ in range(k)]
        return [(height, len([*some])) for height, some in groupby(heights)]

    def each(self, shape: Sequence[int]) -> Sequence[int]:
        """The shape of one matrix of a stack; otherwise that of the parameter."""
        return shape[-2:] if self.stack else shape

    def parts(self, x: Tensor, shape: Sequence[int]) -> list[Tensor]:
        """The matrices of each run, or the tensors: (k, out, in), or (k, …).

        x: a tensor of this shape, or several, with an additional leading dimension, which k
            includes.
        """
        first, shape = x.dim() - len(self.each(shape)), self._outputs_first(shape)
        if self._turns(shape):
            x = x.transpose(first, first + 1)
        if self.kernel == "tensor":
            found = [x.reshape(math.prod(x.shape[:first]), *self._lengths(shape))]
        else:
            x = self._as_matrices(x, len(shape))
            runs = self._runs(shape)
            cut = x.split([height * count for height, count in runs], -2) if len(runs) > 1 else [x]
            several = math.prod(x.shape[:-2])
            found = [
                part.reshape(several * count, height, x.shape[-1])
                for part, (height, count) in zip(cut, runs, strict=True)
            ]
        if self.block is None:
            return found
        return [block for part in found for block in _blocks(part, self.block)]

    def joined(self, parts: Sequence[Tensor], shape: Sequence[int], like: Tensor) -> Tensor:
        """The inverse of `parts`. like: the input of `parts`."""
        shape = self._outputs_first(shape)
        lead = like.shape[: like.dim() - len(shape)]
        if self.kernel == "tensor":
            size = (math.prod(lead), *self._lengths(shape))
            x = parts[0] if self.block is None else _unblocked(iter(parts), size, self.block)
        else:
            x = self._from_matrices(parts, lead, shape)
        x = x.reshape((*lead, *shape))
        return x.transpose(len(lead), len(lead) + 1) if self._turns(shape) else x

    def _turns(self, shape: Sequence[int]) -> bool:
        return self.transposed and len(shape) > 1

    def _outputs_first(self, shape: Sequence[int]) -> Sequence[int]:
        """The shape of one matrix of a stack with its outputs first."""
        shape = self.each(shape)
        return (shape[1], shape[0], *shape[2:]) if self._turns(shape) else shape

    def _lengths(self, shape: Sequence[int]) -> Sequence[int]:
        """The shape that a rule for whole tensors sees; of a vector with blocks, a column."""
        shape = shape if self.merged is None else self.merged(shape)
        return (math.prod(shape), 1) if self.block is not None and len(shape) < 2 else shape

    def _as_matrices(self, x: Tensor, dim: int) -> Tensor:
        """A tensor, or several, with the rows and columns of the view as the last dimensions."""
        first = x.dim() - dim
        if dim < 2:
            x = x.reshape(*x.shape[:first], -1, 1) if x.numel() else x[..., None]
            return x[..., None, :, :] if self.kernel == "batch" else x
        x = x.flatten(first + 2) if dim > 2 else x[..., None]
        return x.movedim(-1, -3) if self.kernel == "batch" else x.flatten(-2)

    def _from_matrices(
        self, parts: Sequence[Tensor], lead: Sequence[int], shape: Sequence[int]
    ) -> Tensor:
        """The matrices of each run as one tensor again."""
        _, into, *kernel = (*shape, 1, 1)[: max(len(shape), 2)]
        places = math.prod(kernel)
        each = [*lead, places] if self.kernel == "batch" else [*lead]
        columns = into if self.kernel == "batch" else into * places
        runs = self._runs(shape)
        if self.block is not None:
            supply, several = iter(parts), math.prod(each)
            sizes = [(several * count, height, columns) for height, count in runs]
            parts = [_unblocked(supply, size, self.block) for size in sizes]
        pairs = zip(parts, runs, strict=True)
        x = torch.cat([part.reshape(*each, n * k, columns) for part, (n, k) in pairs], -2)
        return x.movedim(-3, -1) if self.kernel == "batch" else x


MATRICES = MatrixView(assumed=True, most=2)
"""The view of most rules: kernels as matrices (out, in · height · width)."""

TENSORS = MatrixView("tensor", assumed=True, most=5)
"""The view of rules that treat each dimension of a kernel separately."""


def _cuts(n: int, block: int) -> list[Run]:
    """The blocks of a side of length n: their length and number."""
    whole, rest = divmod(n, block)
    return [(block, whole)] * (whole > 0) + [(rest, 1)] * (rest > 0 or n == 0)


def _blocks(x: Tensor, block: int) -> list[Tensor]:
    """Tensors (k, …) split into blocks along each dimension, grouped by shape."""
    found = []
    for runs in _kinds(x.shape[1:], block):
        lengths, counts = zip(*runs, strict=True)
        part = x
        for dim, (length, count) in enumerate(runs, 1):
            start = 0 if length == block else x.shape[dim] - length  # the rest is at the end
            part = part.narrow(dim, start, length * count)
        pairs = [n for length, count in runs for n in (count, length)]
        order = [*range(1, len(pairs), 2), *range(2, len(pairs) + 1, 2)]
        part = part.reshape(len(x), *pairs).permute(0, *order)
        found.append(part.reshape(len(x) * math.prod(counts), *lengths))
    return found


def _unblocked(blocks: Iterator[Tensor], size: Sequence[int], block: int) -> Tensor:
    """The inverse of `_blocks`. size: (k, …)."""
    k, *sides = size
    made: dict[tuple[int, ...], Tensor] = {}
    for runs in _kinds(sides, block):
        lengths, counts = zip(*runs, strict=True)
        part = next(blocks).reshape(k, *counts, *lengths)
        n = len(runs)
        part = part.permute(0, *[i for dim in range(1, n + 1) for i in (dim, dim + n)])
        made[lengths] = part.reshape(k, *[length * count for length, count in runs])
    for dim in range(len(sides), 0, -1):  # blocks along the last dimension are joined first
        each = [length for length, _ in _cuts(sides[dim - 1], block)]
        heads = dict.fromkeys([key[:-1] for key in made])
        made = {head: torch.cat([made[(*head, n)] for n in each], dim) for head in heads}
    return made[()]


def _kinds(sides: Sequence[int], block: int) -> list[tuple[Run, ...]]:
    """The kinds of blocks of a tensor: for each dimension their length and number."""
    return [*product(*[_cuts(n, block) for n in sides])]


def seen_init(view: MatrixView, init: Callable[[Tensor], Any], p: Tensor) -> Any:
    """The slots of a parameter: those of its matrices in one tensor, for each slot of the rule.

    The first dimension is that of the matrices. If they have several heights, their tensors are
    concatenated in a vector.
    """
    if sharding.is_sharded(p) and view.reshapes(p.shape):
        own = seen_init(view, init, sharding.whole(p))
        local = view.is_local(p)
        like = [x is not None and (local or x.shape == p.shape) for x in own]
        pairs = zip(own, like, strict=True)
        return type(own)(*[sharding.placed_like(x, p) if here else x for x, here in pairs])
    if view.keeps(p.shape):
        return init(p)
    each = [(len(part), init(_first(part))) for part in view.parts(p, p.shape)]
    made = [
        _packed([None if x is None else _repeated(x, n) for x, n in column])
        for column in zip(*[[(x, n) for x in own] for n, own in each], strict=True)
    ]
    return type(each[0][1])(*made)


def _repeated(x: Tensor, n: int) -> Tensor:
    """A slot of one matrix for each of n."""
    return torch.stack([x] * n) if n else x.new_empty((0, *x.shape))


def _first(part: Tensor) -> Tensor:
    """The first of some matrices; zeros if there is none."""
    return part[0] if len(part) else part.new_zeros(part.shape[1:])


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
    """A variant of a batched rule, on the matrices of a parameter, or of several.

    The rule always gets a batch, also of one. p: one of these parameters. name: of the rule, for an
    error.

    Raises:
        ValueError: for an update of another shape, which could have this shape after joining the
            matrices.
    """
    if view.keeps(p.shape):
        if u.dim() > p.dim():
            return update(u, slots, *arguments)
        one = u[None]
        made, new = update(one, _one(slots), *arguments)
        _check_result(made, one, name)
        return made[0], type(slots)(*[x if x is None else x[0] for x in new]) if slots else new
    parts = view.parts(u, p.shape)
    lead = u.shape[: u.dim() - p.dim()]
    mine = [slots] * len(parts)
    if slots:
        assert init is not None
        known = slot_shapes(view, init, p.shape, p.dtype)
        columns = [_unpacked(x, [own[i] for own in known]) for i, x in enumerate(slots)]
        mine = [type(slots)(*own) for own in zip(*columns, strict=True)]
    done = [update(x, own, *arguments) for x, own in zip(parts, mine, strict=True)]
    for (found, _), x in zip(done, parts, strict=True):
        _check_result(found, x, name)
    new = ()
    if slots:
        columns = zip(*[own for _, own in done], strict=True)
        new = type(slots)(*[_packed([*x], lead) for x in columns])
    return view.joined([x for x, _ in done], p.shape, u), new


def _check_result(found: Tensor, x: Tensor, name: str) -> None:
    """Raise ValueError for an update of another shape than its matrices."""
    if found.shape != x.shape:
        raise ValueError(
            f"update of the rule {name!r} returned a tensor of shape {tuple(found.shape)} for "
            f"matrices of shape {tuple(x.shape)}; return one of the same shape."
        )


def _one(slots: Any) -> Any:
    """The slots of one tensor, as those of several."""
    return type(slots)(*[x if x is None else x[None] for x in slots]) if slots else slots


def slot_shapes(
    view: MatrixView, init: Callable[[Tensor], Any], shape: torch.Size, dtype: torch.dtype
) -> list[list[torch.Size | None]]:
    """For each run of matrices the shapes of its slots, after the number of matrices."""
    shapes_of = _shapes if torch.compiler.is_compiling() else _known  # Dynamo: no cache
    return shapes_of(view, init, shape, dtype)


def _shapes(
    view: MatrixView, init: Callable[[Tensor], Any], shape: torch.Size, dtype: torch.dtype
) -> list[list[torch.Size | None]]:
    parts = view.parts(torch.empty(shape, dtype=dtype, device="meta"), shape)
    made = [(len(part), init(_first(part))) for part in parts]
    return [[x if x is None else torch.Size((n, *x.shape)) for x in own] for n, own in made]


_known = lru_cache(_shapes)


def _packed(column: list[Any], lead: Sequence[int] = ()) -> Tensor | None:
    """The slots of all matrices as one tensor. lead: the number of parameters, if there are
    several."""
    there = [x for x in column if x is not None]
    if not there:
        return None
    if len(column) == 1:
        (x,) = column
        return x.reshape(*lead, len(x) // max(math.prod(lead), 1), *x.shape[1:]) if lead else x
    each = max(math.prod(lead), 1)
    return torch.cat([sharding.by_rows(x).reshape(*lead, x.numel() // each) for x in there], -1)


def _unpacked(x: Tensor | None, shapes: Sequence[torch.Size | None]) -> list[Tensor | None]:
    """The inverse of `_packed`: for each run of matrices its slots, in one batch."""
    known = [shape for shape in shapes if shape is not None]
    if x is None or not known:
        return [None] * len(shapes)
    if len(shapes) == 1:
        own = known[0][1:]
        return [x.reshape(math.prod(x.shape[: x.dim() - len(own)]), *own)]
    cut = iter(x.split([shape.numel() for shape in known], -1))
    several = math.prod(x.shape[:-1])
    return [
        None if shape is None else next(cut).reshape(several * shape[0], *shape[1:])
        for shape in shapes
    ]
