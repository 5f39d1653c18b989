"""Element-wise rules in a basis: what is kept goes over to a new one, and what does not fit."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_close, assert_finite, assert_same, clone, run
from ways import by_function, by_update, random_tree

import functional_optim as fo
from functional_optim import linalg
from functional_optim.adapters import Optimizer

HYPER: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
SHAPES = {"a": (4, 5), "b": (4, 5), "c": (3, 3), "d": (6,), "e": (1, 2), "f": (2, 1)}
INNER = {
    "adam": lambda: fo.scale_by_adam((0.8, 0.95), 1e-3),
    "lion": lambda: fo.scale_by_lion((0.8, 0.95)),
    "ademamix": lambda: fo.scale_by_ademamix((0.8, 0.95, 0.99), eps=1e-3),
    "amsgrad": lambda: fo.scale_by_adam((0.8, 0.95), 1e-3, amsgrad=True),
    "rms and momentum": lambda: fo.chain(fo.scale_by_rms(0.9, 1e-3), fo.trace(0.9)),
    "nothing": fo.identity,
}
each_inner = pytest.mark.parametrize("name", INNER)


def grads_of(shapes: Any, steps: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    return [random_tree(k + 1, dtype, shapes) for k in range(steps)]


def turned_by_hand(name, grads, frequency):
    """The updates of a rule with a basis that is renewed between steps, in numpy and the rule."""
    inner = INNER[name]()
    g = grads[0].numpy()
    L, R = 0.1 * g @ g.T, 0.1 * g.T @ g
    left, right = (np.linalg.eigh(x)[1][:, ::-1] for x in (L, R))
    w = torch.zeros(g.shape, dtype=torch.float64)
    state, found = inner.init(w), [np.zeros_like(g)]
    for t, tensor in enumerate(grads[1:], start=1):
        g = tensor.numpy()
        u, state = inner.update(torch.as_tensor(left.T @ g @ right), state, w)
        found.append(left @ u.numpy() @ right.T)
        L, R = 0.9 * L + 0.1 * g @ g.T, 0.9 * R + 0.1 * g.T @ g
        if t % frequency:
            continue
        slots = {key: x.numpy() for key, x in state.slots.items()}
        sq = {"exp_avg_sq", "max_exp_avg_sq", "square_avg"}
        plain = {k: left @ x @ right.T for k, x in slots.items() if k not in sq}
        rows = np.argsort(-np.diag(left.T @ L @ left))
        columns = np.argsort(-np.diag(right.T @ R @ right))
        left = np.linalg.qr(L @ left[:, rows])[0]
        right = np.linalg.qr(R @ right[:, columns])[0]
        new = {k: x[rows][:, columns] for k, x in slots.items() if k in sq}
        new |= {k: left.T @ x @ right for k, x in plain.items()}
        state = state._replace(slots={k: torch.as_tensor(x) for k, x in new.items()})
    return found


@each_inner
def test_any_rule_runs_in_the_basis_and_what_it_keeps_goes_over(name):
    shape = (4, 5)
    grads = [g["w"] for g in grads_of({"w": shape}, 12)]
    tx = fo.in_basis(fo.shampoo_basis(0.9, 3), INNER[name]())
    w = torch.zeros(shape, dtype=torch.float64)
    state = tx.init(w)
    for g, wanted in zip(grads, turned_by_hand(name, grads, 3), strict=True):
        u, state = tx.update(g, state, w)
        assert_close(u, torch.as_tensor(wanted.copy()), 1e-9)


def recipes() -> dict[str, Any]:
    spread = fo.shampoo_basis(0.9, 3, refresh="spread")
    lion = fo.chain(fo.in_basis(spread, fo.scale_by_lion()), fo.scale_by_lr(0.1))
    return {"soap": fo.soap(**HYPER, precondition_frequency=2, max_precond_dim=4), "lion": lion}


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("soap", torch.float64, 1e-11),
        ("soap", torch.float32, 2e-3),
        ("lion", torch.float64, 1e-11),  # in float32 rounding turns signs around
    ],
)
def test_compiled_steps_do_what_the_rule_does(name, dtype, tolerance):
    tx, params, grads = recipes()[name], random_tree(0, dtype, SHAPES), grads_of(SHAPES, 6, dtype)
    expected = by_update(tx, params, grads)
    assert_close(by_function(tx, clone(params), grads, strict=True), expected, tolerance)


def test_a_bad_gradient_leaves_the_basis_as_it_is_and_is_told_once(monkeypatch):
    monkeypatch.setattr(linalg, "_told", set())
    shapes = {"w": (3, 3), "v": (3, 3)}
    params, grads = random_tree(0, torch.float32, shapes), grads_of(shapes, 6, torch.float32)
    tx = fo.soap(precondition_frequency=1)
    _, state = run(tx, params, grads[:3])
    before = state.slots["left_basis"]["w"]
    bad = {"w": grads[3]["w"] * math.nan, "v": grads[3]["v"]}
    with pytest.warns(RuntimeWarning, match="keeps the old basis") as told:
        moved, after = run(tx, params, [bad, *grads[4:]], state)
    assert len(told) == 1
    assert_close(after.slots["left_basis"]["w"], before, 0.0)
    assert_finite((moved["v"], after.slots["left_basis"]))
    careful = fo.apply_if_finite(tx, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved, state = run(careful, params, [*grads[:3], bad, *grads[4:]])
    assert_finite(moved)


def test_zero_gradients_move_nothing_and_half_types_keep_wide_factors():
    shapes = {"w": (3, 2), "empty": (0, 3), "v": (3,), "row": (1, 4)}
    params = random_tree(0, torch.bfloat16, shapes)
    zeros = {key: torch.zeros_like(p) for key, p in params.items()}
    tx = fo.soap(weight_decay=0.0, precondition_frequency=1)
    moved, state = run(tx, params, [zeros] * 4)
    assert_close(moved, params, 0.0)
    assert state.slots["left_factor"]["w"].dtype is torch.float32
    assert state.slots["left_factor"]["v"] is None
    moved, state = run(tx, moved, grads_of(shapes, 4, torch.bfloat16), state)
    assert_finite((moved, state.slots))


@pytest.mark.parametrize("wrong", [0, -1, 2.5])
@pytest.mark.parametrize("recipe", [fo.soap, fo.kl_shampoo])
def test_a_wrong_frequency_of_a_schedule_or_a_group_is_refused(recipe, wrong):
    w, g = torch.ones(2, 2), torch.eye(2)
    later = recipe(precondition_frequency=lambda count: 2 if count < 2 else wrong)
    params, state = run(later, w, [g, g])
    words = "needs a precondition_frequency that is a whole number of 1 or more, but got"
    for step in (later.update, fo.compile(later)):
        with pytest.raises(ValueError, match=words):
            step(g, state, params)
    for compiled in (True, False):
        p = torch.nn.Parameter(w.clone())
        opt = Optimizer([p], recipe, compile=compiled)
        p.grad = g.clone()
        opt.step()
        opt.param_groups[0]["precondition_frequency"] = wrong
        before = clone((p.detach(), dict(opt.state[p])))
        with pytest.raises(ValueError, match=words):
            opt.step()
        assert_same((p.detach(), dict(opt.state[p])), before)


def test_a_rule_that_reads_the_parameters_is_refused():
    tx = fo.in_basis(fo.shampoo_basis(), fo.chain(fo.add_decayed_weights(0.1), fo.scale_by_adam()))
    w, g = torch.ones(2, 2), torch.eye(2)
    _, state = tx.update(g, tx.init(w), w)
    with pytest.raises(ValueError, match="put that rule after in_basis"):
        tx.update(g, state, w)
