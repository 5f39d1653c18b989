"""`stored`: slots in 16, 8 or 4 bits for any rule; `slot_dtypes`: slots in another dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.combinators.hidden_matrices import is_hidden_matrix
from functional_optim.core import randomness
from functional_optim.core.base import GradientTransformation
from functional_optim.core.cells import CELLS, Float8
from functional_optim.core.codecs import InBlocks
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, made_of_rules
from functional_optim.core.paths import Mask, chosen, fits, masked_by
from functional_optim.core.rule import Placement, Rule

Kind = str | torch.dtype
"""The storage format of a slot: one of `KINDS`, or torch's dtype of that name."""

KINDS = ("int8", "int4", "bfloat16", "float8_e4m3fn", "float8_e5m2")

LARGEST_BLOCK = 1 << 12
"""Number of elements that kernels process at once."""

FORGETFUL = 0.995
"""Above this decay rate an average in bfloat16 with rounding to nearest never decreases: its change
in a step is less than half the distance to the next value."""

PROBE = (48, 80)
"""The shape of a probe tensor, to find slots of the parameter's shape."""


class Packs:
    """Selects the leaves to pack.

    min_size: minimum number of real elements. where: a mask; None: the matrices of hidden layers.
    """

    def __init__(self, min_size: int, where: Mask | None) -> None:
        self.min_size = min_size
        self.choices = () if where is None else (masked_by(where),)

    def __call__(self, path: str, p: Tensor) -> bool:
        return not self.left_out(path, p)

    def left_out(self, path: str, p: Tensor) -> str:
        """Why a leaf is not packed; empty if it is."""
        if p.is_complex():
            return "complex"
        if p.numel() < self.min_size:
            return f"under {self.min_size:,} elements"
        if self.choices:
            return "" if chosen(self.choices, path, p) else "not in where"
        return "" if is_hidden_matrix(path, p) else "no hidden matrix"


@factory
def stored(
    tx: GradientTransformation,
    storage: Kind | Mapping[str, Kind],
    *,
    block_size: int = 256,
    min_size: int = 4096,
    seed: int | None = 0,
    where: Mask | None = None,
) -> Leafwise:
    """Store slots in fewer bits; rules compute in float32 as before.

    A slot takes 1 byte per element in int8 and float8, half a byte in int4, 2 in bfloat16, and 4
    for each block of 8- or 4-bit codes. The kernel of the step unpacks and packs a few thousand
    elements at a time, so a whole slot is never in float32.

    * `"int8"`, `"int4"`: the first bits of 1 + |x| / s, where s is the scale of a block: 16 codes
      per octave (int4: 2). Slots that are never negative, such as second moments, have no sign, and
      positive values are never stored as 0: m / (√0 + ε) would be unbounded.
    * `"float8_e4m3fn"`, `"float8_e5m2"`: torch's dtypes, scaled by block.
    * `"bfloat16"`: the first 16 bits, without blocks, in the shape of the parameter.

    Rounding is stochastic; random numbers are a function of seed, step and place, for a DTensor in
    the shard of a process. So changes smaller than a code are preserved on average, and a run that
    is resumed by as many processes is bitwise equal.

    Args:
        tx: a transformation that consists of one-tensor rules.
        storage: the format for every slot of the parameter's shape, except weights (averages and
            copies of parameters). Or a dict from patterns of slot names to formats, for the
            matching slots; the first matching pattern counts: `{"exp_avg": "int8", "*_basis":
            "bfloat16"}`. Slots of integers or bools are never packed.
        block_size: number of elements that share a scale, a power of two from 16 to 4096. Default
            256, as in bitsandbytes (https://arxiv.org/abs/2110.02861).
        min_size: parameters with fewer elements keep full slots, ≥ 0. Default 4096, as in
            bitsandbytes.
        seed: of the random numbers, in [-2⁶³, 2⁶³). None: round to nearest.
        where: the parameters whose slots are packed, as in `masked`: patterns of paths, a
            predicate, or a tree. None: the matrices of hidden layers, recognized by their names: no
            embeddings, heads, norms or biases.

    State: the name of a packed slot contains its format: `exp_avg.int8` (`uint8` for a slot that is
    never negative), of shape (blocks, block_size), for int4 half as wide, and `exp_avg.scale`,
    float32 of shape (blocks,); or only `exp_avg.bfloat16`, in the shape of the slot. Leaves that
    are not packed have `exp_avg`. Values that are not finite become NaN. Each process packs its
    shard of a DTensor, and the shape has the grid of shards before the blocks; slots of other
    shapes are not packed. Checkpoints of all formats, and of full precision, load into each other.

    Raises:
        TypeError: if tx does not consist of one-tensor rules, if storage or seed has the wrong
            type, or for the name of a slot of integers or bools.
        ValueError: for an unknown format, a pattern that matches no slot, weights in 8 bits or
            fewer, or a size out of range. Also for second moments and averages of weights in
            bfloat16 with rounding to nearest and a decay rate above 0.995, and for sums of squares:
            they would stop changing.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.stored(fo.adamw(1e-3), "int8")
        >>> params = {"hidden": torch.zeros(64, 64), "bias": torch.zeros(64)}
        >>> state = tx.init(params)
        >>> state.slots["exp_avg.int8"]["hidden"].shape, state.slots["exp_avg"]["bias"].shape
        (torch.Size([16, 256]), torch.Size([64]))
    """
    tx = made_of_rules("stored", tx)
    numeric.check_count("stored", 0, min_size=min_size)
    numeric.check_count("stored", 1, block_size=block_size)
    if block_size & (block_size - 1) or not 16 <= block_size <= LARGEST_BLOCK:
        raise ValueError(
            f"stored needs a block_size that is a power of two from 16 to {LARGEST_BLOCK}, but got "
            f"{block_size}."
        )
    if seed is not None:
        seed = randomness.whole_seed("stored", seed)
    explicit = isinstance(storage, Mapping)
    given = storage if isinstance(storage, Mapping) else {"*": storage}
    patterns = [(x, _kind(kind)) for x, kind in given.items()]
    if explicit:
        _check_fit(tx, [pattern for pattern, _ in patterns])
    packs = Packs(min_size, where)
    placements: list[Placement] = []
    for i, (placement, names) in enumerate(zip(tx.placements, tx.layout.slots, strict=True)):
        # rules have different random numbers
        own = None if seed is None else randomness.signed(seed + i * randomness.GOLDEN)
        placements.append(_packed(placement, names, patterns, explicit, packs, block_size, own))
    return Leafwise(tuple(placements))


@factory
def slot_dtypes(tx: Leafwise, **dtypes: torch.dtype) -> Leafwise:
    """Store slots in other dtypes: half the memory, or more precision.

    This is the simple case of `stored`: for all leaves, without codes or random numbers. Rules
    compute as before, in float32 or wider; a slot is rounded to nearest when it is stored.

    Args:
        tx: a transformation that consists of one-tensor rules.
        dtypes: by slot name, for the real slots of real parameters. optax's `mu_dtype` of adam is
            `exp_avg` here.

    Raises:
        TypeError: if tx does not consist of one-tensor rules, or a dtype, or that of the slot, is
            not floating-point.
        ValueError: for a slot that tx does not have, weights in 8 bits, second moments and averages
            of weights in bfloat16 with a decay rate above 0.995, and sums of squares in bfloat16,
            which would stop changing; use `stored` for these.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.slot_dtypes(fo.adamw(1e-3), exp_avg=torch.bfloat16)
        >>> tx.init(torch.ones(2)).slots["exp_avg"].dtype
        torch.bfloat16
    """
    tx = made_of_rules("slot_dtypes", tx)
    for name, dtype in dtypes.items():
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(
                f"slot_dtypes needs a floating-point dtype for {name}, but got {dtype!r}."
            )
    unknown = sorted(dtypes.keys() - set(tx.layout.keys))
    if unknown:
        raise ValueError(
            f"the transformation has no slot called {', '.join(unknown)}; it has "
            f"{', '.join(tx.layout.keys) or 'none'}."
        )
    pairs = zip(tx.placements, tx.layout.slots, strict=True)
    return Leafwise(tuple([_in_dtypes(placement, names, dtypes) for placement, names in pairs]))


def _kind(kind: Any) -> str:
    name = str(kind).removeprefix("torch.") if isinstance(kind, torch.dtype) else kind
    if not isinstance(name, str):
        raise TypeError(
            f"stored needs a storage format, but got {kind!r}; pass one of {', '.join(KINDS)}."
        )
    if name not in KINDS:
        raise ValueError(f"stored does not support {name!r}; choose one of {', '.join(KINDS)}.")
    return name


def _check_fit(tx: Leafwise, patterns: list[str]) -> None:
    pairs = zip(tx.placements, tx.layout.slots, strict=True)
    keys = dict.fromkeys(
        [key for x, own in pairs if x.rule.storage.weight_codec is None for key in own]
    )
    for pattern in patterns:
        if not any(fits(pattern, key) for key in keys):
            raise ValueError(
                f"stored got the pattern {pattern!r}, which matches no slot; the transformation "
                f"has {', '.join(keys) or 'none'}."
            )


def _packed(
    placement: Placement,
    names: tuple[str, ...],
    patterns: list[tuple[str, str]],
    explicit: bool,
    packs: Packs,
    block: int,
    seed: int | None,
) -> Placement:
    """A rule whose slots are packed if a pattern matches them."""
    rule = placement.rule
    storage = rule.storage
    if storage.packs is not None and any(fits(x, name) for x, _ in patterns for name in names):
        raise ValueError(
            f"stored got a recipe in which stored has already packed {placement.name}; use one, "
            'with a dict of patterns for several kinds, e.g. {"exp_avg": "int8", "*": "bfloat16"}.'
        )
    if not storage.fields or storage.codecs or storage.weight_codec is not None:
        return placement
    assert rule.init is not None
    made: Any = rule.init(torch.zeros(PROBE, device="cpu"))  # "meta" takes longer, imports sympy
    whole = [x is not None and not (x.is_floating_point() or x.is_complex()) for x in made]
    like = [x is not None and x.shape == PROBE and x.is_floating_point() for x in made]
    codecs: dict[str, Any] = {}
    for j, (field, name) in enumerate(zip(storage.fields, names, strict=True)):
        kind = next((kind for pattern, kind in patterns if fits(pattern, name)), None)
        if kind is None or (not explicit and (not like[j] or field in storage.weights)):
            continue
        if whole[j]:
            if any(pattern == name for pattern, _ in patterns):
                raise _not_real("stored", placement, name, made[j])
            continue
        _check_slot("stored", rule, field, name, kind, seed)
        codecs[field] = InBlocks(_cells(kind, field not in storage.nonnegative), block, j)
    if not codecs:
        return placement
    return placement._replace(rule=rule.stored_by(codecs=codecs, packs=packs, seed=seed))


def _cells(kind: str, signed: bool) -> Any:
    if kind.startswith("float8"):
        return Float8(getattr(torch, kind), signed)
    return CELLS[kind if signed or kind == "bfloat16" else f"u{kind}"]


def _in_dtypes(
    placement: Placement, names: tuple[str, ...], dtypes: dict[str, torch.dtype]
) -> Placement:
    """A rule whose slots are created, and stay, in other dtypes."""
    own = [dtypes.get(name) for name in names]
    if not any(own):
        return placement
    rule = placement.rule
    if rule.storage.codecs:
        raise TypeError(
            f"slot_dtypes cannot change slots of {placement.name}, which a codec stores; the "
            "codec chooses their dtypes."
        )
    for field, name, dtype in zip(rule.keys, names, own, strict=True):
        if dtype is not None:
            kind = str(dtype).removeprefix("torch.")
            _check_slot("slot_dtypes", rule, field, name, kind, None)
    first: Any = rule.init
    for name, dtype, x in zip(names, own, first(torch.zeros(PROBE, device="cpu")), strict=True):
        if dtype is not None and x is not None and not (x.is_floating_point() or x.is_complex()):
            raise _not_real("slot_dtypes", placement, name, x)

    def init(p: Tensor) -> Any:
        made = first(p)
        if p.is_complex():
            return made
        pairs = zip(made, own, strict=True)
        return type(made)(*[x.to(kept) if kept and x is not None else x for x, kept in pairs])

    return placement.initialized(init)


def _not_real(who: str, placement: Placement, name: str, x: Tensor) -> TypeError:
    return TypeError(
        f"{who} cannot keep the slot {name!r} of {placement.name or 'a rule'} in fewer bits, since "
        f"it has the dtype {x.dtype}; name slots of floating-point numbers only."
    )


def _check_slot(who: str, rule: Rule, field: str, name: str, kind: str, seed: int | None) -> None:
    """Raise ValueError for a slot that would lose too much precision."""
    if field in rule.storage.weights and kind.startswith(("int", "float8")):
        raise ValueError(
            f"{who} cannot keep {name} in {kind}: it is an average or a copy of the parameters, "
            "for which 8 bits are too few; leave it out, or store it in bfloat16."
        )
    rate = _rate(rule, field)
    if seed is not None or kind != "bfloat16" or rate <= FORGETFUL:
        return
    still = "stand still" if field in rule.storage.weights else "never fall"
    why = f"with a decay rate of {rate:g} it would {still}"
    instead = f"or a rate of at most {FORGETFUL}"
    if rate == math.inf:
        why = "it is a sum, or an average whose decay rate approaches 1, which would stop changing"
        instead = "or leave it out"
    raise ValueError(
        f"{who} cannot keep {name} in bfloat16 with rounding to nearest: {why}. Use stored with a "
        f"seed, to round stochastically, {instead}."
    )


MOMENTS = ("betas", "alpha", "beta", "beta2", "rho")
"""Names of hyperparameters that are the decay rates of moments."""

RATES = {"*_eigenvalues": ("shampoo_beta",), "v_buffer": ("momentum",)}
"""Those of other moments, by patterns of slot names."""

SUMS = ("sum", "sum_*", "*_sum_*", "reward", "accumulator_*", "row_var", "col_var", "variance")
"""Patterns of moments that are sums, or averages whose decay rates approach 1."""


def _rate(rule: Rule, field: str) -> float:
    """The largest known decay rate of a slot; infinite for a sum, 0 if no rate is known."""
    moment = field in rule.storage.nonnegative
    names = ("decay",) if field in rule.storage.weights else ()
    if moment:
        names = next((own for pattern, own in RATES.items() if fits(pattern, field)), MOMENTS)
    found = [x for key, value in rule.hyper if key in names for x in _rates(value)]
    if moment and not found and any(fits(pattern, field) for pattern in SUMS):
        return math.inf
    return max(found, default=0.0)


def _rates(value: Any) -> list[float]:
    """The decay rates that a hyperparameter holds, if they are numbers."""
    each = value if isinstance(value, tuple) else (value,)
    return [x for x in each if numeric.is_static(x) and isinstance(x, float) and x <= 1]
