"""Rules whose slots are not like their parameter, that choose among several updates, or measure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_same
from odd_rules import Bytes, Packed, packed, refreshing
from three_ways import random_tree
from torch import Tensor
from ways import by_eager_object, by_update

import functional_optim as fo
from functional_optim import adapters

# ---------------------------------------------------------------- slots


def test_what_slots_cannot_be_is_refused():
    def update(u: Tensor, slots: Any, p: Tensor) -> Any:
        return u, slots

    with pytest.raises(ValueError, match="codec for exp_av, but its slots are exp_avg"):
        fo.leafwise(lambda p: Packed(p, p), update, storage=fo.Storage(codecs={"exp_av": Bytes()}))
    with pytest.raises(TypeError, match="which a codec stores"):
        fo.slot_dtypes(packed(), **{"exp_avg.scale": torch.float64})


class Halves:
    """A codec that loses something each time that a slot is packed again."""

    fields = ("half",)

    def encode(self, x: Tensor, key: Any = None) -> tuple[Tensor, ...]:
        return (0.5 * x,)

    def decode(self, stored: tuple[Tensor, ...], spec: Any) -> Tensor:
        return stored[0]


def halved() -> Any:
    def init(p: Tensor) -> Packed:
        return Packed(torch.ones_like(p), torch.full_like(p, 2**30 + 1, dtype=torch.int64))

    def update(u: Tensor, slots: Packed, p: Tensor) -> Any:
        return u, Packed(slots.exp_avg + u, slots.count)

    return fo.leafwise(init, update, storage=fo.Storage(codecs={"exp_avg": Halves()}))


@pytest.mark.parametrize("compile", ["strict", False])
def test_slots_behind_a_shut_gate_stay_as_they_are_stored(compile):
    tx = fo.accumulate(halved(), every=3)
    p, w = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    opt = adapters.Optimizer([p], lambda: tx, compile=compile)
    step, state = fo.compile(tx), tx.init(w)
    for _ in range(2):
        p.grad = torch.ones(2)
        opt.step()
        w, state = step(torch.ones(2), state, w)
    for found in (opt.state[p], state.slots):
        assert_same(found["exp_avg.half"], torch.full((2,), 0.5))
        assert_same(found["count"], torch.full((2,), 2**30 + 1))


def test_a_rule_with_a_codec_is_built_and_run_in_one_graph(fresh_dynamo):
    p = torch.ones(2)

    def one_step(g: Tensor) -> Any:
        tx = halved()
        return tx.update(g, tx.init(p), p)[1].slots["exp_avg.half"]

    traced = torch.compile(one_step, fullgraph=True, backend="eager")
    assert_same(traced(p), torch.full((2,), 0.75))


# ---------------------------------------------------------------- variants


@pytest.mark.parametrize("way", [by_update, by_eager_object])
def test_the_chosen_variant_is_run_and_no_other(way, monkeypatch):
    """Where the step is known; a traced step stands behind a condition."""
    calls, real = [], torch.linalg.qr
    monkeypatch.setattr(torch.linalg, "qr", lambda x: calls.append(len(x)) or real(x))
    shapes = {"a": (3, 4), "b": (5, 2)}
    params, *grads = (random_tree(k, torch.float32, shapes) for k in range(8))
    _, slots = way(refreshing(), params, grads)
    # other calls are of small tensors, on which rules are recorded
    assert calls.count(3) == calls.count(5) == slots["seen"]["a"] == 3


def test_wrong_variants_are_refused():
    def update(u: Tensor, slots: Any, p: Tensor) -> Any:
        return u, slots

    with pytest.raises(ValueError, match="2 variants of update and no choose"):
        fo.leafwise(None, (update, update))
    with pytest.raises(ValueError, match="1 variants of update and choose"):
        fo.leafwise(None, update, runs=fo.Runs(choose=lambda t: 0))
    w = torch.ones(2)
    for wrong in (2, -1, -2, 0.5, float("nan"), None, torch.tensor(-1)):
        tx = fo.leafwise(None, (update, update), runs=fo.Runs(choose=lambda t, wrong=wrong: wrong))
        for step in (tx.update, fo.compile(tx)):
            with pytest.raises(ValueError, match="; return a whole number from 0 to 1"):
                step(w, tx.init(w), w)


def test_a_rule_that_returns_no_tuple_and_renamed_arguments_are_refused():
    w = torch.ones(3)
    tx = fo.leafwise(None, lambda u, slots, p, a: (a * u, slots), lambda t: 0.1, name="half")
    with pytest.raises(TypeError, match="scalars of the rule 'half' must return a tuple"):
        tx.update(w, tx.init(w), w)
    with pytest.raises(TypeError, match="argument flat for the rule ''; leave it out"):
        fo.leafwise(None, lambda u, slots, p: (u, slots), flat=False)
    with pytest.raises(TypeError, match=r"argument elementwis .*check the spelling"):
        fo.leafwise(None, lambda u, slots, p: (u, slots), elementwis=False)


# ---------------------------------------------------------------- measurements


def rescaled(u: Tensor, slots: Any, p: Tensor, x: Any) -> Any:
    return -u / x, slots


def test_a_measurement_that_is_no_single_number_is_refused():
    """A kernel would write all of its elements to where there is memory for one."""
    p = torch.ones(3)
    parameter = torch.nn.Parameter(p.clone())
    parameter.grad = p
    for wrong in (lambda u, slots, p: (u * u,), lambda u, slots, p: (u * u).sum()):
        tx = fo.leafwise(None, rescaled, reduce=wrong)
        opt = adapters.Optimizer([parameter], lambda tx=tx: tx)
        trees = (p, tx.init(p), p)
        for step, *given in ((tx.update, *trees), (fo.compile(tx), *trees), (opt.step,)):
            with pytest.raises(TypeError, match=r"reduce of a rule returned .* of 0-dim tensors"):
                step(*given)
    assert_same(parameter.detach(), p)
