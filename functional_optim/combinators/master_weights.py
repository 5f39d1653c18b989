"""`master_weights`: bfloat16 parameters with additional low bits in a slot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.checkpoint.lookup import get, keys
from functional_optim.combinators.as_matrix import COMPILED
from functional_optim.core import base, randomness, sharding
from functional_optim.core.base import GradientTransformation
from functional_optim.core.cells import WEIGHT_SLOTS, Bfloat16, Compensated, Split
from functional_optim.core.codecs import InBlocks
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise, made_of_rules
from functional_optim.core.rule import Placement, unchanged

Kind = Literal["split16", "split8", "kahan", "stochastic"]

BLOCK = 1 << 12
"""Number of elements that a kernel splits at once."""

PLACE = 127
"""The index of the parameter among the slots of a rule, for separate random numbers."""


class LowWordSlots(NamedTuple):
    weight_low16: Tensor | None
    """The 16 bits that bfloat16 lacks, like p, int16; None for parameters of other dtypes."""


class LowByteSlots(NamedTuple):
    weight_low8: Tensor | None
    """The first 8 bits that bfloat16 lacks, like p, int8; None for parameters of other dtypes."""


class CompensationSlots(NamedTuple):
    weight_compensation: Tensor | None
    """The weight less the parameter, like p, bfloat16; None for parameters of other dtypes."""


KINDS: dict[str, tuple[Any, Any, torch.dtype | None]] = {
    "split16": (Split(16), LowWordSlots, torch.int16),
    "split8": (Split(8), LowByteSlots, torch.int8),
    "kahan": (Compensated(), CompensationSlots, torch.bfloat16),
    "stochastic": (Bfloat16(), None, None),
}
"""For each kind the function that reassembles weights, its slots, and their dtype."""


@factory
def master_weights(
    tx: GradientTransformation, kind: Kind = "split16", *, seed: int = 0
) -> Leafwise:
    """Train parameters in bfloat16 as if they had more bits.

    bfloat16 has 8 bits: an update below 1/512 of a weight is rounded away, and training stops
    improving. With `master_weights`, the rules of tx see, and step, a weight w with more bits; the
    parameter is w rounded, and a slot stores the difference:

    * `"split16"`: the other 16 bits of a float32, 2 bytes. This is lossless: given the same
      gradients, the weights are bitwise those of float32 parameters.
    * `"split8"`: 8 of them, 1 byte; the last 8 are rounded stochastically.
    * `"kahan"`: w - p as another bfloat16, 2 bytes.
    * `"stochastic"`: nothing. The parameter is w rounded stochastically, so that small updates
      count in the mean.

    Random numbers are a function of seed, step and place in the parameter, for a DTensor in the
    shard of a process: other shards are rounded differently. Parameters of other dtypes are
    unaffected. Gradients are not cast; float32 gradients are accepted.

    Args:
        tx: a transformation that consists of one-tensor rules. It may be a complete optimizer: its
            averages of the parameters see w.
        kind: the storage format of the low bits.
        seed: of the random numbers, in [-2⁶³, 2⁶³).

    State: `weight_low16`, int16, `weight_low8`, int8, or `weight_compensation`, bfloat16, in the
    shape of the parameter, initially 0; `fo.full_weights` returns w. If you set a parameter by
    hand, w is within half a bfloat16 step of your value. If you cast a model to another dtype after
    the first step, the slot is stale: create a new optimizer.

    Raises:
        TypeError: if tx does not consist of one-tensor rules, or for a seed of the wrong type.
        ValueError: for an unknown kind; from `init`, for a parameter in float16, whose bits are not
            the first ones of a float32.

    Papers: Zamirai et al., "Revisiting BFloat16 Training", https://arxiv.org/abs/2010.06192 (kahan,
    stochastic); Warner, https://optimi.benjaminwarner.dev/kahan_summation/.

    Example::

        >>> import torch, functional_optim as fo
        >>> w = torch.ones(2, dtype=torch.bfloat16)
        >>> tx = fo.master_weights(fo.sgd(1e-3))
        >>> state = tx.init(w)
        >>> for _ in range(10):
        ...     u, state = tx.update(torch.ones(2), state, w)
        ...     w = fo.apply_updates(w, u)
        >>> w, fo.full_weights(w, state)
        (tensor([0.9883, 0.9883], dtype=torch.bfloat16), tensor([0.9900, 0.9900]))
    """
    tx = made_of_rules("master_weights", tx)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"master_weights has no kind {kind!r}; pass one of {', '.join(KINDS)}.")
    if any(x.rule.storage.weight_codec is not None for x in tx.placements):
        raise ValueError("master_weights got a recipe that has master weights; use it once.")
    seed = randomness.whole_seed("master_weights", seed)
    cells, record, dtype = KINDS[kind]

    def init(p: Tensor) -> Any:
        if p.dtype is torch.float16:
            raise ValueError(
                "master_weights got a parameter in float16, whose bits are not the first ones of a "
                "float32; use bfloat16."
            )
        kept = None
        if p.dtype is torch.bfloat16:
            kept = torch.zeros_like(p, dtype=dtype, requires_grad=False)
        return () if record is None else record(kept)

    first = leafwise(init if record else None, unchanged, name="master_weights")
    (placement,) = first.placements
    codec, own = InBlocks(cells, BLOCK, PLACE), seed if kind in ("split8", "stochastic") else None
    rule = placement.rule.stored_by(weight_codec=codec, seed=own)
    return Leafwise((placement._replace(rule=rule), *map(_with_wide_slots, tx.placements)))


def _with_wide_slots(placement: Placement) -> Placement:
    """The same rule with float32 slots for a bfloat16 parameter: they belong to its weight."""
    init = placement.rule.init
    if init is None or placement.rule.draws:  # whose slot is a key, made from the path
        return placement
    return placement.initialized(partial(_wide_init, init))


def _wide_init(init: Callable[[Tensor], Any], p: Tensor) -> Any:
    return init(p.to(torch.float32) if p.dtype is torch.bfloat16 else p)


def full_weights(params: Any, state: Any) -> Any:
    """The float32 weights of parameters under `master_weights`.

    Args:
        params: the parameters.
        state: of a transformation with `master_weights` in it, or the optimizer object of these
            parameters.

    Returns:
        A tree like params: float32 if the state has low bits of a parameter, else the parameter
        itself.

    Raises:
        TypeError: if state is not a state, or a leaf is not a tensor.
        ValueError: if the state belongs to other parameters.

    Example::

        >>> import torch, functional_optim as fo
        >>> w = torch.ones(1, dtype=torch.bfloat16)
        >>> tx = fo.master_weights(fo.sgd(1e-3))
        >>> u, state = tx.update(torch.ones(1), tx.init(w), w)
        >>> fo.full_weights(fo.apply_updates(w, u), state)
        tensor([0.9990])
    """

    def joined(path: str, p: Tensor, kept: Any) -> Tensor:
        if kept is None or p.dtype is not torch.bfloat16:
            return p
        if kept.shape != p.shape:
            raise ValueError(
                f"the parameter {path!r} has shape {tuple(p.shape)}, but the state keeps bits for "
                f"one of shape {tuple(kept.shape)}; pass the state of these parameters."
            )
        own, low = sharding.part(p), sharding.part(kept)  # DTensors do not shift bits
        found = cells_of(low).decode((own, low.to(own.device)))
        return sharding.from_part(found, p) if sharding.is_sharded(p) else found

    base.check_params(params)
    if isinstance(state, dict) and any(isinstance(x, Tensor) for x in state):
        raise TypeError(
            "full_weights got the state of an optimizer object by its parameters; pass the object "
            "itself: full_weights(params, optimizer)."
        )
    if isinstance(state, torch.optim.Optimizer):
        found = _in_object(state)
        return tree.map_with_path(lambda path, p: joined(path, p, found.get(p)), params)
    if not keys(state, "step"):
        raise TypeError(
            "full_weights needs the state of a transformation, or an optimizer object, but got a "
            f"{type(state).__name__}; pass full_weights(params, state)."
        )
    advice = "pass the state of these parameters, and put flatten inside master_weights"
    for name in WEIGHT_SLOTS:
        for key in keys(state, name):
            slot = get(state, key)
            tree.check_same(params, slot, "params", f"the slot {key!r} of the state", advice)
            params = tree.map_with_path(joined, params, slot)
    return params


def _in_object(optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
    """What an optimizer object keeps of each weight: with it, or in the tree of its group."""
    found: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        params = group["params"]
        names = [name.replace(COMPILED, "") for name in group.get("param_names") or ()]
        names += map(str, range(len(names), len(params)))  # for parameters appended later
        known = dict(zip(names, params, strict=False))
        for owner in params:
            for key, x in (optimizer.state.get(owner) or {}).items():
                for slot in WEIGHT_SLOTS:
                    _, there, name = f".{key}.".partition(f".{slot}.")
                    p = known.get(name[:-1]) if name else owner
                    if there and p is not None:
                        found.setdefault(p, x)  # snapshots come after it
    return found


def cells_of(kept: Tensor) -> Any:
    """How a slot keeps the low bits of a parameter."""
    (cells,) = [cells for cells, _, dtype in KINDS.values() if dtype is kept.dtype]
    return cells
