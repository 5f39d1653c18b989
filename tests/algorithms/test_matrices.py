"""Algorithms for matrices, beyond the papers' loops: what they keep, when they renew it, limits."""

import math
import warnings
from typing import Any

import pytest
import torch
from helpers import assert_close, assert_finite, assert_same, make_grads, run
from reference.loops import LOOPS
from ways import random_tree

import functional_optim as fo
from functional_optim import adapters, linalg
from functional_optim.algorithms.apollo import projection

EXACT = torch.float64


# ---------------------------------------------------------------- NorMuon, AdaMuon, Dion2, Scion
def run_once(tx, w, g):
    return tx.update(g, tx.init(w), w)


def test_groups_of_an_object_have_norms_and_radii_of_their_own():
    body, head = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
    groups = [{"params": [body], "norm": "row"}, {"params": [head], "norm": "sign", "radius": 8.0}]
    opt = adapters.Scion(groups, lr=0.5, compile=False)
    body.grad, head.grad = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.ones(2, 2)
    opt.step()
    half = 0.5 / 2**0.5
    assert_close(body.detach(), -half * torch.tensor([[0.6, 0.8], [0.0, 1.0]]), 1e-6)
    assert_close(head.detach(), torch.full((2, 2), -2.0), 1e-6)


def test_a_column_of_scion_is_a_row_of_what_is_stored_the_other_way():
    torch.manual_seed(0)
    w, g = torch.zeros(4, 3, dtype=EXACT), torch.randn(4, 3, dtype=EXACT)
    across = fo.as_matrix(fo.scale_by_scion("col"), orientation="in_out")
    found = run_once(across, w, g)[0]
    assert_close(found.mT, run_once(fo.scale_by_scion("col"), w.mT, g.mT)[0], 1e-12)


# ---------------------------------------------------------------- GaLore, APOLLO
def test_galore_keeps_the_signs_of_vectors():
    torch.manual_seed(0)
    params = {"w": torch.zeros(4, 3, dtype=EXACT)}
    g = torch.randn(4, 3, dtype=EXACT)
    tx = fo.galore(0.02, rank=2, update_proj_gap=1)
    _, state = run(tx, params, [{"w": g}])
    for _ in range(8):
        _, after = run(tx, params, [{"w": 0.2 * torch.randn(4, 3, dtype=EXACT) - g}], state)
        assert ((state.slots["projector"]["w"] * after.slots["projector"]["w"]).sum(0) > 0).all()


def test_a_gradient_that_is_not_finite_leaves_galore_its_vectors():
    params = {"w": torch.ones(4, 3, dtype=EXACT)}
    good, bad = make_grads(params, 2)
    bad["w"][0, 0] = torch.nan
    tx = fo.apply_if_finite(fo.galore(0.02, rank=2, update_proj_gap=1), 3)
    moved, _ = run(tx, params, [good, bad, good])
    assert_finite(moved)
    plain = fo.scale_by_galore(2, 1)
    _, state = run(plain, params, [good])
    with pytest.warns(RuntimeWarning, match="scale_by_galore found NaN"):
        _, after = plain.update(bad, state, params)
    assert_same(after.slots["projector"], state.slots["projector"])


def test_projections_are_numbers_of_seed_step_and_shape():
    like = torch.zeros((), dtype=EXACT)
    drawn = projection(5, 2, 400, 50, like)
    assert_close(drawn.var() * 50, torch.tensor(1.0, dtype=EXACT), 0.03)
    assert abs(float(drawn.mean())) < 1e-2
    assert_same(drawn, projection(5, torch.tensor(2.0), 400, 50, like))
    for other in ((6, 2, 400, 50), (5, 3, 400, 50), (5, 2, 50, 400)):
        assert not torch.allclose(projection(*other, like).reshape(400, 50), drawn)


def test_apollo_bounds_the_growth_of_steps_and_forgets_at_zero():
    w = torch.zeros(4, 3, dtype=EXACT)
    tx, g = fo.scale_by_apollo(2, growth=1.1, eps=1.0), torch.ones(4, 3, dtype=EXACT)
    state, norms = tx.init(w), []
    for size in (1.0, 9.0, 0.0, 5.0):
        _, state = tx.update(size * g, state, w)
        norms.append(state.slots["update_norm"].item())
    assert norms[1] == pytest.approx(1.1 * norms[0], rel=1e-6)
    assert norms[2] == 0.0
    assert norms[3] > norms[1]


def test_an_object_keeps_adam_for_all_but_matrices():
    layer = torch.nn.Linear(4, 3)
    opt = adapters.GaLore(layer.parameters(), rank=2, compile=False)
    layer(torch.ones(2, 4)).sum().backward()
    opt.step()
    assert opt.state[layer.weight].keys() == {"step", "exp_avg", "exp_avg_sq", "projector"}
    assert opt.state[layer.bias].keys() == {"step", "exp_avg", "exp_avg_sq"}


# ---------------------------------------------------------------- Shampoo
EASY = {"betas": (0.8, 0.95), "eps": 1e-3}


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


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


# ---------------------------------------------------------------- KL-Shampoo, KL-SOAP
FACTORS = [((4, 4), 1, {}), ((3, 4), 4, {"init_factor": 2.0}), ((5, 4), 3, {})]
FACTORS += [((13, 12), 3, {"max_clamp_value": 11})]
COMMON: dict[str, Any] = {"lr": 0.05, "shampoo_beta": 0.9, "eps": 1e-3, "weight_decay": 0.1}
KL = {
    "kl_soap": (fo.kl_soap, {**COMMON, "betas": (0.8, 0.95)}),
    "kl_shampoo": (fo.kl_shampoo, {**COMMON, "momentum": 0.8}),
}


@pytest.mark.parametrize(("shape", "frequency", "hyper"), FACTORS)
@pytest.mark.parametrize("name", KL)
def test_fifty_steps_are_those_of_the_loop(name, shape, frequency, hyper):
    recipe, known = KL[name]
    every = {**known, **hyper, "precondition_frequency": frequency}
    p = random_tree(0, torch.float64, {"w": shape})["w"]
    small = 1e-2 if "max_clamp_value" in hyper else 1.0  # so that the bound is reached
    grads = [small * random_tree(k + 1, torch.float64, {"w": shape})["w"] for k in range(50)]
    moved, _ = run(recipe(**every), p, grads)
    theirs = LOOPS[name](p.numpy(), [g.numpy() for g in grads], **every)
    assert_close(moved, torch.as_tensor(theirs), 1e-9)
    if small < 1.0:
        free, _ = run(recipe(**{**every, "max_clamp_value": None}), p, grads)
        assert (free - moved).abs().max() > 1e-5


@pytest.mark.parametrize("name", KL)
def test_normalized_steps_have_the_length_of_the_learning_rate(name):
    recipe, hyper = KL[name]
    tx = recipe(**{**hyper, "weight_decay": 0.0}, normalize_grads=True)
    w = torch.zeros(3, 2)
    g = random_tree(1, torch.float32, {"w": (3, 2)})["w"]
    _, state = tx.update(g, tx.init(w), w)
    u, _ = tx.update(g, state, w)
    assert u.square().mean().sqrt().item() == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize("name", KL)
def test_zeros_half_types_and_empty_matrices_stay_finite(name):
    recipe, hyper = KL[name]
    shapes = {"w": (3, 2), "empty": (0, 3), "row": (1, 4)}
    params = random_tree(0, torch.bfloat16, shapes)
    grads = [random_tree(k, torch.bfloat16, shapes) for k in range(4)]
    zeros = {key: torch.zeros_like(p) for key, p in params.items()}
    tx = recipe(**hyper, precondition_frequency=1)
    assert_finite(run(tx, params, [zeros, zeros, *grads, zeros]))
