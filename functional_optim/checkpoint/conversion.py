"""Conversion of saved values to the storage of a state: whole or packed slots, and the original
dtypes if a loader has cast them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core import sharding
from functional_optim.core.cells import CELLS
from functional_optim.core.codecs import InBlocks, in_blocks
from functional_optim.core.storage import SlotSpec


class SavedSlot(NamedTuple):
    """The stored tensors of a slot. kind: its storage format, one of `CELLS`; None: it is whole."""

    kind: str | None
    keys: tuple[str, ...]
    tensors: tuple[Any, ...]

    @property
    def codec(self) -> InBlocks | None:
        """The codec that packs it, with the same block size."""
        return None if self.kind is None else in_blocks(self.kind, self.tensors[0].shape)

    @property
    def blocks(self) -> InBlocks | None:
        """The same, or None if it is stored in its shape."""
        return None if self.codec is None or self.codec.entrywise else self.codec

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of shards along each dimension when it was packed in blocks."""
        return tuple(self.tensors[0].shape[:-2]) if self.blocks else ()

    def said(self) -> str:
        """Its storage, for an error."""
        how = "whole" if self.kind is None else f"packed in {self.kind}"
        shape, blocks = tuple(self.tensors[0].shape), self.blocks
        if blocks is None:
            return f"{how}, of shape {shape}"
        parts = math.prod(self.grid)
        each = f" in each of {parts} parts" if parts > 1 else ""
        return f"{how}, in {shape[-2]} blocks of {blocks.block}{each}"


def converted(
    saved: Mapping[str, Any], needed: Mapping[str, tuple[Any, Tensor]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The saved values with each slot in the needed format; and why some cannot be converted, as
    "is …, but …".

    Packed slots are decoded to float32. Rounding is to the nearest, so loading is deterministic.

    saved: values by name. needed: tensors like those of the state, and their parameters.
    """
    result, faults = dict(saved), dict[str, str]()
    for name, want in _forms({key: x for key, (x, _) in needed.items()}).items():
        found = _found(saved, name)
        if len(found) != 1:
            fault = _unclear(found) if found else _unreadable(saved, name, needed)
            if fault:
                faults[name] = fault
            continue
        (have,) = found
        if have.kind == want.kind and (
            want.kind is None or have.tensors[0].shape == want.tensors[0].shape
        ):
            continue  # other conditions are checked as usual
        new = _as(have, want, needed[want.keys[0]][1])
        if isinstance(new, str):
            faults[name] = new
            continue
        for key in have.keys:
            del result[key]
        result.update(zip(want.keys, new, strict=True))
    return result, faults


def is_packed(key: Any) -> bool:
    """Whether a key of a state is that of the codes of a slot."""
    return str(key).rpartition(".")[2] in CELLS


def _forms(entries: Mapping[str, Any]) -> dict[str, SavedSlot]:
    """The slots of a state, by name."""
    named = [key.rpartition(".") for key in entries]
    packed = [(x, _packed(entries, x, kind)) for x, _, kind in named if x and kind in CELLS]
    found = {x: form for x, form in packed if form is not None}
    parts = {key for form in found.values() for key in form.keys}
    whole = {key: SavedSlot(None, (key,), (x,)) for key, x in entries.items() if key not in parts}
    return found | whole


def _packed(entries: Mapping[str, Any], name: str, kind: str) -> SavedSlot | None:
    """A slot in one storage format, if it is complete."""
    keys = tuple([f"{name}.{field}" for field in CELLS[kind].fields])
    tensors = [x for key in keys if isinstance(x := entries.get(key), Tensor)]
    if len(tensors) < len(keys):
        return None
    return SavedSlot(kind, keys, tuple(tensors))


def _found(saved: Mapping[str, Any], name: str) -> list[SavedSlot]:
    """The storage formats in which a slot was saved."""
    each = [_packed(saved, name, kind) for kind in CELLS]
    if isinstance(saved.get(name), Tensor):
        each.append(SavedSlot(None, (name,), (saved[name],)))
    return [form for form in each if form is not None]


def _unclear(found: list[SavedSlot]) -> str:
    """Why a slot that was saved in several formats cannot be read."""
    return (
        f"is {' and '.join([form.said() for form in found])}, but only one of these can be right; "
        "torch's set_optimizer_state_dict makes both of a whole checkpoint, unless "
        "adapters.decode_slots is registered as a hook of state_dict"
    )


def _unreadable(saved: Mapping[str, Any], name: str, needed: Mapping[str, Any]) -> str | None:
    """Why a saved slot cannot be read; None if it was not saved."""
    fields = [key.rpartition(".")[2] for key in saved if key.rpartition(".")[0] == name]
    for kind in CELLS:
        absent = [field for field in CELLS[kind].fields if field not in fields]
        if kind in fields and absent:
            return f"is packed in {kind}, but without its {absent[0]}"
    strange = [field for field in fields if f"{name}.{field}" not in needed]
    if not strange:
        wanted = [kind for kind in CELLS if f"{name}.{kind}" in needed]
        if not wanted or not fields or any(field in CELLS for field in fields):
            return None
        return f"has its {fields[0]}, but not the {wanted[0]} codes to which that belongs"
    return (
        f"is stored as {' and '.join(strange)}, but it can be read only if it is whole or packed "
        f"in {', '.join(CELLS)}"
    )


def _as(have: SavedSlot, want: SavedSlot, p: Any) -> tuple[Tensor, ...] | str:
    """The tensors of a slot in another format, or why it cannot be converted."""
    codes, *scales = have.tensors
    if scales and (codes.dim() < 2 or scales[0].shape != codes.shape[:-1]):
        shapes = tuple(scales[0].shape), tuple(codes.shape)
        why = f"its scale has shape {shapes[0]} and its codes {shapes[1]}"
        return f"is packed in {have.kind}, but {why}"
    shape = _shape(have, want, p)
    if shape is None:
        advice = "; save it with state_dict(decoded=True)" if math.prod(have.grid) > 1 else ""
        return f"is {have.said()}, but it needs one {want.said()}{advice}"
    x, stored = have.tensors[0], have.tensors
    if sharding.is_sharded(x):
        why = sharding.misplaced(x, p)
        if why is None and have.blocks and x.placements != p.placements:
            why = f"is packed in parts {x.placements}, but its parameter is divided {p.placements}"
        if why:
            return why
    elif have.blocks:  # of one part
        stored = tuple([y.reshape(y.shape[len(have.grid) :]) for y in stored])
    if have.codec:
        x = have.codec.decode(stored, SlotSpec(shape, torch.float32))
    if want.codec is None:
        return (x,)
    if sharding.is_sharded(want.tensors[0]):
        x = sharding.placed_like(x, p)
    return want.codec.encode(x.to(torch.float32))


def _shape(have: SavedSlot, want: SavedSlot, p: Tensor) -> torch.Size | None:
    """The shape of a slot, if both can be formats of it.

    Packed blocks only give an upper bound of the number of elements: the shape is that of the
    parameter, if this is consistent.
    """
    each = [form.tensors[0].shape for form in (have, want) if form.blocks is None]
    if len(each) == 2:
        return each[0] if each[0] == each[1] else None
    blocks = [form for form in (have, want) if form.blocks]
    fits = [shape for shape in (p.shape, *each) if all(_fits(form, shape) for form in blocks)]
    return fits[0] if fits and fits[0] in (each or fits) else None


def _fits(form: SavedSlot, shape: torch.Size) -> bool:
    """Whether blocks can be those of a slot of this shape."""
    grid, codes = form.grid, form.tensors[0]
    assert form.blocks is not None
    if grid and len(grid) != len(shape):
        return False
    if math.prod(grid) > 1 and not sharding.is_sharded(codes):
        return False  # the sharding of other processes is not known here
    each = [math.ceil(n / k) for n, k in zip(shape, grid or [1] * len(shape), strict=True)]
    return codes.shape[-2] == form.blocks.blocks(math.prod(each))


def restore_precision(loaded: Any, saved: Any) -> Any:
    """The saved values with their original dtypes, if loading has only cast them.

    torch.optim's loading casts all state to the dtype of its parameter, and keeps a saved tensor
    that needs no cast: it is copied, so that steps do not write to it. A value that a hook has
    changed stays unchanged. Dicts, lists and tuples are searched.
    """
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        if loaded is saved:
            return loaded.clone()
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
    if a.layout is not torch.strided:  # which is refused later
        return False
    if a.is_complex() and not b.is_complex():
        a = a.real
    a = a.to(b)
    if a.is_complex():
        a, b = (torch.view_as_real(x.resolve_conj()) for x in (a, b))
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
