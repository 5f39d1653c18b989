"""Parameters and slots as kernels see them: packed ones stand for what a rule gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.codecs import InBlocks
from functional_optim.core.rule import Placement, master_of
from functional_optim.core.storage import Slots, stored_slots
from functional_optim.engine.kernel_body import KernelBody
from functional_optim.kernels import PackedSlot


class Unpacked(NamedTuple):
    """A packed slot of one tensor, or the tensor with the bits that it lacks."""

    codec: InBlocks
    stored: Slots


def unpacked_weight(
    placements: Sequence[Placement], p: Tensor, slots: Sequence[Slots]
) -> Tensor | Unpacked:
    """A parameter, or how it is stored together with a slot."""
    k = master_of(placements, p)
    if k is None or not isinstance(codec := placements[k].rule.weight_codec, InBlocks):
        return p
    return Unpacked(codec, (p, *[x for x in slots[k] if x is not None]))


def unpacked(placements: Sequence[Placement], slots: Sequence[Slots]) -> list[Slots]:
    """The slots of a tensor, rule by rule, with an `Unpacked` for each that is packed.

    What a codec of another kind packs stays as it is stored.
    """
    found: list[Slots] = []
    for placement, own in zip(placements, slots, strict=True):
        rule = placement.rule
        if isinstance(rule.weight_codec, InBlocks):
            found.append((None,) * len(own))  # a part of the parameter
            continue
        if not all(type(x) in (InBlocks, type(None)) for x in rule.codecs) or not any(rule.codecs):
            found.append(own)
            continue
        entries: list[Any] = []
        for codec, whole, packed in stored_slots(rule, own):
            mine = isinstance(codec, InBlocks)
            entries.append(Unpacked(codec, packed) if mine else whole)
        found.append(tuple(entries))
    return found


def all_in_blocks(placements: Sequence[Placement], p: Tensor) -> bool:
    """Whether the codecs of rules, and of a parameter, are those that kernels unpack."""
    k = master_of(placements, p)
    codecs = [codec for placement in placements for codec in placement.rule.codecs if codec]
    own = codecs if k is None else [*codecs, placements[k].rule.weight_codec]
    return all(isinstance(codec, InBlocks) for codec in own)


def is_packed(entries: Sequence[Slots]) -> bool:
    """Whether any slot is packed."""
    return any(type(x) is Unpacked for own in entries for x in own)


def tensors(entries: Sequence[Slots]) -> list[Tensor]:
    """The tensors in which slots are stored that a tensor has."""
    found: list[Tensor] = []
    for own in entries:
        for x in own:
            if x is not None:
                found += x.stored if type(x) is Unpacked else (x,)
    return found


def addresses(entries: Sequence[Slots]) -> list[int]:
    """Those of their memory."""
    return list(map(Tensor.data_ptr, tensors(entries)))


def dtypes(entries: Sequence[Slots]) -> list[torch.dtype]:
    """For each slot that a tensor has its dtype, as a rule sees it."""
    present = [x for own in entries for x in own if x is not None]
    return [torch.float32 if type(x) is Unpacked else x.dtype for x in present]


def packed_slots(
    body: KernelBody, weight: Tensor | Unpacked, entries: Sequence[Slots], master: int | None
) -> tuple[PackedSlot, ...]:
    """What is packed of the parameter and the slots that a kernel sees.

    master: the index of the rule whose slots belong to the parameter.
    """
    found: list[PackedSlot] = []
    if type(weight) is Unpacked:
        key = None if master is None else body.key_at(master)
        found.append(PackedSlot(1, weight.codec, key, len(weight.stored)))
    first = 2
    for k, own in enumerate(entries):
        for x in own:
            if type(x) is Unpacked:
                key = body.key_at(k)
                found.append(PackedSlot(first, x.codec, key, len(x.stored)))
            first += x is not None
    return tuple(found)


def without_codecs(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The same rules on slots as they see them."""
    found: list[Placement] = []
    for placement in placements:
        rule = placement.rule.without_codecs()
        if rule.weight_codec is not None:
            rule = rule._replace(weight_codec=None)
        found.append(placement._replace(rule=rule))
    return tuple(found)
