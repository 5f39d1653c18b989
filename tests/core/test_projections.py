"""Projections: in the set, nearest to where one came from, and differentiable."""

import pytest
import torch
from helpers import assert_close, assert_same
from hypothesis import given
from hypothesis import strategies as st

from functional_optim import projections

CLOSE, TOTAL = 1e-9, {"scale": 1.5}
SETS = {
    "non_negative": (projections.non_negative, {}, lambda x: (x >= 0).all()),
    "box": (
        projections.box,
        {"lower": -0.5, "upper": 0.7},
        lambda x: ((x + 0.5) * (x - 0.7) <= 0).all(),
    ),
    "hypercube": (projections.hypercube, {"scale": 0.8}, lambda x: ((x >= 0) & (x <= 0.8)).all()),
    "linf_ball": (projections.linf_ball, {"scale": 0.6}, lambda x: (x.abs() <= 0.6).all()),
    "simplex": (
        projections.simplex,
        TOTAL,
        lambda x: (x >= 0).all() and abs(x.sum() - 1.5) < CLOSE,
    ),
    "l1_ball": (projections.l1_ball, {"scale": 1.5}, lambda x: x.abs().sum() < 1.5 + CLOSE),
    "l1_sphere": (projections.l1_sphere, TOTAL, lambda x: abs(x.abs().sum() - 1.5) < CLOSE),
    "l2_ball": (projections.l2_ball, {"scale": 1.2}, lambda x: x.norm() < 1.2 + CLOSE),
    "l2_sphere": (projections.l2_sphere, {"scale": 1.2}, lambda x: abs(x.norm() - 1.2) < CLOSE),
}
CONVEX = [name for name in SETS if "sphere" not in name]


def point(seed, size, spread=1.0):
    random = torch.Generator().manual_seed(seed)
    return spread * torch.randn(size, dtype=torch.float64, generator=random)


@pytest.mark.parametrize("name", SETS)
@given(st.integers(0, 999), st.integers(1, 9), st.sampled_from([0.1, 1.0, 10.0]))
def test_a_projection_is_the_nearest_point_of_the_set(name, seed, size, spread):
    project, numbers, inside = SETS[name]
    x = point(seed, size, spread)
    y = project(x, **numbers)
    assert inside(y)
    assert_close(project(y, **numbers), y, CLOSE)
    for k in range(5):
        z = project(y + point(1000 + k, size, 0.3), **numbers)
        assert inside(z)
        assert (x - z).norm() >= (x - y).norm() - CLOSE
        if name in CONVEX:  # the variational inequality, which says it for the whole set
            assert (x - y) @ (z - y) < CLOSE * (1 + spread)


@pytest.mark.parametrize("name", SETS)
def test_a_tree_is_one_long_vector(name):
    project, numbers, _ = SETS[name]
    a, b, c = point(0, (2, 3)), point(1, ()), point(2, 4)
    whole = project(torch.cat([x.reshape(-1) for x in (a, b, c)]), **numbers)
    tree = project({"a": a, "b": [b, None, (c,)]}, **numbers)
    assert tree["b"][1] is None
    got = torch.cat([x.reshape(-1) for x in (tree["a"], tree["b"][0], tree["b"][2][0])])
    assert_close(got, whole, CLOSE)
    assert tree["a"].shape == (2, 3)


@pytest.mark.parametrize("name", SETS)
def test_dtypes_stay_and_numbers_may_be_tensors(name):
    project, numbers, _ = SETS[name]
    x = [point(0, 5).bfloat16(), point(1, (2, 2)).float()]
    got = project(x, **numbers)
    assert [y.dtype for y in got] == [torch.bfloat16, torch.float32]
    tensors = {key: torch.tensor(value) for key, value in numbers.items()}
    assert_same(project(x, **tensors), got)
    with pytest.raises(TypeError, match=r"real tensors, but got one of dtype torch\.complex64"):
        project(torch.ones(2, dtype=torch.complex64), **numbers)


@pytest.mark.parametrize("name", SETS)
def test_derivatives_are_the_finite_differences(name):
    project, numbers, _ = SETS[name]
    x = point(5, 6, 2.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: project(x, **numbers), x)
    together = torch.vmap(lambda x: project(x, **numbers))(point(6, (3, 4)))
    for i in range(3):
        assert_close(together[i], project(point(6, (3, 4))[i], **numbers), CLOSE)


def test_bounds_may_be_trees():
    x = {"a": torch.tensor([-2.0, 2.0]), "b": torch.tensor([5.0])}
    low = {"a": torch.tensor([-1.0, -1.0]), "b": torch.tensor([0.0])}
    high = {"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([4.0])}
    expected = {"a": torch.tensor([-1.0, 2.0]), "b": torch.tensor([4.0])}
    assert_same(projections.box(x, low, high), expected)


def test_a_zero_may_lie_anywhere_on_the_l1_sphere_and_zero_stays_in_balls():
    zero = torch.zeros(4)
    assert_same(projections.l1_sphere(zero), torch.full((4,), 0.25))
    assert_same(projections.l1_ball(zero), zero)
    assert_same(projections.l2_ball(zero), zero)
    assert projections.l2_sphere(zero).isnan().all()
    for ball in (projections.l1_ball, projections.l2_ball, projections.simplex):
        assert ball(torch.zeros(0, 3)).shape == (0, 3)
