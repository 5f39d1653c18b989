"""Rules without flags: every way of running one steps it as a naive loop does."""

from __future__ import annotations

import warnings

import pytest
import torch
import undeclared
from undeclared import MODELS, ROWS

import functional_optim as fo


@pytest.mark.parametrize("name", ROWS)
def test_a_rule_without_flags_is_the_same_in_every_way(name):
    wrong = [*undeclared.outcomes(ROWS[name])]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [x.name for x in ROWS.values() if x.strict])
def test_halves_and_whole_numbers_are_computed_in_kernels(name):
    for shape in ((7,), (6, 8)):
        tx, p = ROWS[name].build(), torch.randn(shape)
        fo.compile(tx, strict=True)(torch.randn(shape), tx.init(p), p)


def test_the_naive_loop_sees_a_rule_whose_tensors_are_joined():
    """The comparison itself: tensors that are joined are far from those of the naive loop."""
    row, model = ROWS["unit_norm"], MODELS["together"]
    params = model.params()
    for grads in model.grads():
        norm = torch.cat([g.flatten() for g in grads.values()]).norm()
        params = {name: p + grads[name] / norm for name, p in params.items()}
    apart, _ = undeclared.worst((params, {}), undeclared.naive(row, model))
    assert apart > 0.1


def test_update_computes_with_numbers_as_precise_as_those_of_scalars():
    def near_one(t):
        return (1 - 1e-6 / t,)

    tx = fo.leafwise(None, lambda u, s, p, b: (1e6 * (1 - b) * u, s), near_one, name="rest")
    params = {"w": torch.zeros(4)}
    updates, _ = tx.update({"w": torch.ones(4)}, tx.init(params), params)
    assert updates["w"].tolist() == pytest.approx([1.0] * 4, rel=1e-6)


def test_large_ints_among_the_numbers_of_a_rule_are_exact():
    n = 2**62 + 12345
    tx = fo.leafwise(None, lambda u, s, p, n: (u * ((n ^ 5) & 255), s), lambda t: (n,), name="hash")
    p = torch.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p, _ = fo.compile(tx)(torch.ones(3), tx.init(p), p)
    assert p.tolist() == [(n ^ 5) & 255] * 3
