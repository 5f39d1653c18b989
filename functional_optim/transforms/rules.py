"""Common parts of rules: initial slots, roots with derivatives, and rules of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.modes import differentiable
from functional_optim.core.rule import Runs
from functional_optim.core.storage import Storage, wide_dtype

SQUARES = Storage(nonnegative=("exp_avg_sq",))
"""Storage of slots of which `exp_avg_sq` is an average of squares."""


def zeros(record: Any, *, wide: bool = False) -> Callable[[Tensor], Any]:
    """`init` of a rule whose slots are initially zeros like the parameter.

    wide: in float32, if the parameter is of a half type.
    """

    def init(p: Tensor) -> Any:
        dtype = wide_dtype(p) if wide else p.dtype
        return record(*[torch.zeros_like(p, dtype=dtype) for _ in record._fields])

    return init


def of_model(
    name: str, init: Any, update: Any, scalars: Any, reduce: Any, **others: Any
) -> Leafwise:
    """A rule that measures the whole model: all parameters share its step count.

    others: further arguments of `leafwise`.
    """
    runs = Runs(shared=True)
    return leafwise(init, update, scalars, reduce=reduce, runs=runs, name=name, **others)


def root(x: Tensor) -> Tensor:
    """The square root, with a derivative of 0 at 0: a meta-gradient of an element without a
    gradient would be NaN."""
    if not differentiable(x):
        return x.sqrt()
    null = x == 0
    return x.masked_fill(null, 1.0).sqrt().masked_fill(null, 0.0)
