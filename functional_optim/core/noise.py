"""Noise for the update of a rule, as one operation of torch.

A trace, torch.compile, and the recording of a rule see one operation instead of the 130 that make
normal numbers. Kernels have it as a function (`kernels/noise.h`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_optim.core import randomness, sharding
from functional_optim.kernels.counters import WORD

_library = torch.library.Library("functional_optim", "DEF")
_library.define("noise(Tensor key, Tensor low, Tensor high, Tensor like) -> Tensor")
_library.define(
    "noise_at(Tensor key, Tensor low, Tensor high, Tensor place, ScalarType dtype) -> Tensor"
)


def words_of(t: Any) -> tuple[Any, Any]:
    """A step count as two words, low and high, that float32 holds exactly."""
    high = t // (1 << WORD)
    return t - high * (1 << WORD), high


def noise(u: Tensor, key: Tensor, low: Any, high: Any) -> Tensor:
    """Independent standard normal numbers for the elements of the update of a rule, in its dtype.

    They are a function of a tensor's key, the step, and the index of the element. Each process
    makes those of the whole tensor of a DTensor, and keeps its part.

    Args:
        u: the update, float32 or float64.
        key: of the tensor, 0-dim int64.
        low, high: `words_of` the step count, among the scalars of the rule.
    """
    if hasattr(type(u), "placements"):
        like = torch.empty((), dtype=u.dtype, device=u.device).expand(u.shape)
        return sharding.placed_like(noise(like, key, low, high), u)
    count = [
        x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float64, device=key.device)
        for x in (low, high)
    ]
    return torch.ops.functional_optim.noise(key, *count, u.detach())


def _keys(key: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return randomness.noise_keys(key, low.to(torch.int64) + (high.to(torch.int64) << WORD))


def _noise(key: Tensor, low: Tensor, high: Tensor, like: Tensor) -> Tensor:
    keys = _keys(key, low, high)
    return randomness.noise(keys, tuple(like.shape), like.dtype, like.device)


def _noise_at(key: Tensor, low: Tensor, high: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
    return randomness.noise_at(_keys(key, low, high), place, dtype)


def _like(key: Tensor, low: Tensor, high: Tensor, like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _of_a_batch(info: Any, dims: Any, *given: Tensor) -> tuple[Tensor, int | None]:
    """Under vmap: of each member its own, or, without batched keys and steps, the same for all."""

    def member(i: int) -> list[Tensor]:
        pairs = zip(given, dims, strict=True)
        return [x if dim is None else x.select(dim, i) for x, dim in pairs]

    if all(dim is None for dim in dims[:3]):
        return torch.ops.functional_optim.noise(*member(0)), None
    every = [torch.ops.functional_optim.noise(*member(i)) for i in range(info.batch_size)]
    return torch.stack(every), 0


_library.impl("noise", _noise, "CompositeExplicitAutograd")
_library.impl("noise_at", _noise_at, "CompositeExplicitAutograd")
_library.impl("noise", _like, "Meta")
_library.impl("noise", torch.library.fallthrough_kernel, "Autograd")  # it has no gradient
torch.library.register_vmap("functional_optim::noise", _of_a_batch, lib=_library)
