"""Random numbers for the leaves of a tree: pure functions of a seed, counters and paths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.core import randomness
from functional_optim.core.storage import as_update, compute_dtype


def stream(seed: Tensor, *counters: Any) -> Tensor:
    """The key of all numbers drawn for a seed and some counters, such as the step."""
    key = seed
    for counter in counters:
        key = randomness.derived(key, counter)
    return key


def for_path(
    key: Tensor,
    path: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    signs: bool = False,
) -> Tensor:
    """Standard normal numbers for one path, or random signs."""
    own = randomness.derived(key, randomness.named(path))
    make = randomness.signs if signs else randomness.normal
    return make(own.to(device), shape, dtype, device)


def leaf(key: Tensor, path: str, p: Tensor, *, signs: bool = False) -> Tensor:
    """Standard normal numbers (or signs) for one leaf, as a gradient of it would look.

    In compute dtype; complex, with independent parts of variance 1, for a complex leaf.
    """
    shape = (*p.shape, 2) if p.is_complex() else tuple(p.shape)
    return as_update(for_path(key, path, shape, compute_dtype(p), p.device, signs=signs), p)


def like(key: Tensor, params: Any, *, signs: bool = False) -> Any:
    """`leaf` for every leaf of a tree."""
    return tree.map_with_path(lambda path, p: leaf(key, path, p, signs=signs), params)
