"""Saved slots in the form in which a state keeps them: whole, or packed in one of several ways."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core import sharding
from functional_optim.core.codecs import CELLS, InBlocks, in_blocks
from functional_optim.core.storage import SlotSpec


class Form(NamedTuple):
    """The stored tensors of a slot. kind: how it is packed, one of `CELLS`; None: it is whole."""

    kind: str | None
    keys: tuple[str, ...]
    tensors: tuple[Any, ...]

    @property
    def codec(self) -> InBlocks | None:
        """That by which it is packed, in blocks as large as these."""
        return None if self.kind is None else in_blocks(self.kind, self.tensors[0].shape)

    def said(self) -> str:
        """How it is stored, for an error."""
        codec = self.codec
        if codec is None:
            return f"whole, of shape {tuple(self.tensors[0].shape)}"
        if codec.entrywise:
            return f"packed in {self.kind}, of shape {tuple(self.tensors[0].shape)}"
        *grid, count, _ = self.tensors[0].shape
        parts = f" in each of {math.prod(grid)} parts" if math.prod(grid) > 1 else ""
        return f"packed in {self.kind}, in {count} blocks of {codec.block}{parts}"


def converted(
    saved: Mapping[str, Any], needed: Mapping[str, tuple[Any, Tensor]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """What was saved, each slot as it is needed; and why some cannot be, as "is …, but …".

    Packed slots are decoded to float32. Rounding is to the nearest, so loading is deterministic.

    saved: values by name. needed: tensors like those that a state keeps, and their parameters.
    """
    result, faults = dict(saved), dict[str, str]()
    for name, want in _forms({key: x for key, (x, _) in needed.items()}).items():
        have = _found(saved, name, want.kind)
        if have is None:
            strange = [key for key in saved if key.rpartition(".")[0] == name]
            strange = [key.rpartition(".")[2] for key in strange if key not in needed]
            if strange:
                faults[name] = (
                    f"is stored as {' and '.join(strange)}, but it can be read only if it is whole "
                    f"or packed in {', '.join(CELLS)}"
                )
            continue
        if have.kind == want.kind and (
            want.kind is None or have.tensors[0].shape == want.tensors[0].shape
        ):
            continue  # whether it fits otherwise is checked as ever
        p = needed[want.keys[0]][1]
        new = _as(have, want, p)
        if new is None:
            advice = ""
            if have.kind is not None and max(have.tensors[0].shape[:-2], default=1) > 1:
                advice = "; save it with state_dict(decoded=True)"
            faults[name] = f"is {have.said()}, but it needs one {want.said()}{advice}"
            continue
        for key in have.keys:
            del result[key]
        result.update(zip(want.keys, new, strict=True))
    return result, faults


def _forms(entries: Mapping[str, Any]) -> dict[str, Form]:
    """The slots of a state, by name."""
    found: dict[str, Form] = {}
    parts: set[str] = set()
    for key in entries:
        name, _, kind = key.rpartition(".")
        form = _packed(entries, name, kind) if name and kind in CELLS else None
        if form is not None:
            found[name] = form
            parts.update(form.keys)
    for key, x in entries.items():
        if key not in parts:
            found[key] = Form(None, (key,), (x,))
    return found


def _packed(entries: Mapping[str, Any], name: str, kind: str) -> Form | None:
    """A slot packed in one way, if all of it is there."""
    keys = tuple([f"{name}.{field}" for field in CELLS[kind].fields])
    tensors = tuple([entries.get(key) for key in keys])
    if not all(isinstance(x, Tensor) for x in tensors):
        return None
    codes, *scales = tensors
    if scales and (codes.dim() < 2 or any(x.shape != codes.shape[:-1] for x in scales)):
        return None
    return Form(kind, keys, tensors)


def _found(saved: Mapping[str, Any], name: str, kind: str | None) -> Form | None:
    """A slot as it was saved; of this kind, if it was in several."""
    each = [_packed(saved, name, other) for other in CELLS]
    if isinstance(saved.get(name), Tensor):
        each.append(Form(None, (name,), (saved[name],)))
    known = [form for form in each if form is not None]
    return next((form for form in known if form.kind == kind), known[0] if known else None)


def _as(have: Form, want: Form, p: Tensor) -> tuple[Tensor, ...] | None:
    """The tensors of a slot in another form; None if it belongs to another parameter."""
    shape = _shape(have, want, p)
    if shape is None:
        return None
    x, codec = have.tensors[0], have.codec
    divided = sharding.is_sharded(x)
    if divided and (sharding.misplaced(x, p) or x.placements != p.placements):
        return None
    if codec is not None:
        stored = have.tensors
        if not divided and not codec.entrywise and x.dim() > 2:  # of one part
            stored = tuple([y.reshape(y.shape[len(shape) :]) for y in stored])
        x = codec.decode(stored, SlotSpec(shape, torch.float32))
    if want.codec is None:
        return (x,)
    if sharding.is_sharded(want.tensors[0]):
        x = sharding.placed_like(x, p)
    return want.codec.encode(x.to(torch.float32))


def _shape(have: Form, want: Form, p: Tensor) -> torch.Size | None:
    """The shape of a slot, if both can be forms of it.

    One that is packed in blocks tells how many entries there are at most: it is that of the
    parameter, if this fits.
    """
    each = [form.tensors[0].shape for form in (have, want) if _tells(form)]
    if len(each) == 2:
        return each[0] if each[0] == each[1] else None
    known = [p.shape, *each]
    blocks = [form for form in (have, want) if not _tells(form)]
    fits = [shape for shape in known if all(_fits(form, shape) for form in blocks)]
    if not fits or (each and fits[0] != each[0]):
        return None
    return fits[0]


def _tells(form: Form) -> bool:
    """Whether a slot is stored in its own shape."""
    return form.codec is None or form.codec.entrywise


def _fits(form: Form, shape: torch.Size) -> bool:
    """Whether blocks are those of a slot of this shape."""
    codec, (*grid, count, _) = form.codec, form.tensors[0].shape
    assert codec is not None
    if grid and len(grid) != len(shape):
        return False
    if not sharding.is_sharded(form.tensors[0]) and math.prod(grid) > 1:
        return False  # how others have divided it is not known here
    each = [math.ceil(n / k) for n, k in zip(shape, grid or [1] * len(shape), strict=True)]
    return count == codec.blocks(math.prod(each))
