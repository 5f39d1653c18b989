"""Random numbers for the leaves of a tree: pure functions of a seed, counters and paths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_optim import randomness, tree
from functional_optim.randomness import Words
from functional_optim.rules import as_update, compute_dtype


def stream(seed: Any, *counters: Any) -> Words:
    """The key of all numbers drawn for a seed and some counters, such as the step."""
    key = randomness.words(seed)
    for counter in counters:
        key = randomness.threefry(key, randomness.words(counter))
    return key


def for_path(
    key: Words,
    path: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    signs: bool = False,
) -> Tensor:
    """Standard normal numbers for one path, or random signs."""
    x, y = randomness.threefry(key, randomness.words(randomness.named(path)))
    make = randomness.signs if signs else randomness.normal
    return make((x.to(device), y.to(device)), shape, dtype, device)


def leaf(key: Words, path: str, p: Tensor, *, signs: bool = False) -> Tensor:
    """Standard normal numbers (or signs) for one leaf, as a gradient of it would look.

    In compute dtype; complex, with independent parts of variance 1, for a complex leaf.
    """
    shape = (*p.shape, 2) if p.is_complex() else tuple(p.shape)
    return as_update(for_path(key, path, shape, compute_dtype(p), p.device, signs=signs), p)


def like(key: Words, params: Any, *, signs: bool = False) -> Any:
    """`leaf` for every leaf of a tree."""
    return tree.map_with_path(lambda path, p: leaf(key, path, p, signs=signs), params)
