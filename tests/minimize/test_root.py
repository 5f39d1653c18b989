"""Roots of one problem and of many, against scipy's; derivatives of roots and fixed points."""

from typing import Any

import pytest
import torch
from fits import freudenstein, helix, rosenbrock
from torch import Tensor

import functional_optim as fo

optimize = pytest.importorskip("scipy.optimize")
METHODS = ("newton", "lm", "broyden")


def tridiagonal(x: Tensor, a: Tensor) -> Tensor:
    """Broyden's: Moré, Garbow, Hillstrom (30)."""
    left = torch.cat([x.new_zeros(1), x[:-1]])
    right = torch.cat([x[1:], x.new_zeros(1)])
    return (3 - a * x) * x - left - 2 * right + 1


def swapped(x: Tensor) -> Tensor:
    """Its Jacobian has zeros on the diagonal."""
    return torch.stack([x[1].exp() - 2, x[2] - x[1] ** 2, x[0] ** 3 - 5])


def parabola_and_line(x: Tensor) -> Tensor:
    return torch.stack([x[0] ** 2 + x[1] - 2, 3 * x[0] + x[1] - 4])


CASES = {
    "rosenbrock": (rosenbrock, [-1.2, 1.0]),
    "helix": (helix, [-1.0, 0.1, 0.0]),
    "freudenstein": (freudenstein, [6.0, 5.0]),
    "swapped": (swapped, [1.0, 0.0, 1.0]),
    "singular": (lambda x: x**2, [1.0, 2.0]),
    "at zero": (torch.sin, [0.5, -0.5]),
    "singular at the start": (parabola_and_line, [1.5, 1.0]),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_roots_are_those_of_scipy(case, method):
    fun, x0 = CASES[case]
    x0 = torch.tensor(x0, dtype=torch.float64)
    found = fo.root(fun, x0, method=method)
    assert found.success, found.message
    assert float(found.fun.abs().max()) < 1e-7
    theirs = optimize.root(lambda z: fun(torch.as_tensor(z)).numpy(), x0.numpy())
    tolerance = 2e-4 if case == "singular" else 1e-7
    assert torch.allclose(found.x, torch.as_tensor(theirs.x), atol=tolerance)
    assert torch.equal(found.fun, fun(found.x))
    small = fo.root(fun, x0.float(), method=method)
    assert small.x.dtype == torch.float32
    assert small.success
    assert torch.allclose(small.x, found.x.float(), atol=1e-2 if case == "singular" else 1e-4)


def test_broyden_evaluates_few_jacobians_and_never_ends_by_a_guess():
    x0, a = starts(20, 6)
    newton = fo.root(tridiagonal, x0, (a,), batched=True)
    found = fo.root(tridiagonal, x0, (a,), batched=True, method="broyden")
    assert torch.allclose(found.x, newton.x, atol=1e-12)
    assert bool((found.njev <= 2).all())
    assert bool((newton.njev == newton.nfev).all())
    assert bool((found.nfev > newton.nfev).any())

    def flat(x: Tensor) -> Tensor:  # its secant steps get short at once, far from the root at 5
        return (x - 5) * torch.where(x < 1, 1e9 * (1 - x) + 1, 1.0)

    far = fo.root(flat, torch.zeros(1, dtype=torch.float64), method="broyden")
    assert not far.success or float(far.fun.abs().max()) < 1e-7


def test_broyden_renews_a_guess_along_which_nothing_descends():
    def fun(x: Tensor) -> Tensor:
        return torch.stack([x[0].exp() - x[1] - 2, (-x[1]).exp() + x[0] ** 3 - 0.5])

    x0 = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    found = fo.root(fun, x0, method="broyden")
    assert found.success
    assert 1 < found.njev < found.nfev


def starts(count: int, n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    a = torch.rand(count, n, dtype=torch.float64, generator=generator) + 1.0
    return -torch.ones(count, n, dtype=torch.float64) + 0.3 * a.flip(0), a


@pytest.mark.parametrize("n", [1, 5, 11, 16])
@pytest.mark.parametrize("method", METHODS)
def test_bits_do_not_depend_on_neighbours_order_or_nan(method, n):
    x0, a = starts(37, n)
    a[5] = float("nan")
    whole = fo.root(tridiagonal, x0, (a,), batched=True, method=method)
    order = torch.randperm(37)
    mixed = fo.root(tridiagonal, x0[order], (a[order],), batched=True, method=method)
    assert torch.equal(mixed.x, whole.x[order])
    assert torch.equal(mixed.nfev, whole.nfev[order])
    assert torch.equal(mixed.status, whole.status[order])
    for i in (0, 36):
        alone = fo.root(tridiagonal, x0[i : i + 1], (a[i : i + 1],), batched=True, method=method)
        assert torch.equal(alone.x[0], whole.x[i])
        single = fo.root(tridiagonal, x0[i], (a[i],), method=method)
        assert torch.allclose(single.x, whole.x[i], atol=1e-12)
    assert int(whole.status[5]) == -1
    assert torch.equal(whole.x[5], x0[5])
    good = torch.arange(37) != 5
    assert bool(whole.success[good].all())


@pytest.mark.parametrize("method", METHODS)
def test_derivatives_of_roots(method):
    x0, a = starts(3, 5)

    def f(a: Tensor) -> Tensor:
        return fo.root(tridiagonal, x0, (a,), batched=True, method=method, xtol=1e-12).x

    J = torch.func.jacrev(f)(a)
    assert torch.allclose(torch.func.jacfwd(f)(a), J, atol=1e-10)
    along = torch.randn_like(a)
    expected = (f(a + 1e-5 * along) - f(a - 1e-5 * along)) / 2e-5
    assert torch.allclose((J * along).sum((-1, -2)), expected, atol=1e-7)
    assert not J[0, :, 1].any()
    own = a.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(own).sum(), own)
    assert torch.allclose(g, J.sum((0, 1)), atol=1e-10)
    second = torch.func.jacrev(torch.func.grad(lambda a: f(a)[0, 2]))(a)[0, :, 0]
    slope = torch.func.grad(lambda a: f(a)[0, 2])
    difference = (slope(a + 1e-5 * along) - slope(a - 1e-5 * along))[0] / 2e-5
    assert torch.allclose(second @ along[0], difference, atol=1e-6)


def test_a_fixed_point_of_a_tree_and_a_problem_that_fails_is_constant():
    def fun(x, c):
        return {"u": x["u"] - torch.cos(c * x["u"])}

    c = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    start = {"u": torch.ones(2, dtype=torch.float64)}

    def f(c):
        return fo.root(fun, start, (c,), batched=True).x["u"]

    J = torch.func.jacrev(f)(c)
    u = f(c)[0]
    assert abs(float(u) - 0.7390851332151607) < 1e-12
    s = torch.sin(u)
    assert torch.allclose(J[0, 0], -u * s / (1 + s))
    assert not J[1].any()


WRONG = {
    "fun": (TypeError, "takes a function", {"fun": 3.0}),
    "method": (ValueError, "unknown method 'hybr'", {"method": "hybr"}),
    "xtol": (ValueError, "xtol must be 0 or more", {"xtol": -1.0}),
    "xtol word": (TypeError, "xtol must be a number of 0 or more", {"xtol": "small"}),
    "max_nfev": (ValueError, "a whole number of 1 or more for max_nfev", {"max_nfev": 0}),
    "max_nfev float": (ValueError, "root needs a whole number .* got 2.5", {"max_nfev": 2.5}),
    "maxiter": (TypeError, "root has no argument maxiter; pass max_nfev=", {"maxiter": 3}),
    "bounds": (TypeError, "call least_squares, which takes bounds", {"bounds": (0, 1)}),
    "flag": (TypeError, "implicit must be True or False", {"implicit": 3}),
    "jac's place": (TypeError, "root takes args third, .* got 'lm'; pass method=", {"args": "lm"}),
    "arity": (TypeError, "root calls fun", {"args": (1, 2)}),
    "count": (ValueError, "returned 3 for 2", {"fun": lambda x: torch.cat([x, x[:1]])}),
    "finite": (ValueError, "not finite at x0", {"fun": lambda x: (x - 1).log()}),
    "complex": (TypeError, "must be real", {"x0": torch.zeros(2, dtype=torch.complex128)}),
    "compile": (ValueError, "pass batched=True", {"compile": True}),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told_at_once(case, method):
    error, text, change = WRONG[case]
    given = {"fun": rosenbrock, "x0": torch.zeros(2), "method": method, **change}
    with pytest.raises(error, match=text):
        fo.root(given.pop("fun"), given.pop("x0"), **given)


def test_a_linear_system_takes_one_step_whatever_is_on_its_diagonal():
    A = torch.tensor([[0.0, 2.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 3.0]], dtype=torch.float64)
    found = fo.root(lambda x: A @ x - 1, torch.zeros(3, dtype=torch.float64))
    assert (found.success, found.nit) == (True, 1)


@pytest.mark.parametrize("method", METHODS)
def test_the_limit_of_evaluations(method):
    x0 = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    found = fo.root(rosenbrock, x0, method=method, max_nfev=2)
    assert (found.status, found.nfev, found.success) == (0, 2, False)


NO_ROOT = {
    "parabola": (lambda x: x * x + 1, torch.ones(1)),
    "parabola from its side": (lambda x: x * x + 1, torch.full((1,), 0.7)),
    "constant": (lambda x: 0 * x + 1, torch.ones(1)),
    "parallel lines": (lambda x: torch.stack([x.sum() - 2, 2 * x.sum() - 5]), torch.zeros(2)),
    "no least value": (lambda x: torch.exp(x / 100) + 0.5, torch.full((1,), 0.7)),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NO_ROOT)
def test_a_least_sum_of_squares_is_no_root(name, method):
    fun, x0 = NO_ROOT[name]
    found = fo.root(fun, x0.double(), method=method)
    assert not found.success
    assert found.status == -2 or (found.status == 0 and name == "no least value")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("compile", [False, True])
def test_a_root_with_a_singular_jacobian_is_one(compile, dtype):
    """Newton's step does not exist, or is long: values are as small as they can be."""

    def same_lines(x):
        s = x[0] + x[1]
        return torch.stack([s - 3, 2 * s - 6])

    x0 = torch.tensor([[0.0, 0.0], [0.1, 0.3], [4.0, -2.0]], dtype=dtype)
    found = fo.root(same_lines, x0, method="lm", batched=True, compile=compile)
    assert bool(found.success.all())
    assert bool((found.x.sum(-1) - 3 < 1e-6).all())


@pytest.mark.parametrize(
    "solver", [fo.minimize, fo.root, fo.least_squares], ids=lambda f: f.__name__
)
def test_inference_mode_is_refused(solver):
    with torch.inference_mode(), pytest.raises(RuntimeError, match="call it under"):
        solver(lambda x: (x - 3).square().sum().reshape(1), torch.zeros(1))


@pytest.mark.parametrize("compile", [False, True])
def test_one_evaluation_is_one(compile):
    x0 = torch.full((3, 2), 0.5, dtype=torch.float64)
    how = {"batched": True, "compile": compile, "max_nfev": 1}
    results = [
        fo.minimize(lambda x: (x**2).sum(), x0, **how),
        fo.root(lambda x: x**2 - 1, x0, **how),
        fo.least_squares(lambda x: x**2 - 1, x0, **how),
    ]
    for found in results:
        assert found.nfev.tolist() == [1, 1, 1]
        assert found.status.tolist() == [0, 0, 0]
        assert torch.equal(found.x, x0)


def beside(big: float, least: float) -> Any:
    """Two equations, of which the second has no root, but for least = 0."""
    return lambda x: torch.stack([x[0] - big, x[1] ** 2 + least])


@pytest.mark.parametrize("method", METHODS)
def test_a_large_unknown_hides_no_other(method):
    """Steps were compared with the norm of all unknowns."""

    def coupled(x: Tensor) -> Tensor:
        rest = x[0] - 1e6
        return torch.stack([rest, (x[1] - 1.1) * torch.exp(0.3 * x[1]) + 1e-6 * rest])

    def at(*x: float) -> Tensor:
        return torch.tensor(x, dtype=torch.float64)

    found = fo.root(coupled, at(9e5, 0.8), method=method)
    assert found.success
    rtol = 1e-10 if method == "lm" else 1e-14
    torch.testing.assert_close(found.x, at(1e6, 1.1), rtol=rtol, atol=0)
    for big in (1e6, 1e8):
        for x in (1.0, -0.7):
            assert not fo.root(beside(big, 1e-3), at(big / 2, x), method=method).success
    if method != "lm":  # which ends by the norm of all unknowns
        assert fo.root(beside(1e6, 0.0), at(5e5, 1.0), method=method).success


@pytest.mark.parametrize("unit", [1e-20, 1e160])
@pytest.mark.parametrize("method", METHODS)
def test_the_unit_of_unknowns_does_not_matter(method, unit):
    def fun(x: Tensor) -> Tensor:
        return torch.stack([x[0] / unit - 1.5, (x[1] / unit) ** 3 - 2])

    found = fo.root(fun, unit * torch.tensor([1.0, 5.0], dtype=torch.float64), method=method)
    exact = torch.tensor([1.5, 2 ** (1 / 3)], dtype=torch.float64)
    assert found.success
    torch.testing.assert_close(found.x / unit, exact, rtol=1e-10, atol=0)
