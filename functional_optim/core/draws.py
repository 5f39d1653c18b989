"""Random numbers for the leaves of a tree: pure functions of a seed, counters and paths."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.core import modes, randomness
from functional_optim.core.storage import as_update, compute_dtype


def stream(seed: Tensor, *counters: Any) -> Tensor:
    """The key of all random numbers for a seed and some counters, such as the step."""
    key = seed
    for counter in counters:
        key = randomness.derived(key, counter)
    return key


_local = threading.local()


@contextmanager
def within(place: str) -> Iterator[None]:
    """Paths start in a place: equal paths in two places get independent numbers."""
    before = getattr(_local, "place", "")
    _local.place = before + place
    try:
        yield
    finally:
        _local.place = before


class Wanted(NamedTuple):
    """Random numbers for one path."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def for_paths(key: Tensor, wanted: Sequence[Wanted], *, signs: bool = False) -> list[Tensor]:
    """`for_path` for several paths.

    Under torch.compile they are slices of one vector: compile time depends on the number of
    operations, and each separate tensor would need all of them.
    """
    if not torch.compiler.is_compiling():
        make = randomness.signs if signs else randomness.normal
        return [make(own, *x[1:]) for own, x in zip(_keys(key, wanted), wanted, strict=True)]
    together: dict[Any, list[int]] = {}
    for k, one in zip(range(len(wanted)), wanted, strict=True):
        together.setdefault((one.dtype, one.device), []).append(k)
    found: dict[int, Tensor] = {}
    for (dtype, device), members in together.items():
        keys = [_own(key, wanted[k]) for k in members]
        shapes = [wanted[k].shape for k in members]
        drawn = randomness.several(keys, shapes, dtype, device, of_signs=signs)
        found.update(zip(members, drawn, strict=True))
    return [found[k] for k in range(len(wanted))]


def _keys(key: Tensor, wanted: Sequence[Wanted]) -> Sequence[Tensor]:
    """The key of each path; without a trace, by the operations of one."""
    if modes.traced():
        return [_own(key, x) for x in wanted]
    names = _names(tuple([x.path for x in wanted]), key.device)
    keys = randomness.derived(key, names).unbind()
    return [own.to(x.device) for own, x in zip(keys, wanted, strict=True)]


@lru_cache(maxsize=16)
def _names(paths: tuple[str, ...], device: torch.device) -> Tensor:
    return torch.tensor(
        [randomness.signed(randomness.named(x)) for x in paths], dtype=torch.int64, device=device
    )


def key_of(key: Tensor, path: str) -> Tensor:
    """The key of a leaf."""
    return randomness.derived(key, randomness.named(getattr(_local, "place", "") + path))


def _own(key: Tensor, wanted: Wanted) -> Tensor:
    return randomness.derived(key, randomness.named(wanted.path)).to(wanted.device)


def wanted_for(path: str, p: Tensor) -> Wanted:
    """The shape and dtype of random numbers for a leaf: compute dtype, pairs for a complex one."""
    shape = (*p.shape, 2) if p.is_complex() else tuple(p.shape)
    path = getattr(_local, "place", "") + path
    return Wanted(path, shape, compute_dtype(p), p.device)


def leaf(key: Tensor, path: str, p: Tensor, *, signs: bool = False) -> Tensor:
    """Standard normal numbers (or signs) for one leaf, like its gradient.

    In compute dtype; complex, with independent parts of variance 1, for a complex leaf.
    """
    make, wanted = randomness.signs if signs else randomness.normal, wanted_for(path, p)
    return as_update(make(_own(key, wanted), *wanted[1:]), p)


def like(key: Tensor, params: Any, *, signs: bool = False) -> Any:
    """`leaf` for every leaf of a tree."""
    wanted: list[Wanted] = []
    tree.map_with_path(lambda path, p: wanted.append(wanted_for(path, p)), params)
    drawn = iter(for_paths(key, wanted, signs=signs))
    return tree.map(lambda p: as_update(next(drawn), p), params)
