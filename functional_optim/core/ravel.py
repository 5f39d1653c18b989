"""A tree of tensors as one vector, for methods that need all parameters at once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.core import base, sharding
from functional_optim.core.storage import as_real, as_stored, as_update, compute_dtype

REAL = {
    torch.complex128: torch.float64,
    torch.complex64: torch.float32,
    torch.complex32: torch.float16,
}


class Ravel:
    """Conversion between trees like `like` and vectors of one dtype; complex numbers become pairs.

    Every process has the whole vector: sharded leaves (DTensors) are gathered, and sharded again in
    the inverse conversion.

    Args:
        like: pytree of floating-point or complex tensors, of any strides.
        batched: every leaf has a leading dimension of independent problems. Trees then become
            matrices with one row for each problem.
        dtype: of the vectors. Default: float64 if any leaf is double, else float32.

    size: the length of a vector. problems: (their number,), or () if not batched. layout: a value
    that is equal for trees of the same structure. exact: whether the leaves have the vectors'
    precision.

    Raises:
        TypeError: for a leaf that is not a floating-point or complex tensor.
        ValueError: if the tree has no elements, or the leaves differ in their leading dimension.

    Example::

        >>> import torch
        >>> from functional_optim.core.ravel import Ravel
        >>> params = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3 + 4j)}
        >>> flat = Ravel(params)
        >>> flat.vector(params)
        tensor([1., 2., 3., 4.])
        >>> flat.tree(flat.vector(params))["b"]
        tensor(3.+4.j)
    """

    def __init__(
        self, like: Any, *, batched: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        base.check_params(like)
        self.like = like
        self.leaves: list[Tensor] = tree.leaves(like)
        self.problems = _problems(like) if batched else ()
        skip = len(self.problems)
        self.shapes = [(*p.shape[skip:], 2)[: p.dim() - skip + p.is_complex()] for p in self.leaves]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.size = sum(self.sizes)
        if not self.size:
            raise ValueError(
                f"there is nothing to optimize: the parameters have no elements "
                f"({tree.summary(like)})."
            )
        wide = any(compute_dtype(p) is torch.float64 for p in self.leaves)
        self.dtype = dtype or (torch.float64 if wide else torch.float32)
        self.device = self.leaves[0].device
        self.layout = tuple(
            [(p.dtype, shape) for p, shape in zip(self.leaves, self.shapes, strict=True)]
        )
        self.exact = all(real_dtype(p) is self.dtype for p in self.leaves)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of zeros, for every problem."""
        return torch.zeros((*self.problems, *shape), dtype=dtype or self.dtype, device=self.device)

    def vector(self, other: Any) -> Tensor:
        """A tree as a vector; zeros for `None`."""
        parts = []
        for (_, x), n in zip(tree.rows(self.like, other), self.sizes, strict=True):
            if x is None:
                parts.append(self.zeros(n))
                continue
            if x.layout != torch.strided:
                x = x.to_dense()
            real = as_real(sharding.whole(x).resolve_conj(), self.dtype)
            parts.append(real.reshape((*self.problems, n)))
        return torch.cat(parts, -1)

    def tree(self, vector: Tensor, *, stored: bool = True) -> Any:
        """A vector as a tree, in the leaves' dtypes, or (stored=False) in the vector's dtype."""
        parts = []
        for x, p, shape in zip(vector.split(self.sizes, -1), self.leaves, self.shapes, strict=True):
            x = x.reshape((*self.problems, *shape))
            x = x.clone() if p.is_complex() else x  # view_as_complex needs an even offset
            parts.append(as_stored(x, p) if stored else as_update(x, p))
        return tree.with_leaves(self.like, parts)

    def snap(self, vector: Tensor) -> Tensor:
        """The vector rounded to the leaves' dtypes."""
        return vector if self.exact else self.vector(self.tree(vector))


def real_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a tensor's numbers, or of a complex tensor's pairs."""
    return REAL.get(p.dtype, p.dtype)


def _problems(like: Any) -> tuple[int]:
    counts = {tuple(p.shape[:1]) for p in tree.leaves(like)}
    if len(counts) != 1 or () in counts:
        raise ValueError(
            "batched parameters need one leading dimension in common, the number of problems, but "
            f"these have {tree.summary(like)}."
        )
    return counts.pop()
