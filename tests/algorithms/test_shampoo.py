"""Shampoo: blocks, sides, grafting, decays, when roots are renewed, and factors that are broken."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from helpers import assert_close, make_grads, run

import functional_optim as fo
from functional_optim import linalg

EASY = {"betas": (0.8, 0.95), "eps": 1e-3}


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def test_blocks_are_matrices_of_their_own():
    w, grads = random(5, 7), [random(5, 7, seed=k) for k in (1, 2, 3)]
    moved, _ = run(fo.shampoo(0.1, **EASY, grafting="adam", max_preconditioner_dim=3), w, grads)
    for rows in (slice(0, 3), slice(3, 5)):
        for columns in (slice(0, 3), slice(3, 6), slice(6, 7)):
            alone = fo.shampoo(0.1, **EASY, grafting="adam")
            part, _ = run(alone, w[rows, columns], [g[rows, columns] for g in grads])
            assert_close(moved[rows, columns], part, 1e-12)


def test_as_matrix_says_what_is_divided():
    """Parts of a projection, and blocks of these; a vector stays a column."""
    params = {"qkv": random(12, 5), "bias": random(12)}
    grads = make_grads(params)
    tx = fo.as_matrix(fo.shampoo(0.1, **EASY, max_preconditioner_dim=3), split=(8, 4))
    moved, _ = run(tx, params, grads)
    for rows in (slice(0, 8), slice(8, 12)):
        alone = fo.shampoo(0.1, **EASY, max_preconditioner_dim=3)
        part, _ = run(alone, params["qkv"][rows], [g["qkv"][rows] for g in grads])
        assert_close(moved["qkv"][rows], part, 1e-12)
    alone = fo.shampoo(0.1, **EASY, max_preconditioner_dim=3)
    part, _ = run(alone, params["bias"], [g["bias"] for g in grads])
    assert_close(moved["bias"], part, 1e-12)


def test_a_row_a_column_and_a_vector_are_alike():
    tx, g = fo.scale_by_shampoo(**EASY), random(5)
    found = []
    for shape in ((5,), (5, 1), (1, 5)):
        w = torch.zeros(shape, dtype=torch.float64)
        u, state = tx.update(g.reshape(shape), tx.init(w), w)
        found.append(u.flatten())
        sizes = sorted(state.slots[name].shape[-1] for name in ("left", "right"))
        assert sizes == [0, 5]
    assert_close(found[0], found[1], 1e-12)
    assert_close(found[0], found[2], 1e-12)


def test_one_side_alone():
    """L^(−1/2) G has orthogonal rows."""
    tx, w = fo.scale_by_shampoo((0.0, 1.0), exponents=(0.5, 0.0)), torch.zeros(3, 5).double()
    u, state = tx.update(random(3, 5), tx.init(w), w)
    assert_close(u @ u.T, torch.eye(3, dtype=torch.float64), 1e-8)
    assert state.slots["right_root"].numel() == 0


@pytest.mark.parametrize("refresh", ["together", "spread"])
def test_roots_are_renewed_every_few_steps(refresh):
    params = {name: random(3, 4, seed=k) for k, name in enumerate("abcdef")}
    tx = fo.shampoo(0.1, **EASY, precondition_frequency=3, refresh=refresh)
    state, renewed = tx.init(params), []
    for t in range(1, 10):
        (grads,) = make_grads(params, 1, seed=t)
        _, after = tx.update(grads, state, params)
        pairs = [(state.slots["left_root"][k], after.slots["left_root"][k]) for k in params]
        renewed.append(sum(not torch.equal(old, new) for old, new in pairs))
        state = after
    then = [6, 0, 0] if refresh == "together" else [2, 2, 2]
    assert renewed == [0, 0, 6, *[*then[1:], then[0]], *[*then[1:], then[0]]]


@pytest.mark.parametrize("grafting", ["sgd", "adagrad", "rmsprop", "adam"])
def test_a_step_is_as_long_as_the_grafted_one(grafting):
    given = {"betas": (0.8, 0.95), "grafting": grafting, "grafting_beta2": 0.9}
    w, grads = random(3, 4), [random(3, 4, seed=k) for k in (1, 2, 3)]
    waiting = fo.scale_by_shampoo(**given, start_preconditioning_step=9)
    now = fo.scale_by_shampoo(**given)
    s, r = waiting.init(w), now.init(w)
    for g in grads:
        u, s = waiting.update(g, s, w)
        v, r = now.update(g, r, w)
        assert_close(u.norm(), v.norm(), 1e-10)
        assert (u / u.norm() - v / v.norm()).norm() > 0.1


def test_the_kinds_of_decay():
    """At a learning rate of half its peak, with no gradient."""
    w = torch.ones(2, 2, dtype=torch.float64)
    zero = torch.zeros_like(w)
    lost = {}
    for kind in ("decoupled", "corrected", "independent"):
        tx = fo.shampoo(0.1, weight_decay=0.5, weight_decay_type=kind, peak_lr=0.2)
        u, _ = tx.update(zero, tx.init(w), w)
        lost[kind] = round(-u[0, 0].item(), 12)
    assert lost == {"decoupled": 0.05, "corrected": 0.025, "independent": 0.25}
    tx = fo.shampoo(0.1, (0.0, 1.0), weight_decay=0.5, weight_decay_type="l2", eps=1e-9)
    u, _ = tx.update(zero, tx.init(w), w)
    assert u.norm() == pytest.approx(0.1, rel=1e-3)  # as if the gradient were the weights


def test_a_broken_factor_keeps_its_root_and_warns_once():
    linalg._told.discard("scale_by_shampoo")
    tx, params = fo.shampoo(0.1, **EASY), {"a": random(3, 4), "b": random(3, 4, seed=1)}
    grads = make_grads(params, 4)
    _, state = run(tx, params, grads[:1])
    bad = {"a": torch.full_like(grads[1]["a"], math.nan), "b": grads[1]["b"]}
    with pytest.warns(RuntimeWarning, match="scale_by_shampoo .* keeps the old basis"):
        _, after = tx.update(bad, state, params)
    assert_close(after.slots["left_root"]["a"], state.slots["left_root"]["a"], 0.0)
    assert not torch.equal(after.slots["left_root"]["b"], state.slots["left_root"]["b"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        u, _ = tx.update(grads[2], after, params)
    assert u["b"].isfinite().all()
