"""The memory of tensors: whether it is complete, and whether tensors overlap.

Only plain tensors are checked. The address of a subclass, of a tensor inside a transform of
torch.func, or of one on a device without memory does not identify its values.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim.core import modes
from functional_optim.kernels import private

PLAIN = {Tensor, torch.nn.Parameter}
"""Types of tensors that are fully described by their memory."""

WITHOUT_MEMORY = ("lazy", "meta", "xla")
"""Devices whose tensors have no memory: they represent operations, or shapes."""


def has_address(x: Tensor) -> bool:
    """Whether a tensor is just numbers at an address."""
    return (
        type(x) in PLAIN
        and x.layout is torch.strided
        and (x.is_cpu or x.device.type not in WITHOUT_MEMORY)
        and not (
            x.is_nested or torch.func.debug_unwrap(x, recurse=False) is not x or x._is_zerotensor()
        )
    )


def reach(x: Tensor) -> int:
    """The number of bytes between the first and the end of the last element of a tensor."""
    if x.is_contiguous():
        return x.nbytes
    if not x.numel():
        return 0
    steps = [(n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)]
    return (1 + sum(steps)) * x.element_size()


def whole(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor of which these are slices along the first dimension; None if there is none."""
    first = parts[0]
    size, like = first.numel(), (first.shape, first.dtype)
    if not size or not all(has_address(x) and x.is_contiguous() for x in parts):
        return None
    memory, start = first.untyped_storage().data_ptr(), first.storage_offset()
    for k, x in enumerate(parts):
        where = (x.untyped_storage().data_ptr(), x.storage_offset())
        if where != (memory, start + k * size) or (x.shape, x.dtype) != like:
            return None
    return first.detach().as_strided((len(parts), *first.shape), (size, *first.stride()))


def shortage(x: Tensor) -> str | None:
    """The error text for a tensor whose storage was resized to less than it needs."""
    if not has_address(x):
        return None
    has, size = x.untyped_storage().nbytes(), reach(x)
    needs = x.storage_offset() * x.element_size() + size
    if not size or has >= needs:
        return None
    return f"needs a storage of {needs} bytes, but its storage was resized to {has}"


def copied(x: Tensor) -> Tensor:
    """A copy; the tensor if it has no memory to copy, such as a freed shard."""
    return x if shortage(x) else x.clone()


def is_there(x: Tensor) -> bool:
    """Whether a strided tensor has memory. If its storage was freed, its address is its offset."""
    address = x.data_ptr()
    if not x.numel() or address >= LOWEST:
        return True
    return address > x.storage_offset() * x.element_size()


LOWEST = 1 << 40
"""An address below this may be an offset from 0; no storage is so large that one above it is."""


class Written:
    """Memory that a step writes, to check whether it overlaps a gradient.

    starts, stops: the first and last addresses of its pieces, each list sorted.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = sorted([(x.data_ptr(), reach(x)) for x in tensors if has_address(x)])
        self.starts = [start for start, size in found if size]
        self.stops = sorted([start + size for start, size in found if size])

    def meets(self, x: Tensor) -> bool:
        """Whether a tensor overlaps one of these."""
        if not has_address(x) or not x.numel():
            return False
        return self.holds(x.data_ptr(), reach(x))

    def holds(self, start: int, size: int) -> bool:
        """Whether that many bytes from an address on overlap one of these."""
        return bisect_right(self.stops, start) < bisect_left(self.starts, start + size)


def check_apart(tensors: Sequence[Tensor], name: Callable[[int], str]) -> None:
    """Raise ValueError if tensors that a step writes in place overlap.

    Interleaved ones, such as x[::2] and x[1::2], do not overlap.

    Args:
        tensors: all tensors that are written.
        name: from an index to the name for errors.
    """
    for i, x in enumerate(tensors):
        if x.layout is torch.strided and x._is_zerotensor():
            raise ValueError(
                f"{name(i)} is a tensor of zeros without memory, so no step in place can write to "
                "it; pass x.clone()."
            )
    known = [(x.data_ptr(), reach(x), i) for i, x in enumerate(tensors) if has_address(x)]
    spans = sorted([(start, start + size, i) for start, size, i in known if size])
    for _, _, i in spans:
        if _folds(tensors[i]):
            raise ValueError(
                f"{name(i)} has several elements in one place of memory, so a step in place would "
                "change them more than once; pass a copy, such as x.contiguous()."
            )
    near: list[int] = []
    end = 0
    for start, stop, i in spans:
        if start >= end:
            _check_cluster(near, tensors, name)
            near = []
        near.append(i)
        end = max(end, stop)
    _check_cluster(near, tensors, name)


def _check_cluster(
    members: list[int], tensors: Sequence[Tensor], name: Callable[[int], str]
) -> None:
    """`check_apart` for interleaved tensors: it marks their elements."""
    if len(members) < 2:
        return
    unit = math.gcd(*[tensors[i].element_size() for i in members])
    first = min(tensors[i].data_ptr() for i in members)
    offsets = [tensors[i].data_ptr() - first for i in members]
    unit = math.gcd(unit, *offsets)
    length = max(at + reach(tensors[i]) for at, i in zip(offsets, members, strict=True))
    marks = torch.zeros(length // unit, dtype=torch.bool, device="cpu")

    def mark(i: int, at: int) -> Tensor:
        x = tensors[i]
        wide = x.element_size() // unit
        strides = [stride * wide for stride in x.stride()]
        return marks.as_strided((*x.shape, wide), (*strides, 1), at // unit)

    placed = list(zip(members, offsets, strict=True))
    for k, (i, at) in enumerate(placed):
        mine = mark(i, at)
        if not mine.any():
            mine.fill_(True)
            continue
        marks.zero_()
        mine.fill_(True)
        j = next(j for j, there in placed[:k] if mark(j, there).any())
        a, b = sorted((i, j))
        raise ValueError(
            f"{name(a)} and {name(b)} share their memory, so a step in place would change it "
            "twice; "
            "pass tied weights once, and copies (x.clone()) of all others."
        )


def _folds(x: Tensor) -> bool:
    """Whether two indices of a tensor lead to the same element."""
    pairs = sorted([(stride, n) for stride, n in zip(x.stride(), x.shape, strict=True) if n > 1])
    end = 0
    for stride, n in pairs:
        if stride <= end:
            break
        end += stride * (n - 1)
    else:
        return False
    if pairs[0][0] == 0:
        return True
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for stride, n in pairs:
        places = places[..., None] + torch.arange(n, device="cpu") * stride
    return places.unique().numel() < x.numel()


def apart(new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """Values to write into old tensors one after another, with copies of those that overlap another
    of these tensors."""
    if torch.compiler.is_compiling():
        return [*new]
    places = {_place(x) for x in old if isinstance(x, Tensor)} - {0}
    pairs = zip(new, old, strict=True)
    return [x.clone() if x is not y and _place(x) in places else x for x, y in pairs]


def separate(slots: Sequence[Any], *given: Tensor) -> tuple[Any, ...]:
    """New slots, with copies of those that are expanded, or share the memory of a given gradient or
    parameter: later steps write to all of these in place."""
    lent = [x is not None and any(x is y for y in given) for x in slots]
    found = tuple([x.clone() if own else x for x, own in zip(slots, lent, strict=True)])
    if not found or modes.traced():
        return found
    places = set(map(_place, given)) - {0}
    return tuple([x.clone() if _is_borrowed(x, places) else x for x in found])


def _is_borrowed(x: Any, places: set[int]) -> bool:
    """Whether a tensor lies in one of these places, or is expanded."""
    place = _place(x)
    return place in places or (place > 0 and 0 in x.stride() and not x.is_contiguous())


def _place(x: Any) -> int:
    """Where the memory of a tensor is; 0 if that is unknown."""
    known = isinstance(x, Tensor) and has_address(x)
    return x.untyped_storage().data_ptr() if known else 0


def same_looks(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that checks whether tensors have the dtypes, sizes, strides and devices of these.

    torch.compile guards its inputs with it: it takes 10 ns per tensor.
    """
    made = private.TensorGuards
    if made is not None and all(x.layout is torch.strided and not x.is_nested for x in tensors):
        sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
        return made(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    known = list(map(_look, tensors))
    return lambda *now: list(map(_look, now)) == known


def _look(x: Tensor) -> tuple[Any, ...]:
    strides = x.stride() if x.layout is torch.strided else None
    return (x.layout, x.dtype, x.device, x.numel(), strides)


def laid_out_like(g: Tensor, p: Tensor) -> Tensor:
    """A gradient, copied into the memory layout of its parameter if it has another one."""
    return g if g.stride() == p.stride() else torch.empty_like(p, dtype=g.dtype).copy_(g)
