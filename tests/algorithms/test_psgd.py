"""What PSGD promises beyond its numbers."""

import math

import pytest
import torch
from helpers import assert_close, make_grads, run

import functional_optim as fo
from functional_optim.linalg import triangular_product, triangular_times

# ---------------------------------------------------------------- PSGD
SHAPES = {"conv": (4, 2, 3, 3), "row": (1, 5), "vector": (5,), "scalar": (), "wide": (3, 12)}


def zeros(dtype=torch.float64):
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}


def shapes_of(**hyper):
    slots = fo.psgd_kron(**hyper).init(zeros()).slots
    pairs = {name: (slots["Q_left"][name], slots["Q_right"][name]) for name in SHAPES}
    shape = lambda x: None if x is None else tuple(x.shape)  # noqa: E731
    return {name: list(map(shape, pair)) for name, pair in pairs.items()}


def test_small_sides_and_vectors_have_diagonal_factors():
    wanted = {"conv": [(1, 4, 4), (1, 18)], "row": [(1,), (5, 5)], "scalar": [(1,), None]}
    wanted |= {"vector": [(5,), None], "wide": [(3, 3), (12,)]}
    assert shapes_of(max_size_triangular=10) == wanted


@pytest.mark.parametrize(
    ("mode", "square", "wide"),
    [
        (None, [(3, 3), (3, 3)], [(3, 3), (6, 6)]),
        ("one_diag", [(3, 3), (3,)], [(3, 3), (6,)]),
        ("smart_one_diag", [(3, 3), (3, 3)], [(3, 3), (6,)]),
        ("all_diag", [(3,), (3,)], [(3,), (6,)]),
    ],
)
def test_memory_can_be_saved(mode, square, wide):
    tx = fo.psgd_kron(memory_save_mode=mode)
    for shape, expected in (((3, 3), square), ((3, 6), wide), ((6, 3), None)):
        slots = tx.init(torch.zeros(shape)).slots
        found = [tuple(slots[name].shape) for name in ("Q_left", "Q_right")]
        assert found == (expected or [wide[1], wide[0]])


def test_factors_are_learned_when_it_is_their_turn():
    """At 0.4 every third step; by default in each of the first 500, then more and more seldom."""
    for share, steps in ((0.4, 10), (1.0, 10), (None, 1200)):
        tx = fo.scale_by_psgd_kron(preconditioner_update_probability=share, precond_lr=0.0)
        rule = tx.placements[1].rule
        count = rule.carry
        for t in range(1, steps + 1):
            _, count = rule.scalars(float(t), count, **rule.given_at(float(t)))
        waited, learned = 0, 0
        for t in range(1, steps + 1):
            p = share or min(1.0, max(0.03, math.exp(-0.001 * (t - 501))))
            waited += 1
            if waited >= 1 / p:
                waited, learned = 0, learned + 1
        assert count.renewals == learned
        assert count.steps_since_renewal == waited


def test_equally_large_factors_give_the_same_step():
    """The hundredth time is a balanced one."""
    torch.manual_seed(0)
    tx = fo.scale_by_psgd_kron(0.0)
    w, g = torch.zeros(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    state = tx.init(w)
    slots = dict(state.slots)
    slots["Q_left"] = 8 * slots["Q_left"]
    later = {**state.carry, "renewals": torch.tensor(99.0, dtype=torch.float64)}
    u, plain = tx.update(g, state._replace(slots=slots), w)
    v, even = tx.update(g, state._replace(slots=slots, carry=later), w)
    assert_close(u, v, 1e-12)
    sizes = [x.slots[name].abs().max() for x in (plain, even) for name in ("Q_left", "Q_right")]
    assert sizes[0] > 4 * sizes[1]
    assert 0.5 < sizes[2] / sizes[3] < 2.0


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_a_gradient_that_says_nothing_leaves_the_factors(bad):
    tx = fo.scale_by_psgd_kron(0.0)
    params = zeros()
    grads = make_grads(params)
    _, state = run(tx, params, grads)
    before = state.slots
    spoiled = {name: torch.full_like(g, bad) for name, g in grads[0].items()}
    _, state = tx.update(spoiled, state, params)
    for name in ("Q_left", "Q_right"):
        assert_close(state.slots[name], before[name], 0.0)
    u, state = tx.update(grads[0], state, params)
    assert all(x.isfinite().all() for x in u.values() if bad == 0.0)


@pytest.mark.parametrize("n", [256, 257, 1025])
def test_large_triangles_are_multiplied_in_parts(n):
    torch.manual_seed(0)
    Q, T = torch.randn(2, n, n).double().triu(), torch.randn(2, n, n).double()
    X = torch.randn(2, n, 3).double()
    assert_close(triangular_times(Q, X), Q @ X, 1e-10)
    assert_close(triangular_times(Q, X, transposed=True), Q.mT @ X, 1e-10)
    assert_close(triangular_product(T, Q), T.triu() @ Q, 1e-10)
