"""Saved values in their own dtype, where a loader has cast them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_optim.core import sharding


def restore_precision(loaded: Any, saved: Any) -> Any:
    """The saved values with their own dtypes, wherever loading has only cast them.

    torch.optim's loading casts all state to the dtype of its parameter. A value that a hook has
    changed stays as it is. Dicts, lists and tuples are searched.
    """
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        if loaded.dtype is saved.dtype or loaded.shape != saved.shape:
            return loaded
        return saved.to(loaded.device, copy=True) if _is_cast(saved, loaded) else loaded
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        return {key: restore_precision(x, saved.get(key)) for key, x in loaded.items()}
    sequences = isinstance(loaded, (list, tuple)) and isinstance(saved, (list, tuple))
    if sequences and len(loaded) == len(saved):
        return type(loaded)([restore_precision(x, y) for x, y in zip(loaded, saved, strict=True)])
    return loaded


def _is_cast(saved: Tensor, loaded: Tensor) -> bool:
    """Whether one is the other after a cast, in the local part of a DTensor; NaN equals NaN."""
    a, b = (sharding.part(x.detach()) for x in (saved, loaded))
    if a.is_complex() and not b.is_complex():
        a = a.real
    a = a.to(b)
    if a.is_complex():
        a, b = (torch.view_as_real(x.resolve_conj()) for x in (a, b))
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
