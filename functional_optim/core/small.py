"""Small tensors like those of a step, on which rules are recorded.

The sizes of slots must be expressed by those of the parameter: the slots that rules create for
small parameters show how.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from functional_optim.core.codecs import InBlocks
from functional_optim.core.first_slots import init_slots_as
from functional_optim.core.rule import Placement
from functional_optim.core.storage import Slots, stored_slots
from functional_optim.kernels import record
from functional_optim.kernels.graph import Graph, axes_of
from functional_optim.kernels.node import Unsuitable


def sizes_of(p: Tensor) -> tuple[int, ...]:
    """The sizes of the axes for a parameter, before they are merged: a number becomes a vector of
    one element, complex numbers become pairs."""
    shape = tuple(p.shape)
    return (*shape, 2) if p.is_complex() else shape or (1,)


def check_shapes(graph: Graph, p: Tensor, slots: Sequence[Slots]) -> None:
    """Raise Unsuitable unless slots have the sizes that a graph assumes."""
    sizes, every = sizes_of(p), [x for own in slots for x in own if x is not None]
    for x, node in zip(every, graph.inputs[2:], strict=True):
        shape = (*x.shape, 2) if x.is_complex() else tuple(x.shape)
        expected = node.shape_at(sizes)
        if shape != expected and not math.prod(shape) == math.prod(expected) == 1:
            raise Unsuitable(f"a slot of shape {tuple(x.shape)} for {tuple(p.shape)}")


def check_packed(
    placements: Sequence[Placement], p: Tensor, slots: Sequence[Slots], *, whole: bool
) -> None:
    """Raise Unsuitable unless packed slots have the blocks of a parameter.

    whole: whether it is not a shard: each process has as many blocks as the largest shard needs.
    """
    for placement, own in zip(placements, slots, strict=True):
        if not (own and placement.rule.storage.codecs):
            continue
        for slot in stored_slots(placement.rule, own):
            if not isinstance(slot.codec, InBlocks) or slot.codec.entrywise:
                continue
            count = slot.codec.blocks(p.numel())
            for x in slot.packed:
                if len(x) < count or (whole and len(x) != count):
                    raise Unsuitable(f"{len(x)} blocks of a slot for {tuple(p.shape)}")


def small_shapes(dims: int) -> Sequence[tuple[int, ...]]:
    """The two shapes for recording tensors of a number of dimensions."""
    if dims >= len(record.SIZES):
        raise Unsuitable(f"a tensor of {dims} dimensions")
    return record.SIZES[dims]


def filled(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of small positive numbers, all different; of bools, or integers below 100."""
    count = math.prod(shape)
    values = torch.arange(1, 1 + count, dtype=torch.float64, device="cpu")
    values = values.mul_(0.7548776662).frac_().reshape(shape)
    if dtype is torch.bool:
        return values < 0.5
    return (values + 0.1 if dtype.is_floating_point or dtype.is_complex else 100 * values).to(dtype)


def slots_like(placement: Placement, tiny: Tensor, p: Tensor, slots: Slots) -> list[Tensor]:
    """Slots of a small tensor, like those of a parameter.

    Raises:
        Unsuitable: if their sizes do not follow from those of the parameter.
    """
    present = [x for x in slots if x is not None]
    made = _first_slots(placement, tiny, slots)
    found = [None if x is None else _real_shape(x, tiny, p) for x in made]
    real = [None if x is None else tuple(x.shape) for x in slots]
    if p.dim() == 0 and tiny.dim():  # a number as a vector of one element
        found = [None if x is None else () for x in found]
    if found == real or placement.rule.storage.codecs:
        pairs = [(x, y) for x, y in zip(made, slots, strict=True) if y is not None]
        if any(x is None for x, _ in pairs):
            raise Unsuitable("packed slots together with some that a vector does not have")
        return [filled(x.shape, y.dtype) for x, y in pairs]
    return [filled(_aligned(x, tiny, p), x.dtype) for x in present]


def _first_slots(placement: Placement, tiny: Tensor, slots: Slots) -> Slots:
    """The first slots of a small tensor; none if its rule does not make any for it."""
    rule = placement.rule
    if rule.init is None:
        return ()
    try:
        return init_slots_as(rule.stored_by(home=None), tiny, slots)
    except Exception:  # from a rule that supports only some shapes
        return ()


def _real_shape(x: Tensor, tiny: Tensor, p: Tensor) -> tuple[int, ...] | None:
    """The shape of a small tensor's slot for a large one."""
    try:
        axes = axes_of(x.shape, tiny.shape)
    except Unsuitable:
        return None
    shape = p.shape or (1,)
    return tuple([math.prod([shape[i] for i in own]) for own in axes])


def _aligned(x: Tensor, tiny: Tensor, p: Tensor) -> tuple[int, ...]:
    if x.shape == p.shape:
        return tuple(tiny.shape)  # also of a number, if it becomes a vector
    if x.dim() and x.dim() != p.dim():
        raise Unsuitable(f"a slot of shape {tuple(x.shape)} for {tuple(p.shape)}")
    found: list[int] = []
    for mine, whole, small in zip(x.shape, p.shape, tiny.shape, strict=False):
        if mine not in (1, whole):
            raise Unsuitable(f"a slot of shape {tuple(x.shape)} for {tuple(p.shape)}")
        found.append(small if mine == whole else 1)
    return tuple(found)
