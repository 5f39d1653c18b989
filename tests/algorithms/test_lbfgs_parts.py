"""What L-BFGS is made of: the two loops, the line search, trees as vectors."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, assert_finite, assert_same
from lbfgs_runs import tree_problem

from functional_optim.algorithms.lbfgs import quasi_newton
from functional_optim.algorithms.lbfgs.line_search import (
    C1,
    C2,
    End,
    Point,
    cubic,
    start,
    strong_wolfe,
)
from functional_optim.core.ravel import Ravel


def test_the_two_loops_are_the_dense_bfgs_matrix():
    """Nocedal and Wright, equations 7.16 to 7.19."""
    n, m = 6, 4
    eye = torch.eye(n, dtype=torch.float64)
    memory = quasi_newton.Memory([], [], [], 1)
    a = torch.randn(n, n, dtype=torch.float64)
    curvature = a @ a.T + eye
    pairs = []
    for _ in range(7):
        s = torch.randn(n, dtype=torch.float64)
        memory = quasi_newton.remember(memory, s, curvature @ s, m, True)
        pairs.append((s, curvature @ s))
    s, y = pairs[-1]
    h = eye * (s @ y) / (y @ y)
    for s, y in pairs[-m:]:
        v = eye - torch.outer(y, s) / (y @ s)
        h = v.T @ h @ v + torch.outer(s, s) / (y @ s)
    g = torch.randn(n, dtype=torch.float64)
    found, _ = quasi_newton.two_loop(g, memory)
    assert_close(found, h @ g, 1e-12)
    refused = quasi_newton.remember(memory, s, -y, m, True)
    assert refused is memory


def test_the_minimizer_of_a_cubic():
    coefficients = torch.tensor([1.0, -2.0, -1.5, 0.7], dtype=torch.float64)  # minimum inside

    def f(t):
        return sum(c * t**k for k, c in enumerate(coefficients))

    def df(t):
        return sum(k * c * t ** (k - 1) for k, c in enumerate(coefficients) if k)

    low, high = End(0.0, f(0.0), df(0.0)), End(3.0, f(3.0), df(3.0))
    for pair in ((low, high), (high, low)):
        t = cubic(*pair, 0.0, 3.0)
        assert abs(df(t)) < 1e-12
        assert cubic(*pair, 0.0, 0.5) == 0.5
    hill = End(0.0, 0.0, torch.tensor(1.0)), End(1.0, 0.8, torch.tensor(1.0))
    assert cubic(*hill, 0.0, 1.0) == 0.5


@pytest.mark.parametrize("first", [1e-3, 0.1, 1.0, 30.0])
def test_a_search_ends_where_the_wolfe_conditions_hold(first):
    def f(t):
        return -t / (t**2 + 2) + 0.01 * torch.sin(9 * t)  # Moré and Thuente's, made rough

    def point(t):
        slope, value = torch.func.grad_and_value(f)(torch.as_tensor(t, dtype=torch.float64))
        return Point(t, float(value), torch.ones(1), slope)

    origin = point(0.0)
    search, t, over, evaluations = start(origin), first, False, 0
    while not over:
        evaluations += 1
        search, t, over = strong_wolfe(search, origin, point(t), 1.0, evaluations == 25)
    found = search.low
    assert evaluations < 25
    assert found.f <= origin.f + C1 * found.t * origin.slope
    assert abs(found.slope) <= -C2 * origin.slope


def test_flat_is_there_and_back():
    params, _ = tree_problem(torch.float32)
    flat = Ravel(params)
    assert flat.dtype == torch.float64
    assert not flat.exact
    assert_same(flat.tree(flat.vector(params)), params)
    conjugate = {**params, "z": params["z"].conj()}
    assert_close(flat.tree(flat.vector(conjugate))["z"], params["z"].conj().resolve_conj(), 0.0)
    assert_finite(flat.snap(flat.vector(params)))
