"""The random numbers by which packed slots are rounded: even, and independent of each other. Slots
that are not rounded."""

import math
from typing import NamedTuple

import pytest
import torch
from cases import CASES
from torch import Tensor

import functional_optim as fo
from functional_optim.combinators.stored import _rate
from functional_optim.core.codecs import rounding_key, words

PLACES = torch.arange(1 << 19, dtype=torch.int32)
LAGS = (1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 256, 1024, 4096, 65536)
FAR = 9.0
"""Deviations of χ² that chance does not reach in some hundred tests; a tenth of a percent of
dependence is beyond it."""


def drawn(step: float, slot: int, seed: int = 0) -> Tensor:
    """The first four bits of each number."""
    return (words(PLACES, rounding_key(seed, step), slot) >> 28).long() + 8


def far(a: Tensor, b: Tensor) -> float:
    """How far pairs of numbers are from being even and independent, in standard deviations."""
    counts = torch.bincount(a * 16 + b, minlength=256).double()
    expected = len(a) / 256
    found = float(((counts - expected) ** 2 / expected).sum())
    return abs(found - 255) / math.sqrt(2 * 255)


@pytest.mark.parametrize("slot", range(4))
def test_numbers_are_even_and_do_not_tell_those_of_other_places(slot):
    for step in (1.0, 2.0, 1000.0):
        own = drawn(step, slot)
        assert max(far(own[:-lag], own[lag:]) for lag in LAGS) < FAR


@pytest.mark.parametrize("slot", range(4))
def test_numbers_do_not_tell_those_of_other_steps_seeds_and_slots(slot):
    for step in (1.0, 7.0):
        own = drawn(step, slot)
        others = [drawn(step + 1, slot), drawn(step, slot, seed=1)]
        others += [drawn(step, other) for other in range(8) if other != slot]
        assert max(far(own, other) for other in others) < FAR


@pytest.mark.parametrize("slot", range(4))
def test_each_bit_is_as_often_set_as_not(slot):
    own = words(PLACES, rounding_key(3, 5.0), slot)
    for bit in range(16, 32):
        share = float((own >> bit & 1).double().mean())
        assert abs(share - 0.5) < 4 * 0.5 / math.sqrt(len(PLACES))


class Counted(NamedTuple):
    seen: Tensor
    mean: Tensor


def test_slots_of_whole_numbers_are_not_packed():
    def init(p: Tensor) -> Counted:
        return Counted(torch.zeros(p.shape, dtype=torch.int32), torch.zeros_like(p))

    tx, p = fo.leafwise(init, lambda u, s, p: (u, s), name="counted"), torch.zeros(32, 32)
    packed = fo.stored(tx, {"*": "int8"}, min_size=0, where="*")
    assert packed.init({"w": p}).slots["seen"]["w"].dtype is torch.int32
    assert "mean.int8" in packed.init({"w": p}).slots
    for make in (fo.stored(tx, "int8"), tx):
        assert make.init(p).slots["seen"].dtype is torch.int32
    with pytest.raises(TypeError, match=r"'seen' of counted .* torch.int32"):
        fo.stored(tx, {"seen": "int4", "*": "int8"})
    with pytest.raises(TypeError, match=r"'seen' of counted .* torch.int32"):
        fo.slot_dtypes(tx, seen=torch.float16)


KL = {"momentum": 0.999, "shampoo_beta": 0.95}
TO_NEAREST = {  # by recipe: what bfloat16 keeps if it is rounded to nearest, and what it does not
    "adafactor": (fo.adafactor(), (), ("row_var", "col_var", "variance")),
    "adagrad": (fo.adagrad(), (), ("sum",)),
    "adamuon": (fo.adamuon(momentum=0.95), ("v_buffer",), ()),
    "adamuon, slow": (fo.adamuon(momentum=0.999), (), ("v_buffer",)),
    "cocob": (fo.cocob(), ("max_abs_grad",), ("sum_abs_grad", "reward")),
    "kl_shampoo": (fo.kl_shampoo(**KL), ("left_eigenvalues", "right_eigenvalues"), ()),
    "kl_shampoo, slow": (fo.kl_shampoo(shampoo_beta=0.999), (), ("left_eigenvalues",)),
    "madgrad": (fo.madgrad(), (), ("grad_sum_sq",)),
    "rprop": (fo.rprop(), ("step_size",), ()),
    "sm3": (fo.sm3(), (), ("accumulator_0", "accumulator_4")),
    "soap": (fo.soap(betas=(0.9, 0.99), shampoo_beta=0.999), ("exp_avg_sq",), ()),
}


@pytest.mark.parametrize("name", TO_NEAREST)
def test_moments_that_would_stop_changing_are_not_rounded_to_nearest(name):
    tx, kept, refused = TO_NEAREST[name]
    for slot in kept:
        fo.slot_dtypes(tx, **{slot: torch.bfloat16})
    for slot in refused:
        fo.stored(tx, {slot: "bfloat16"})
        with pytest.raises(ValueError, match=f"cannot keep {slot} in bfloat16 .* with a seed"):
            fo.stored(tx, {slot: "bfloat16"}, seed=None)
        with pytest.raises(ValueError, match=f"slot_dtypes cannot keep {slot} in bfloat16"):
            fo.slot_dtypes(tx, **{slot: torch.bfloat16})


def test_the_decay_rate_of_each_moment_is_known():
    for case in CASES:
        for rule in [x.rule for x in getattr(case.tx(), "placements", ())]:
            unknown = {x for x in rule.storage.nonnegative if not _rate(rule, x)}
            assert unknown <= {"step_size", "max_abs_grad"}, rule.name
