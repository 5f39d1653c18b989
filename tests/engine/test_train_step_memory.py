"""Compiled train steps: memory that is shared, and scales of the loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import functional_optim as fo

# ---------------------------------------------------------------- shared memory, loss scales


def made(loss: Any, tx: Any, **options: Any) -> Any:
    return fo.compile_train_step(loss, tx, compile=False, **options)


def test_what_shares_memory_with_a_parameter_keeps_its_value():
    def loss(p: Any) -> Any:
        return p["a"], {"whole": p["b"], "part": p["b"][1:], "no": p["b"].detach()}

    tx, p = fo.sgd(0.5), {"a": torch.tensor(1.0), "b": torch.ones(2)}
    _, _, value, aux = made(loss, tx, has_aux=True)(p, tx.init(p))
    assert (p["a"], value) == (0.5, 1.0)
    assert all(torch.equal(x, torch.ones_like(x)) for x in aux.values())


def test_a_refused_state_does_not_decide_whether_the_loss_is_scaled():
    tx, p = fo.dynamic_loss_scale(fo.sgd(1.0), init_scale=4.0), torch.zeros(2)
    step = made(torch.sum, tx)
    with pytest.raises(ValueError, match="open_steps"):
        step(p, fo.sgd(1.0).init(p))
    assert torch.equal(step(p, tx.init(p))[0], torch.full((2,), -1.0))


@pytest.mark.parametrize("donate", [True, False])
def test_a_state_without_the_numbers_of_a_rule_is_refused(donate):
    tx, p = fo.dynamic_loss_scale(fo.sgd(1.0)), torch.zeros(2)
    for step in (fo.compile(tx, donate=donate), tx.update):
        with pytest.raises(ValueError, match="pass the state that this chain's own init"):
            step(p, fo.sgd(1.0).init(p), p)


def test_a_loss_may_have_arguments_called_params_and_state():
    tx, p = fo.sgd(1.0), torch.ones(2)
    step = made(lambda p, *, state: (p * state).sum(), tx)
    assert torch.equal(step(p, tx.init(p), state=2.0)[0], torch.full((2,), -1.0))


def test_parameters_that_share_memory_are_refused_before_anything_is_written():
    whole = torch.ones(4)
    tx = fo.sgd(0.5)
    for p in ({"a": whole[:3], "b": whole[1:]}, {"a": whole, "b": torch.ones(1).expand(3)}):
        with pytest.raises(ValueError, match="memory"):
            made(lambda p: p["a"].sum() + p["b"].sum(), tx)(p, tx.init(p))
        assert torch.equal(whole, torch.ones(4))


@pytest.mark.parametrize("way", ["update", "compile"])
@pytest.mark.parametrize(("bad", "good"), [("nan", 1.0), ("zero", 0.0)])
def test_a_loss_scale_neither_vanishes_nor_becomes_infinite(way, bad, good):
    tx = fo.dynamic_loss_scale(fo.sgd(1.0), growth_interval=1)
    p = torch.zeros(2)
    state, step = tx.init(p), fo.compile(tx)
    g = torch.full((2,), torch.nan if bad == "nan" else 0.0)
    for _ in range(300):
        if way == "compile":
            p, state = step(g, state, p)
        else:
            _, state = tx.update(g, state, p)
    scale = fo.get(state, "loss_scale")
    assert 0 < scale < torch.inf
    u, _ = tx.update(torch.full((2,), good) * scale, state, p)
    torch.testing.assert_close(u, torch.full((2,), -good))


def test_a_loss_scale_for_some_leaves_only_is_refused():
    p = {"x": torch.zeros(2), "y": torch.zeros(2)}
    scaled = fo.dynamic_loss_scale(fo.sgd(1.0), init_scale=4.0)
    for beside, said in (
        (fo.sgd(1.0), "act on the parameter 'y'"),
        (scaled, "several loss scales"),
    ):
        tx = fo.partition({"a": scaled, "b": beside}, {"x": "a", "y": "b"})
        with pytest.raises(ValueError, match=said):
            made(lambda p: p["x"].sum() + p["y"].sum(), tx)(p, tx.init(p))
    tx = fo.partition({"a": scaled, "b": fo.freeze()}, {"x": "a", "y": "b"})
    found, _, _ = made(lambda p: p["x"].sum() + p["y"].sum(), tx)(p, tx.init(p))
    assert torch.equal(found["x"], torch.full((2,), -1.0))


def test_a_slot_called_loss_scale_is_not_a_scale():
    class Slots(NamedTuple):
        loss_scale: torch.Tensor

    tx = fo.leafwise(
        lambda p: Slots(torch.ones_like(p)), lambda u, x, p: (-u, x), lambda t: (), name="own"
    )
    p = {"x": torch.zeros(2)}
    found, _, _ = made(lambda p: p["x"].sum(), tx)(p, tx.init(p))
    assert torch.equal(found["x"], torch.full((2,), -1.0))
