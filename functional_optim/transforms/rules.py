"""What many rules have in common: how their slots begin, and numbers that stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def zeros(record: Any) -> Callable[[Tensor], Any]:
    """`init` of a rule all of whose slots begin as zeros like the parameter."""

    def init(p: Tensor) -> Any:
        return record(*[torch.zeros_like(p) for _ in record._fields])

    return init


def given(t: Any, **hyper: Any) -> tuple[Any, ...]:
    """`scalars` of a rule whose numbers are its hyperparameters, in their order."""
    return tuple(hyper.values())
