"""GaLore and APOLLO: what they project on, when, and what a step keeps."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, assert_finite, assert_same, make_grads, run

import functional_optim as fo
from functional_optim import adapters
from functional_optim.algorithms.apollo import projection

EXACT = torch.float64
RECIPES = {
    "galore": lambda **more: fo.galore(0.02, rank=2, update_proj_gap=3, **more),
    "apollo": lambda **more: fo.apollo(0.02, rank=2, update_proj_gap=3, **more),
}
each = pytest.mark.parametrize("name", RECIPES)


def test_galore_moves_along_the_first_singular_vectors_only():
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(5, 5, dtype=EXACT))
    for shape in ((5, 5), (5, 4), (4, 5)):
        g = ((u * torch.tensor([9.0, 5.0, 1.0, 0.5, 0.1], dtype=EXACT)) @ v)[: shape[0], : shape[1]]
        w = torch.zeros(shape, dtype=EXACT)
        tx = fo.scale_by_galore(rank=2, scale=1.0)
        step, state = tx.update(g, tx.init(w), w)
        assert torch.linalg.matrix_rank(step) == 2
        left, _, right = torch.linalg.svd(g)
        P = state.slots["projector"]
        first = right[:2].T if shape[0] >= shape[1] else left[:, :2]
        assert_close(P @ P.T, first @ first.T, 1e-10)


@each
def test_a_projector_stays_until_it_is_due(name):
    params = {"w": torch.ones(4, 3, dtype=EXACT)}
    tx, seen, state = RECIPES[name](), [], None
    for g in make_grads(params, 7):
        params, state = run(tx, params, [g], state)
        seen.append(state.slots["projector"]["w"])
    changes = [not torch.equal(a, b) for a, b in zip(seen[1:], seen, strict=False)]
    assert changes == [False, False, True, False, False, True]


def test_galore_keeps_the_signs_of_vectors():
    torch.manual_seed(0)
    params = {"w": torch.zeros(4, 3, dtype=EXACT)}
    g = torch.randn(4, 3, dtype=EXACT)
    tx = fo.galore(0.02, rank=2, update_proj_gap=1)
    _, state = run(tx, params, [{"w": g}])
    _, after = run(tx, params, [{"w": -g + 1e-3 * g.roll(1)}], state)
    agree = (state.slots["projector"]["w"] * after.slots["projector"]["w"]).sum(0)
    assert (agree > 0.9).all()


def test_a_gradient_that_is_not_finite_leaves_galore_its_vectors():
    params = {"w": torch.ones(4, 3, dtype=EXACT)}
    good, bad = make_grads(params, 2)
    bad["w"][0, 0] = torch.nan
    tx = fo.apply_if_finite(fo.galore(0.02, rank=2, update_proj_gap=1), 3)
    moved, _ = run(tx, params, [good, bad, good])
    assert_finite(moved)
    plain = fo.scale_by_galore(2, 1)
    _, state = run(plain, params, [good])
    with pytest.warns(RuntimeWarning, match="scale_by_galore has found NaN"):
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


def test_apollo_mini_scales_all_of_a_matrix_alike():
    torch.manual_seed(0)
    w, g = torch.zeros(4, 6, dtype=EXACT), torch.randn(4, 6, dtype=EXACT)
    tx = fo.scale_by_apollo(1, scale_type="tensor")
    ratio = tx.update(g, tx.init(w), w)[0] / g
    assert_close(ratio, ratio[0, 0].expand(4, 6), 1e-12)
    tx = fo.scale_by_apollo(1)  # of a wide matrix its columns have factors
    ratio = tx.update(g, tx.init(w), w)[0] / g
    assert_close(ratio, ratio[:1].expand(4, 6), 1e-12)
    assert ratio[0].std() > 1e-3


def test_an_object_keeps_adam_for_all_but_matrices():
    layer = torch.nn.Linear(4, 3)
    opt = adapters.GaLore(layer.parameters(), rank=2, compile=False)
    layer(torch.ones(2, 4)).sum().backward()
    opt.step()
    assert opt.state[layer.weight].keys() == {"step", "exp_avg", "exp_avg_sq", "projector"}
    assert opt.state[layer.bias].keys() == {"step", "exp_avg", "exp_avg_sq"}
