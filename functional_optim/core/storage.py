"""How tensors are stored: the dtypes in which rules compute, slots, and codecs that pack slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from functional_optim.core import sharding
from functional_optim.core.views import seen_init

if TYPE_CHECKING:
    from functional_optim.core.rule import Rule

Slots = tuple[Any, ...]
"""The stored tensors of one tensor's slots for one rule; None where it has none."""


def compute_dtype(p: Tensor) -> torch.dtype:
    """The dtype in which rules see a tensor: float64 for doubles, float32 for all others."""
    return torch.float64 if p.dtype in (torch.float64, torch.complex128) else torch.float32


def wide_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a slot that holds sums or copies of p: p's own, float32 for half types."""
    return p.dtype if p.is_complex() else compute_dtype(p)


def as_real(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as rules see it: complex numbers as pairs in a last dimension, and in `dtype`."""
    if x.is_complex():
        x = torch.view_as_real(x)
    return x if x.dtype is dtype else x.to(dtype)  # one operation less to trace


def as_update(u: Tensor, p: Tensor) -> Tensor:
    """An update in compute dtype, complex again and sharded as the parameter is."""
    u = torch.view_as_complex(u) if p.is_complex() else u
    return u if type(p) is Tensor else sharding.placed_like(u, p)


def as_stored(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `as_real`, into the dtype of `like`."""
    return as_update(x, like).to(like.dtype)


class SlotSpec(NamedTuple):
    """A slot as its rule sees it: complex numbers are pairs in a last dimension."""

    shape: torch.Size
    dtype: torch.dtype


class Codec(Protocol):
    """How a slot is stored as other tensors than the rule sees, such as 8-bit codes and scales.

    A rule's `init` and `update` know nothing of it. Codecs are part of a kernel: two that are equal
    must do the same.

    fields: names of the stored tensors; a state keeps them as `exp_avg.codes`, `exp_avg.scale`.
    """

    @property
    def fields(self) -> tuple[str, ...]: ...

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """The stored tensors of a slot, in the order of `fields`. By operations on tensors only.

        x: float32 or float64, in the slot's shape.
        """
        ...

    def decode(self, stored: tuple[Tensor, ...], spec: SlotSpec) -> Tensor:
        """The slot of these stored tensors. spec: its shape and dtype."""
        ...


def stored_keys(slots: type | None, codecs: Sequence[Codec | None]) -> tuple[str, ...]:
    """The names of the tensors in which slots are stored."""
    fields: tuple[str, ...] = () if slots is None else slots._fields
    if not any(codecs):
        return fields
    return tuple(
        [
            key
            for field, codec in zip(fields, codecs, strict=True)
            for key in ([field] if codec is None else [f"{field}.{x}" for x in codec.fields])
        ]
    )


def init_slots(rule: Rule, p: Tensor) -> Slots:
    """A new tensor's slots for one rule, as they are stored."""
    if rule.init is None:
        return ()
    made = tuple(rule.init(p) if rule.view is None else seen_init(rule.view, rule.init, p))
    return encoded(rule, made, p) if any(rule.codecs) else made


def slots_like(rule: Rule, p: Tensor) -> Slots:
    """Tensors without data, with the shapes and dtypes of the stored slots of a tensor like p."""
    return init_slots(rule, torch.empty(p.shape, dtype=p.dtype, device="meta"))


def encoded(rule: Rule, slots: Sequence[Any], p: Tensor) -> Slots:
    """Slots packed by the codecs of their rule; those without one as they are."""
    stored: list[Any] = []
    for x, codec in zip(slots, rule.codecs, strict=True):
        if codec is None:
            stored.append(x)
        else:
            stored += [None] * len(codec.fields) if x is None else _packed(codec, x, p)
    return tuple(stored)


def _packed(codec: Codec, x: Tensor, p: Tensor) -> tuple[Tensor, ...]:
    return tuple(codec.encode(as_real(x, compute_dtype(p))))


def opened(rule: Rule, stored: Slots, p: Tensor) -> Any:
    """The slots of a tensor as its rule sees them. p: the tensor."""
    if rule.slots is None:
        return ()
    dtype = compute_dtype(p)
    if not (rule.codecs and any(rule.codecs)):  # `any` takes a trace long
        return rule.slots(*[None if s is None else as_real(s, dtype) for s in stored])
    assert rule.init is not None
    known = rule.init(torch.empty(p.shape, dtype=p.dtype, device="meta"))
    found: list[Any] = []
    at = 0
    for like, codec in zip(known, rule.codecs, strict=True):
        mine = stored[at : at + (1 if codec is None else len(codec.fields))]
        at += len(mine)
        if codec is None:
            found.append(None if mine[0] is None else as_real(mine[0], dtype))
        elif any(x is None for x in mine):
            found.append(None)
        else:
            found.append(codec.decode(mine, SlotSpec(as_real(like, dtype).shape, dtype)))
    return rule.slots(*found)


def closed(rule: Rule, slots: Sequence[Any], stored: Slots, p: Tensor) -> Slots:
    """New slots as they are stored, the way back from `opened`. stored: the old ones.

    Raises:
        ValueError: if a slot of a rule that is not element-wise got another shape, as it does where
            the state of a smaller parameter is spread over a larger one.
    """
    if rule.codecs and any(rule.codecs):
        slots = encoded(rule, slots, p)
    pairs = zip(slots, stored, strict=True)
    new = tuple([None if old is None else _kept_as(x, old) for x, old in pairs])
    if not rule.elementwise:  # slots of others have the shape of their parameter
        for key, x, old in zip(rule.keys, new, stored, strict=True):
            if x is not None and x.shape != old.shape:
                raise ValueError(
                    f"the slot {key!r} of the state has shape {tuple(old.shape)}, but the step "
                    f"makes one of shape {tuple(x.shape)}; pass the state that this "
                    "transformation's own init returned for these parameters."
                )
    return new


def _kept_as(x: Tensor, old: Tensor) -> Tensor:
    if type(old) is not Tensor or old.is_complex():
        return as_stored(x, old) if old.is_floating_point() or old.is_complex() else x.to(old.dtype)
    return x if x.dtype is old.dtype else x.to(old.dtype)


def present(slots: Sequence[Slots]) -> list[Tensor]:
    """The slots that a tensor has, in one list."""
    return [slot for own in slots for slot in own if slot is not None]


def with_holes(given: Sequence[Tensor], holes: Sequence[Sequence[bool]]) -> list[Slots]:
    """The inverse of `present`. holes: for each rule, which of its slots are missing."""
    supply = iter(given)
    return [tuple([None if hole else next(supply) for hole in own]) for own in holes]


def laid_out_like(g: Tensor, p: Tensor) -> Tensor:
    """A gradient as it is, or copied into the memory layout of its parameter."""
    return g if g.stride() == p.stride() else torch.empty_like(p, dtype=g.dtype).copy_(g)
