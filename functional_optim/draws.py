"""Random numbers for the leaves of a tree: pure functions of a seed, counters and paths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_optim import randomness, tree
from functional_optim.randomness import Words
from functional_optim.rules import as_update, compute_dtype


def check_seed(name: str, seed: Any) -> None:
    """Raise, in the name of who takes it, unless a seed is one integer of at most 64 bits."""
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.is_floating_point() or seed.is_complex():
            raise TypeError(
                f"{name} needs one integer as its seed, but got a tensor of {seed.dtype} and "
                f"shape {tuple(seed.shape)}; for an ensemble call it under torch.vmap."
            )
        return
    if not isinstance(seed, int):
        raise TypeError(f"{name} needs an integer as its seed, but got {seed!r}.")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"{name} needs a seed in [-2⁶³, 2⁶³), but got {seed}.")


def counter_and_seed(seed: int | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """A step count of 0 and the seed, as 0-dim int64 tensors of their own."""
    step = torch.zeros((), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return step, seed.detach().to(step).reshape(()).clone()
    return step, torch.full_like(step, seed)


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
    own = stream_of(key, path)
    make = randomness.signs if signs else randomness.normal
    return make((own[0].to(device), own[1].to(device)), torch.Size(shape), dtype, device)


def stream_of(key: Words, path: str) -> Words:
    """The key of the numbers of one leaf."""
    return randomness.threefry(key, randomness.words(randomness.named(path)))


def leaf(key: Words, path: str, p: Tensor, *, signs: bool = False) -> Tensor:
    """Standard normal numbers (or signs) for one leaf, as a gradient of it would look.

    In compute dtype; complex, with independent parts of variance 1, for a complex leaf.
    """
    shape = (*p.shape, 2) if p.is_complex() else tuple(p.shape)
    return as_update(for_path(key, path, shape, compute_dtype(p), p.device, signs=signs), p)


def like(key: Words, params: Any, *, signs: bool = False) -> Any:
    """`leaf` for every leaf of a tree."""
    return tree.map_with_path(lambda path, p: leaf(key, path, p, signs=signs), params)


def log_uniform(key: Words) -> Tensor:
    """The logarithm of a number that is uniform in (0, 1): 0-dim, float64."""
    x, _ = randomness.threefry(key, (0, 0))
    return ((x.to(torch.float64) + 0.5) * 2.0**-32).log()
