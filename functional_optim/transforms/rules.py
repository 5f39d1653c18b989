"""Common parts of rules: initial slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_optim.core.storage import Storage

SQUARES = Storage(nonnegative=("exp_avg_sq",))
"""Storage of slots of which `exp_avg_sq` is an average of squares."""


def zeros(record: Any) -> Callable[[Tensor], Any]:
    """`init` of a rule whose slots are initially zeros like the parameter."""

    def init(p: Tensor) -> Any:
        return record(*[torch.zeros_like(p) for _ in record._fields])

    return init
