"""Linear solvers against dense float64 solves, whatever the sizes and the damping."""

import pytest
import torch

import functional_optim as fo
from functional_optim.solvers import linear
from functional_optim.solvers.linear import System

SIZES = [(30, 3), (9, 9), (40, 13), (5, 12), (1, 4), (70, 6)]


def drawn(m, n, count=4):
    columns = torch.randn(count, n, m, dtype=torch.float64)
    r = torch.randn(count, m, dtype=torch.float64)
    D = torch.rand(count, n, dtype=torch.float64) + 0.5
    return columns, r, D


@pytest.mark.parametrize("kind", [x for x in linear.KINDS if x != "auto"])
@pytest.mark.parametrize(("m", "n"), SIZES)
def test_the_step_is_that_of_the_damped_normal_equations(kind, m, n):
    columns, r, D = drawn(m, n)
    mu = torch.tensor([1.0, 0.1, 3.0, 0.01], dtype=torch.float64)
    g = linear.gradient(columns, r)
    system = System(r, g, gram=linear.gram(columns), columns=columns)
    p, found = linear.solve(kind, system, mu, D)
    G = columns @ columns.mT + torch.diag_embed(mu[:, None] * D * D)
    assert bool(found.all())
    assert torch.allclose(p, torch.linalg.solve(G, -(columns @ r[..., None])[..., 0]), rtol=1e-6)
    assert torch.allclose(system.along(p), ((p[:, None] @ columns)[:, 0] ** 2).sum(-1))


@pytest.mark.parametrize("damping", [1e-6, 1e-3])
@pytest.mark.parametrize("kind", ["cg", "lsmr"])
def test_rounding_does_not_grow_where_little_damping_is_all_curvature(kind, damping):
    draw = torch.Generator().manual_seed(0)
    J, y = torch.randn(20, 50, generator=draw), torch.randn(20, generator=draw)
    tx, w = fo.gauss_newton(damping=damping, linear_solver=kind), torch.zeros(50)
    found, _ = tx.update(None, tx.init(w), w, residual_fn=lambda w: J @ w - y)
    G = J.double().mT @ J.double() + damping * torch.eye(50, dtype=torch.float64)
    exact = torch.linalg.solve(G, J.double().mT @ y.double())
    assert (found - exact).norm() < 1e-5 * exact.norm()
    r = fo.least_squares(lambda w: J @ w - y, w, method="dogleg", linear_solver=kind)
    assert r.success
    assert r.x.norm() < 2 * exact.norm()


@pytest.mark.parametrize("kind", ["cholesky", "qr"])
@pytest.mark.parametrize("n", [3, 9])
def test_a_singular_problem_is_reported_and_moves_nothing(kind, n):
    columns, r, D = drawn(20, n)
    columns[1, 1] = 0.0
    g = linear.gradient(columns, r)
    system = System(r, g, gram=linear.gram(columns), columns=columns)
    p, found = linear.solve(kind, system, torch.zeros(4, dtype=torch.float64), D)
    assert found.tolist() == [True, False, True, True]
    assert not p[1].any()


@pytest.mark.parametrize("kind", ["cholesky", "qr", "kernel"])
@pytest.mark.parametrize(("m", "n"), [*SIZES, (101, 7), (64, 33)])
def test_bits_do_not_depend_on_neighbours(kind, m, n):
    """Odd sizes, too, where problems of a batch are aligned otherwise than single ones."""
    columns, r, D = drawn(m, n, 21)
    mu = torch.rand(21, dtype=torch.float64) + 0.1

    def solved(index):
        own, rest = columns[index].clone(), r[index].clone()
        g = linear.gradient(own, rest)
        return linear.solve(
            kind, System(rest, g, linear.gram(own), own), mu[index].clone(), D[index].clone()
        )[0]

    whole = solved(torch.arange(21))
    for i in range(21):
        assert torch.equal(solved(torch.tensor([i]))[0], whole[i])
    order = torch.randperm(21)
    assert torch.equal(solved(order), whole[order])


def test_qr_does_not_square_the_condition():
    t = torch.linspace(0, 1, 40, dtype=torch.float64)
    columns = torch.stack([t**k for k in range(9)])[None]
    exact = torch.ones(1, 9, dtype=torch.float64)
    r = -linear.times_columns(columns, exact)
    D = torch.ones(1, 9, dtype=torch.float64)
    errors = {}
    for kind in ("qr", "cholesky"):
        system = System(r, linear.gradient(columns, r), linear.gram(columns), columns)
        p, _ = linear.solve(kind, system, torch.zeros(1, dtype=torch.float64), D)
        errors[kind] = float((p - exact).abs().max())
    assert errors["qr"] < 1e-9 < errors["cholesky"]


def test_auto_takes_the_smaller_side():
    assert linear.choose("auto", 10, 4) == "kernel"
    assert linear.choose("auto", 4, 10) == "cholesky"
    with pytest.raises(ValueError, match="unknown linear_solver 'lu'"):
        linear.check_kind("lu")


@pytest.mark.parametrize("n", [257, 1030])
def test_a_large_gram_matrix_is_whole_and_that_of_its_batch(n):
    columns = torch.randn(2, n, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    G = linear.gram(columns)
    assert torch.allclose(G, columns @ columns.mT, rtol=1e-12, atol=1e-12)
    assert all(
        torch.equal(linear.gram(one[None])[0], known) for one, known in zip(columns, G, strict=True)
    )


def dependent(x):  # three residuals of four parameters, of which two cannot vanish together
    s = x[0] + x[1]
    return torch.stack([s - 3, 2 * s - 7, x[2] * x[3] - 1])


def tall(x):
    t = torch.linspace(0, 3, 40, dtype=torch.float64)
    return x[0] * torch.exp(-x[1] * t) + x[2] - 2.5 * torch.exp(-1.3 * t) - 0.3 * (9 * t).sin()


@pytest.mark.parametrize(
    "how", [{}, {"batched": True}, {"batched": True, "compile": True}], ids=str
)
@pytest.mark.parametrize(
    ("fun", "x0"),
    [(dependent, (0.5, 0.8, 1.1, 1.5)), (tall, (1.0, 1.0, 0.0))],
    ids=["wide", "tall"],
)
def test_dogleg_steps_are_right_if_the_kernel_is_singular(fun, x0, how):
    start = torch.tensor(x0, dtype=torch.float64)
    exact = fo.least_squares(fun, start, method="dogleg", linear_solver="qr")
    start = start.expand(2, -1).clone() if how else start
    found = fo.least_squares(fun, start, method="dogleg", linear_solver="kernel", **how)
    assert bool(torch.as_tensor(found.success).all())
    cost, nfev = found.cost.reshape(-1), torch.as_tensor(found.nfev)
    assert torch.allclose(cost, exact.cost, rtol=1e-9)
    assert bool((found.optimality < 1e-4).all())
    assert int(nfev.max()) <= exact.nfev + 2


def test_steps_of_the_transformation_are_right_if_the_kernel_is_singular():
    ends = {}
    for kind in ("kernel", "cholesky"):
        tx, x = fo.dogleg(linear_solver=kind), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
        state = tx.init(x)
        for _ in range(6):
            updates, state = tx.update(None, state, x, residual_fn=tall)
            x = fo.apply_updates(x, updates)
        ends[kind] = x
    assert torch.allclose(ends["kernel"], ends["cholesky"], rtol=1e-6)
