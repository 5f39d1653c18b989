"""The storage of tensors: the dtypes in which rules compute, slots, and codecs that pack slots."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from functional_optim.core import sharding
from functional_optim.core.numbers import StepNumber, plain
from functional_optim.core.views import MatrixView, seen_init

if TYPE_CHECKING:
    from functional_optim.core.rule import Rule

Slots = tuple[Any, ...]
"""The stored tensors of one tensor's slots for one rule; None for missing ones."""


def compute_dtype(p: Tensor) -> torch.dtype:
    """The dtype in which rules see a tensor: float64 for doubles, float32 for all others."""
    return torch.float64 if p.dtype in (torch.float64, torch.complex128) else torch.float32


def wide_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a slot that holds sums or copies of p: p's own, float32 for half types."""
    return p.dtype if p.is_complex() else compute_dtype(p)


def as_real(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as rules see it: complex numbers as pairs in a last dimension, and in `dtype`."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    return x if x.dtype is dtype else x.to(dtype)  # one operation less to trace


def as_update(u: Tensor, p: Tensor) -> Tensor:
    """An update in compute dtype, complex and sharded like the parameter."""
    if p.is_complex():
        u = torch.view_as_complex(u.contiguous())
    return u if type(p) is Tensor else sharding.placed_like(u, p)


def as_stored(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `as_real`, into the dtype of `like`."""
    return as_update(x, like).to(like.dtype)


class SlotSpec(NamedTuple):
    """A slot as its rule sees it: complex numbers are pairs in a last dimension.

    Example::

        >>> import torch, functional_optim as fo
        >>> from functional_optim.core.storage import SlotSpec
        >>> class Half:  # a codec, tried on one slot
        ...     fields = ("half",)
        ...     def encode(self, x, key=None):
        ...         return (x.to(torch.float16),)
        ...     def decode(self, stored, spec):
        ...         return stored[0].to(spec.dtype)
        >>> x = torch.tensor([1.0, 0.1])
        >>> decoded = Half().decode(Half().encode(x), SlotSpec(x.shape, x.dtype))
        >>> bool((decoded - x).abs().max() < 1e-4)
        True
    """

    shape: torch.Size
    dtype: torch.dtype


class Codec(Protocol):
    """A storage format of a slot, such as 8-bit codes and scales.

    A rule's `init` and `update` do not depend on it. Codecs are part of a kernel: two that are
    equal must behave identically.

    fields: names of the stored tensors; a state has them as `exp_avg.codes`, `exp_avg.scale`, and
    one without a name as `exp_avg`. Loading determines the format of a slot from these names.

    Example::

        >>> import torch, functional_optim as fo
        >>> from typing import NamedTuple
        >>> class Average(NamedTuple):
        ...     mean: torch.Tensor
        >>> class Half:
        ...     fields = ("half",)
        ...     def encode(self, x, key=None):
        ...         return (x.to(torch.float16),)
        ...     def decode(self, stored, spec):
        ...         return stored[0].to(spec.dtype)
        >>> def update(g, slots, p):
        ...     mean = torch.lerp(slots.mean, g, 0.1)
        ...     return mean, Average(mean)
        >>> def init(p):
        ...     return Average(torch.zeros_like(p))
        >>> half = fo.Storage(codecs={"mean": Half()})
        >>> average = fo.leafwise(init, update, storage=half, name="average")
        >>> fo.chain(average, fo.scale_by_lr(0.1)).init(torch.zeros(2)).slots
        {'mean.half': tensor([0., 0.], dtype=torch.float16)}
    """

    @property
    def fields(self) -> tuple[str, ...]: ...

    def encode(self, x: Tensor, key: Any = None) -> tuple[Tensor, ...]:
        """The stored tensors of a slot, in the order of `fields`. It may only use operations on
        tensors.

        x: float32 or float64, in the slot's shape. key: of the random numbers of this step, an
            integer below 2²⁴; None: round to nearest.
        """
        ...

    def decode(self, stored: tuple[Tensor, ...], spec: SlotSpec) -> Tensor:
        """The slot of these stored tensors. spec: its shape and dtype."""
        ...


UNPACKED: Mapping[str, Codec] = {}


class Storage(NamedTuple):
    """The slots of a rule of `leafwise`, and how they are stored.

    Args:
        codecs: for slots that are stored as other tensors, by name, their `Codec`. Not for sparse
            gradients.
        nonnegative: the names of slots without negative elements, such as second moments; `stored`
            uses codes without a sign for them. All others must be linear in the gradients, such as
            momentum: changes of the basis of matrices (`in_basis`) also rotate them.
        weights: the names of slots that are separate parameters, such as averages or copies.
            `stored` does not pack them.

    The other fields are set by `leafwise` (slots: the NamedTuple that `init` returns) and by
    combinators: `stored` (packs, seed), `offload` (home), `as_matrix` (view), `master_weights`
    (weight_codec).

    `leafwise` raises ValueError for an unknown slot, or one that would be packed and also
    nonnegative or weights.

    Example::

        >>> import torch, functional_optim as fo
        >>> from typing import NamedTuple
        >>> class Slots(NamedTuple):
        ...     sum: torch.Tensor  # of squares
        >>> def init(p):
        ...     return Slots(torch.zeros_like(p))
        >>> def update(g, slots, p):
        ...     total = slots.sum + g * g
        ...     return g / (total.sqrt() + 1e-10), Slots(total)
        >>> kept = fo.Storage(nonnegative=("sum",))
        >>> adagrad = fo.leafwise(init, update, storage=kept, name="adagrad")
        >>> small = fo.stored(adagrad, "int8", min_size=1, where=lambda path, p: True)
        >>> list(small.init(torch.ones(2)).slots)
        ['sum', 'sum.uint8', 'sum.scale']
    """

    codecs: Mapping[str, Codec] = UNPACKED
    nonnegative: Sequence[str] = ()
    weights: Sequence[str] = ()
    slots: type | None = None
    packs: Any = None
    """Which leaves are stored by codecs; None: all."""
    seed: int | None = None
    """Seed of the random numbers for stochastic rounding; None: codecs round to nearest."""
    home: Any = None
    """The memory for new slots; None: on the device of their parameter."""
    view: MatrixView | None = None
    """The matrices of a parameter for a batched rule; None: the parameter."""
    weight_codec: Codec | None = None
    """The storage of weights with more bits in parameters in bfloat16 and these slots, for all
    rules of the leaf; `update` of this rule is not called."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the slots, as the rule sees them."""
        return () if self.slots is None else self.slots._fields


def keys_of(field: str, codec: Codec | None, *, choice: bool) -> list[str]:
    """The names of the stored tensors of a slot. choice: some leaves store it unpacked."""
    if codec is None:
        return [field]
    names = [f"{field}.{x}" if x else field for x in codec.fields]
    return [field, *names] if choice and field not in names else names


def stored_keys(storage: Storage) -> tuple[str, ...]:
    """The names of the stored tensors of slots."""
    fields, codecs = storage.fields, storage.codecs
    if not codecs:
        return fields
    choice = storage.packs is not None
    return tuple([key for x in fields for key in keys_of(x, codecs.get(x), choice=choice)])


class StoredSlot(NamedTuple):
    """A stored slot: plain, or packed by a codec."""

    codec: Codec | None
    whole: Any
    packed: Slots


def stored_slots(rule: Rule, stored: Slots) -> list[StoredSlot]:
    """The stored tensors of a rule with codecs, slot by slot."""
    found: list[StoredSlot] = []
    at, storage = 0, rule.storage
    for field in storage.fields:
        codec = storage.codecs.get(field)
        names = keys_of(field, codec, choice=storage.packs is not None)
        mine = stored[at : at + len(names)]
        at += len(names)
        if codec is None:
            found.append(StoredSlot(None, mine[0], ()))
        elif len(names) > len(codec.fields):
            found.append(StoredSlot(None if mine[1] is None else codec, mine[0], mine[1:]))
        else:
            found.append(StoredSlot(codec if None not in mine else None, None, mine))
    return found


def missing_slots(rule: Rule, stored: Slots) -> tuple[bool, ...]:
    """Whether a tensor lacks each of the slots of a rule."""
    if not (stored and rule.storage.codecs):
        return tuple([x is None for x in stored])
    found = stored_slots(rule, stored)
    return tuple([own.codec is None and own.whole is None for own in found])


def made_slots(rule: Rule, p: Tensor, path: str = "") -> tuple[Any, ...]:
    """A new tensor's slots for one rule, from the rule's `init`."""
    init: Any = rule.init
    if init is None:
        return ()
    view = rule.storage.view
    if view is None:
        made = tuple(init(p, path) if rule.draws else init(p))
        return tuple(map(sharding.complete, made)) if sharding.is_sharded(p) else made
    view.check(rule.name, p.shape, path)
    return tuple(seen_init(view, init, p))


def at_home(rule: Rule, slots: Slots) -> Slots:
    """New slots in the memory of their rule."""
    home = rule.storage.home
    return slots if home is None else tuple([x if x is None else home.keep(x) for x in slots])


def beside(p: Tensor, slots: Slots) -> Slots:
    """Slots in the memory of their parameter."""
    return tuple([x if x is None else x.to(p.device) for x in slots])


def encoded_slots(
    rule: Rule, slots: Iterable[Any], packed: Sequence[bool], p: Tensor, key: Any = None
) -> Slots:
    """Slots packed by the codecs of their rule; those without one unchanged.

    packed: for each slot whether this tensor's is packed. key: see `Codec.encode`.
    """
    stored: list[Any] = []
    storage = rule.storage
    choice = storage.packs is not None
    for field, x, packs in zip(storage.fields, slots, packed, strict=True):
        codec = storage.codecs.get(field)
        names = keys_of(field, codec, choice=choice)
        if codec is None or not packs:
            whole = x if codec is None or choice else None
            stored += [whole, *[None] * (len(names) - 1)]
        else:
            room = [None] * (len(names) - len(codec.fields))
            stored += [*room, *codec.encode(as_real(x, compute_dtype(p)), key)]
    return tuple(stored)


WHOLE = frozenset((
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
))  # fmt: skip
"""The dtypes of slots that rules get unchanged."""

SMALL = 1 << 15
"""The largest number of elements of a tensor that is created for its shape; it covers
recordings."""


def opened(rule: Rule, stored: Slots, p: Tensor) -> Any:
    """The slots of a tensor as its rule sees them. p: the tensor."""
    storage = rule.storage
    record: Any = storage.slots
    if record is None:
        return ()
    dtype = compute_dtype(p)
    if storage.home is not None:
        stored = beside(p, stored)
    if not storage.codecs:
        return record(
            *[
                x if x is None or x.dtype is dtype or x.dtype in WHOLE else as_real(x, dtype)
                for x in stored
            ]
        )
    device = "cpu" if p.numel() <= SMALL else "meta"  # meta may import torch's compiler
    known = made_slots(rule, torch.empty(p.shape, dtype=p.dtype, device=device))
    found: list[Any] = []
    for like, (codec, whole, packed) in zip(known, stored_slots(rule, stored), strict=True):
        if codec is None:
            if whole is not None and whole.dtype not in WHOLE:
                whole = as_real(whole, dtype)
            found.append(whole)
        else:
            found.append(codec.decode(packed, SlotSpec(as_real(like, dtype).shape, dtype)))
    return record(*found)


def closed(rule: Rule, slots: Sequence[Any], stored: Slots, p: Tensor, key: Any = None) -> Slots:
    """New stored slots, the inverse of `opened`.

    stored: the old ones. key: see `Codec.encode`.

    Raises:
        ValueError: if the shape of a slot changed, e.g. by broadcasting the state of a smaller
            parameter.
    """
    # a scalar may be the tensor of a hyperparameter, which the user may fill later
    slots = [plain(x).clone() if isinstance(x, StepNumber) else x for x in slots]
    storage = rule.storage
    if storage.codecs:
        known = stored_slots(rule, stored)
        packed = [own.codec is not None for own in known]
        slots = [  # DTensor gathers one row: the blocks are those of a shard
            sharding.placed_like(x, own.packed[0]) if own.codec else x
            for x, own in zip(slots, known, strict=True)
        ]
        slots = encoded_slots(rule, slots, packed, p, key)
    new: list[Any] = []
    for x, old in zip(slots, stored, strict=True):
        if old is not None:
            x = _kept_as(x, old)
            if storage.home is not None:
                x = x.to(old.device)
            if x.shape != old.shape:
                raise ValueError(
                    f"the slot {rule.keys[len(new)]!r} of the state has shape {tuple(old.shape)}, "
                    f"but the step makes one of shape {tuple(x.shape)}; pass the state that this "
                    "transformation's own init returned for these parameters, and in a custom "
                    "rule, return slots of init's shapes from update."
                )
        new.append(None if old is None else x)
    return tuple(new)


def stands_beside(rule: Rule, k: int, slot: Any, p: Tensor, path: str) -> bool:
    """Whether the k-th stored slot of a rule has, or should have, the shape of a parameter.

    Raises:
        TypeError: for one of integers or bools if the rule's has floating-point numbers.
    """
    if rule.init is None or rule.runs.batched or rule.storage.codecs:
        return False
    if isinstance(slot, Tensor) and slot.is_nested:
        return True  # which raises an error
    fits = isinstance(slot, Tensor) and slot.shape == p.shape
    if torch.compiler.is_compiling():
        return fits
    if p.dim() < len(TINY):
        usual, whole = _made_as(rule.init, rule.storage.view, TINY[p.dim()], p.dtype)[k]
        if fits and usual and not whole and slot.dtype in WHOLE:
            raise TypeError(
                f"the slot {rule.keys[k]!r} of parameter {path!r} has dtype {slot.dtype}, but "
                f"{rule.name or 'the rule'} needs floating-point numbers; pass the state "
                "that this transformation's own init returned for these parameters."
            )
        if fits or not usual:
            return usual
    return _made_as(rule.init, rule.storage.view, tuple(p.shape), p.dtype)[k][0]


TINY = ((2,), (5,), (5, 3), (5, 3, 2), (5, 3, 2, 2), (5, 3, 2, 2, 2))
"""By numbers of dimensions, small shapes to test slots with: a slot may coincidentally have the
shape of one parameter."""


@functools.lru_cache(maxsize=4096)
def _made_as(
    init: Any, view: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[bool, bool], ...]:
    """For each slot of init: whether it has the parameter's shape, and whether it has integers."""
    device = "cpu" if shape in TINY else "meta"  # meta may import torch's compiler
    empty = torch.zeros(shape, dtype=dtype, device=device)
    try:
        made = init(empty) if view is None else seen_init(view, init, empty)
    except Exception:  # from an init that reads values, or supports other shapes only
        return ((False, True),) * 64
    return tuple(
        [(False, True) if x is None else (tuple(x.shape) == shape, x.dtype in WHOLE) for x in made]
    )


def _kept_as(x: Tensor, old: Tensor) -> Tensor:
    if type(old) is not Tensor or old.is_complex():
        return as_stored(x, old) if old.is_floating_point() or old.is_complex() else x.to(old.dtype)
    return x if x.dtype is old.dtype else x.to(old.dtype)


def present(slots: Sequence[Slots]) -> list[Tensor]:
    """The slots that a tensor has, in one list."""
    return [slot for own in slots for slot in own if slot is not None]
