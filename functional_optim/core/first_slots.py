"""The initial slots of a tensor, packed if its rule stores them packed.

Packed slots often start as one number, zero. Such a slot is never stored in float32: while a rule
creates the slots of a large tensor, tensors filled with one number are expanded from the memory of
one element, and codecs encode a block of it. Other slots are encoded one after another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from functional_optim.core import modes, sharding
from functional_optim.core.codecs import InBlocks, is_one_number
from functional_optim.core.memory import has_address
from functional_optim.core.storage import (
    Slots,
    as_real,
    at_home,
    compute_dtype,
    encoded_slots,
    made_slots,
    stored_slots,
)
from functional_optim.kernels import ops
from functional_optim.kernels.private import DispatchMode, ModeBase

if TYPE_CHECKING:
    from functional_optim.core.rule import Rule

LARGE = 1 << 16
"""Number of elements from which a slot of one number is packed without allocating it."""


class _Spoiled(Exception):
    """Raised if a rule writes into a tensor that it has filled with one number."""


class _Expanding(ModeBase):
    """While it is active, large tensors of one number are expanded from the memory of one
    element."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Tensor, Any]] = []
        """The expanded tensors, each with a function that allocates it."""

    def see(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """An operation, unchanged unless it fills a large tensor.

        Raises:
            _Spoiled: if it writes into an expanded tensor.
        """
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self.check_apart([*args, *kwargs.values()])
        one = _one_of(func, args, kwargs)
        if one is None:
            return func(*args, **kwargs)
        small, shape = one
        x = small.expand(shape)
        self.made.append((x, lambda: func(*args, **kwargs)))
        return x

    def check_apart(self, given: Sequence[Any]) -> None:
        """Raise _Spoiled if an argument shares the memory of an expanded tensor."""
        mine = {x.untyped_storage().data_ptr() for x, _ in self.made}
        flat = [y for x in given for y in (x if isinstance(x, (list, tuple)) else (x,))]
        if any(x.untyped_storage().data_ptr() in mine for x in flat if isinstance(x, Tensor)):
            raise _Spoiled

    def whole(self, x: Tensor) -> Tensor:
        """A slot with separate memory.

        Raises:
            _Spoiled: for one that shares it, and was not made by filling.
        """
        if not is_one_number(x):
            return x
        for own, make in self.made:
            if own is x:
                return make()
        raise _Spoiled


# after the class statement, see `DispatchMode`
_Expanding.__torch_dispatch__ = _Expanding.see


def _one_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One element of a large tensor that an operation fills with one number, and the tensor's
    shape; None for all other operations."""
    op = str(func).removeprefix("aten.")
    if op not in ops.FILL or not args or kwargs.get("layout") not in (None, torch.strided):
        return None
    like = args[0] if isinstance(args[0], Tensor) else None
    sized = like is None or op.startswith("new_")
    shape = args[0 if like is None else 1] if sized else args[0].shape
    if not isinstance(shape, (list, tuple)) and sized:
        return None
    if math.prod(shape) < LARGE or (like is not None and like.layout is not torch.strided):
        return None
    small = [] if like is None else [like.new_empty(())]
    rest = args[len(small) + sized :]
    named = {key: x for key, x in kwargs.items() if key != "memory_format"}
    return func(*small, *[[]] * sized, *rest, **named), tuple(shape)


def init_slots(rule: Rule, p: Tensor, path: str = "") -> Slots:
    """A new tensor's slots for one rule, as they are stored. path: of the tensor."""
    if not rule.storage.codecs:
        return at_home(rule, made_slots(rule, p, path))
    return at_home(rule, _first_packed(rule, p, p, path))


def _first_packed(rule: Rule, given: Tensor, p: Tensor, path: str) -> Slots:
    """New slots, packed if the rule packs them; of a DTensor only those of its shape.

    Only the rule knows how others are sharded. given: the tensor that its `init` gets.
    """
    packs = rule.storage.packs is None or rule.storage.packs(path, p)
    if not sharding.is_sharded(p):
        return _as_packed(rule, given, [packs] * len(rule.storage.fields), path)
    made = [*made_slots(rule, given, path)]
    packed = [packs and x is not None and x.shape == p.shape for x in made]
    if given is not p:
        made = [
            x if x is None or x.shape != p.shape else sharding.from_part(_part_like(x, p), p)
            for x in made
        ]
    return encoded_slots(rule, _handed_over(made), packed, p)


def _as_packed(rule: Rule, p: Tensor, packed: Sequence[bool], path: str = "") -> Slots:
    """Initial slots of a plain tensor, those packed that are there and for which `packed` says
    so."""
    if any(packed) and _may_expand(p):
        try:
            return _packed_from_one(rule, p, packed, path)
        except _Spoiled:
            pass
    made = [*made_slots(rule, p, path)]
    packed = [packs and x is not None for x, packs in zip(made, packed, strict=True)]
    return encoded_slots(rule, _handed_over(made), packed, p)


def _part_like(x: Tensor, p: Tensor) -> Tensor:
    """A tensor without data, of the shape of the local shard of a DTensor."""
    return torch.empty(sharding.part(p).shape, dtype=x.dtype, device="meta")


def _may_expand(p: Tensor) -> bool:
    """Whether operations on a plain tensor can distinguish slots of one number from others."""
    large = p.numel() >= LARGE and DispatchMode is not None
    return (
        large and has_address(p) and p.is_contiguous() and not (p.requires_grad or modes.traced())
    )


def _packed_from_one(rule: Rule, p: Tensor, packed: Sequence[bool], path: str) -> Slots:
    """Initial slots, packed if requested; those of one number are not allocated.

    Raises:
        _Spoiled: if the rule does not support this.
    """
    expanding = _Expanding()
    with expanding:
        try:
            made = [*made_slots(rule, p, path)]
        except Exception as error:  # from an expanded tensor; otherwise it is raised again
            raise _Spoiled from error
    codecs = [rule.storage.codecs.get(field) for field in rule.storage.fields]
    for i, (x, codec, packs) in enumerate(zip(made, codecs, packed, strict=True)):
        if x is not None and not (packs and isinstance(codec, InBlocks)):
            made[i] = expanding.whole(x)
        elif x is not None and is_one_number(x) and not x.is_complex():
            made[i] = as_real(x[(0,) * x.dim()], compute_dtype(p)).expand(x.shape)
    packed = [packs and x is not None for x, packs in zip(made, packed, strict=True)]
    return encoded_slots(rule, _handed_over(made), packed, p)


def _handed_over(made: list[Any]) -> Iterator[Any]:
    """Pop the items of a list one by one, so that a slot is freed once it is packed."""
    for i, x in enumerate(made):
        made[i] = None
        yield x
        del x


def init_slots_as(rule: Rule, p: Tensor, stored: Slots) -> Slots:
    """A tensor's initial slots, packed like its stored ones."""
    if not rule.storage.codecs:
        return made_slots(rule, p)
    return _as_packed(rule, p, [own.codec is not None for own in stored_slots(rule, stored)])


def slots_like(rule: Rule, p: Tensor, path: str = "") -> Slots:
    """Tensors without data, with the shapes and dtypes of the stored slots of a tensor like p."""
    empty = torch.empty(p.shape, dtype=p.dtype, device="meta")
    if not rule.storage.codecs or not sharding.is_sharded(p):
        return init_slots(rule, empty, path)
    return _first_packed(rule, empty, p, path)


def explain(rules: Sequence[Rule], p: Tensor, slots: Sequence[Slots]) -> None:
    """Raise ValueError, after a step has failed, if a slot has another shape than that from init.

    A check before each step would be slow for slots with other shapes than the parameter.
    """
    for rule, own in zip(rules, slots, strict=False):
        try:
            likes = slots_like(rule, p)
        except Exception:  # of an init that reads values
            continue
        for name, x, like in zip(rule.keys, own, likes, strict=False):
            if isinstance(x, Tensor) and like is not None and x.shape != like.shape:
                raise ValueError(
                    f"the slot {name!r} of the state has shape {tuple(x.shape)}, but {rule.name} "
                    f"needs {tuple(like.shape)} for a parameter of shape {tuple(p.shape)}; pass "
                    "the state that this transformation's own init returned for these parameters."
                )
