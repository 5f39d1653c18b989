"""Measurements of trees, for `functional_optim.monitor`.

A measurement looks at one tensor at a time. What it finds there is summed over the whole tree, and
a last function makes one number of the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric


class Measure(NamedTuple):
    """A measurement.

    part: from a tensor to a 0-dim tensor, or a tuple of some; they are summed over the tree. It
        must be a sum over entries, each taken by itself: a tensor may come as 1-D, and in pieces.
        Tensor operations only, as in the rules of `leafwise`. Half types arrive as float32, complex
        tensors as real pairs.
    finish: from the sums, floats or 0-dim float64 tensors, to the number; use
        `functional_optim.numeric`. Default: the one sum itself.

    Example::

        >>> import torch, functional_optim as fo
        >>> l1 = fo.measures.Measure(lambda x: x.abs().sum())
        >>> tx = fo.monitor({"l1": l1})
        >>> w = torch.zeros(2)
        >>> u, state = tx.update(torch.tensor([1.0, -2.0]), tx.init(w), w)
        >>> fo.get(state, "l1")
        tensor(3.)
    """

    part: Callable[[Tensor], Any]
    finish: Callable[..., Any] = numeric.float64


def _square(x: Tensor) -> Tensor:
    return (x * x).sum()


def _nans(x: Tensor) -> Tensor:
    return (x != x).to(x.dtype).sum()


def _sum_and_size(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(), torch.ones_like(x).sum()


def _square_and_size(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x * x).sum(), torch.ones_like(x).sum()


def _quotient(total: Any, size: Any) -> Any:
    return total / numeric.maximum(size, 1.0)


def _root(total: Any, size: Any) -> Any:
    return numeric.sqrt(_quotient(total, size))


global_norm = Measure(_square, numeric.sqrt)
"""The Euclidean norm of all entries together."""

nan_count = Measure(_nans)
"""How many entries are NaN."""

mean = Measure(_sum_and_size, _quotient)
"""The mean of all entries; a complex one counts as two."""

rms = Measure(_square_and_size, _root)
"""The root of the mean square of all entries; a complex one counts as two."""
