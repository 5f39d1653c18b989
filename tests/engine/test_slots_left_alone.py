"""Slots where a rule does not act, and codecs in one graph with the recipe."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_same
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters


class Slots(NamedTuple):
    sum: Tensor
    large: Tensor


class Halves:
    """A codec that loses something each time that a slot is packed again."""

    fields = ("half",)

    def encode(self, x: Tensor, key: Any = None) -> tuple[Tensor, ...]:
        return (0.5 * x,)

    def decode(self, stored: tuple[Tensor, ...], spec: Any) -> Tensor:
        return stored[0]


def halved() -> Any:
    def init(p: Tensor) -> Slots:
        return Slots(torch.ones_like(p), torch.full_like(p, 2**30 + 1, dtype=torch.int64))

    def update(u: Tensor, slots: Slots, p: Tensor) -> Any:
        return u, Slots(slots.sum + u, slots.large)

    return fo.leafwise(init, update, storage=fo.Storage(codecs={"sum": Halves()}))


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
        assert_same(found["sum.half"], torch.full((2,), 0.5))
        assert_same(found["large"], torch.full((2,), 2**30 + 1))


def test_a_rule_with_a_codec_is_built_and_run_in_one_graph(fresh_dynamo):
    p = torch.ones(2)

    def one_step(g: Tensor) -> Any:
        tx = halved()
        return tx.update(g, tx.init(p), p)[1].slots["sum.half"]

    traced = torch.compile(one_step, fullgraph=True, backend="eager")
    assert_same(traced(p), torch.full((2,), 0.75))


def test_slots_with_other_rows_take_no_sparse_gradients():
    class Columns(NamedTuple):
        columns: Tensor

    def update(u: Tensor, slots: Columns, p: Tensor) -> Any:
        return u, Columns(slots.columns + u.sum(0))

    tx = fo.leafwise(lambda p: Columns(p.new_zeros(p.shape[1:])), update)
    p = torch.nn.Parameter(torch.zeros(2, 3))
    p.grad = torch.eye(2, 3).to_sparse(1)
    opt = adapters.Optimizer([p], lambda: tx, compile=False)
    for step in (opt.step, lambda: tx.update(p.grad, tx.init(p), p)):
        with pytest.raises(RuntimeError, match=r"not take sparse gradients, .* shape \(3,\)"):
            step()


GATED = {
    "accumulate(stored(came))": lambda: fo.accumulate(fo.stored(fo.came(), "int8"), 2),
    "stored(accumulate(muon))": lambda: fo.stored(fo.accumulate(fo.muon(), 2), "int8"),
    "stored(accumulate(adam_mini))": lambda: fo.stored(fo.accumulate(fo.adam_mini(), 2), "int8"),
}


@pytest.mark.parametrize("name", GATED)
def test_a_gate_around_packed_slots_of_rules_over_whole_matrices(name):
    tx = GATED[name]()
    start = {"w": torch.randn(64, 70)}
    found = []
    for step in (fo.compile(tx, donate=False), None):
        params, state = start, tx.init(start)
        torch.manual_seed(0)
        for _ in range(3):
            grads = {"w": torch.randn(64, 70)}
            if step is not None:
                params, state = step(grads, state, params)
            else:
                updates, state = tx.update(grads, state, params)
                params = fo.apply_updates(params, updates)
        found.append(params["w"] - start["w"])
    assert found[1].abs().max() > 0
    torch.testing.assert_close(found[0], found[1], rtol=2e-3, atol=2e-3 * found[1].abs().max())
