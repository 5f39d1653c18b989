"""Derivatives of solutions against differences of polished solutions."""

import pytest
import torch
from fits import curves, decay
from torch import Tensor

import functional_optim as fo
from functional_optim.solvers.losses import Loss

ONES = torch.ones(2, dtype=torch.float64)
X0, DATA = curves(2, noise=0.1)
TIGHT = {"ftol": 0.0, "xtol": 0.0, "gtol": 1e-14}
STEP = 1e-5


def polished(x: Tensor, y: Tensor, loss: Loss, upper: Tensor | None) -> Tensor:
    """One problem's solution after steps of Newton's method for what is not at its bound."""

    def cost(x: Tensor) -> Tensor:
        return loss.cost(decay(x, y))

    free = torch.ones(3, dtype=torch.bool) if upper is None else x < upper
    for _ in range(4):
        g, H = torch.func.grad(cost)(x)[free], torch.func.hessian(cost)(x)[free][:, free]
        x = x.index_put((free,), x[free] - torch.linalg.solve(H, g))
    return x


def solved(y: Tensor, begin: Tensor = X0[0], **how) -> Tensor:
    """The solution, where a second run ends at once: it begins at the polished end of the first."""
    first = fo.least_squares(decay, begin, (y.detach(),), **TIGHT, **how)
    loss = Loss(how.get("loss", "linear"), how.get("f_scale", 1.0))
    upper = how["bounds"][1] if "bounds" in how else None
    data = y.detach()
    while torch._C._functorch.is_functorch_wrapped_tensor(data):
        data = torch._C._functorch.get_unwrapped(data)
    x = first.x
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    start = polished(x, data, loss, upper)
    return fo.least_squares(decay, start, (y,), **{**TIGHT, "gtol": 1e-10}, **how).x


def difference(f, y: Tensor, along: Tensor) -> Tensor:
    return (f(y + STEP * along) - f(y - STEP * along)) / (2 * STEP)


HOW = {
    "plain": {},
    "dogleg": {"method": "dogleg"},
    "kernel": {"linear_solver": "kernel"},
    "soft_l1": {"loss": "soft_l1", "f_scale": 0.1},
    "huber": {"loss": "huber", "f_scale": 0.1},
    "cauchy": {"loss": "cauchy", "f_scale": 0.3},
    "arctan": {"loss": "arctan", "f_scale": 0.5},
    "bounds": {"bounds": (None, torch.tensor([9.0, 1.2, 0.1], dtype=torch.float64))},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_all_modes_agree_with_differences(how):
    y = DATA[0]
    along = torch.randn(30, dtype=torch.float64)

    def f(y: Tensor) -> Tensor:
        return solved(y, torch.tensor([1.0, 1.0, 0.1], dtype=torch.float64), **how)

    expected = difference(f, y, along)
    assert expected.abs().max() > 1e-3
    primal, tangent = torch.func.jvp(f, (y,), (along,))
    assert torch.equal(primal, f(y))
    assert torch.allclose(tangent, expected, atol=1e-6)
    rows = torch.func.jacrev(f)(y)
    assert torch.allclose(rows @ along, expected, atol=1e-6)
    assert torch.allclose(torch.func.jacfwd(f)(y), rows, atol=1e-10)
    own = y.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(own) @ torch.ones(3, dtype=torch.float64), own)
    assert torch.allclose(g, rows.sum(0), atol=1e-10)


def lowest(a: Tensor) -> Tensor:
    """A minimum, whose derivatives are those of an equation."""
    how = {"gtol": 1e-12, "ftol": 0.0}
    return fo.minimize(lambda x, a: (x**4 - a * x).sum() + x.prod(), ONES, (a,), **how).x


@pytest.mark.parametrize(("end", "y"), [(solved, DATA[1]), (lowest, torch.tensor([3.0, 5.0]))])
def test_second_derivatives(end, y):
    y = y.double()
    along = torch.randn(y.shape, dtype=torch.float64)
    H = torch.func.hessian(lambda y: end(y)[1])(y)
    slope = torch.func.grad(lambda y: end(y)[1])
    assert torch.allclose(H @ along, difference(slope, y, along), atol=1e-6)
    assert torch.allclose(H, H.mT, atol=1e-9)


def test_batches_and_what_is_constant_in_them():
    """At a bound and where a problem has not converged, nothing depends on the data."""
    upper = torch.tensor([9.0, 9.0, 0.1], dtype=torch.float64)
    y = torch.stack([DATA[0], DATA[1], torch.full_like(DATA[0], float("nan"))])
    begin = torch.cat([X0, X0[:1]])
    begin[:, 2] = 0.05

    def f(y: Tensor) -> Tensor:
        return fo.least_squares(decay, begin, (y,), batched=True, bounds=(None, upper), **TIGHT).x

    J = torch.func.jacrev(f)(y)
    assert J.shape == (3, 3, 3, 30)
    for i in range(2):
        alone = torch.func.jacrev(lambda own, i=i: solved(own, begin[i], bounds=(None, upper)))(
            y[i]
        )
        assert torch.allclose(J[i, :, i], alone, atol=1e-7)
        assert not J[i, :, 1 - i].any()
    at_bound = f(y)[:2, 2] == 0.1
    assert at_bound.any()
    assert not J[:2, 2, :2][at_bound].any()
    assert not J[2].any()


def test_a_singular_hessian_gives_the_smallest_derivative():
    def fun(x, a):
        return (x[0] + x[1] - a).reshape(1)

    start = torch.zeros(2, dtype=torch.float64)
    a = torch.tensor(3.0, dtype=torch.float64)
    J = torch.func.jacrev(lambda a: fo.least_squares(fun, start, (a,)).x)(a)
    assert torch.allclose(J, torch.full_like(J, 0.5))


NESTED = {
    "reverse": lambda f: torch.func.grad(torch.func.grad(torch.func.grad(f))),
    "forward": lambda f: torch.func.jacfwd(torch.func.jacfwd(torch.func.jacfwd(f))),
    "reverse over forward": lambda f: torch.func.grad(torch.func.jacfwd(torch.func.jacfwd(f))),
    "forward over reverse": lambda f: torch.func.jacfwd(torch.func.grad(torch.func.grad(f))),
}


@pytest.mark.parametrize("third", NESTED.values(), ids=NESTED)
def test_third_derivatives_are_not_finite_instead_of_wrong(third):
    one = torch.tensor(1.0, dtype=torch.float64)

    def anomaly(e):
        return fo.root(lambda E, e: E - e * torch.sin(E) - 1.0, one, (e,)).x

    e = torch.tensor(0.6, dtype=torch.float64)
    assert torch.func.hessian(anomaly)(e).isfinite()
    assert not third(anomaly)(e).isfinite()


def test_numbers_that_are_not_finite_leave_derivatives_as_they_are():
    y = torch.tensor([1.0, float("nan")], dtype=torch.float64)

    def solved(y):
        mean = torch.zeros((), dtype=torch.float64)
        return fo.least_squares(lambda x, y: (x - y[:1]).reshape(1), mean, (y,)).x

    assert torch.func.grad(solved)(y)[0] == 1.0


def minimized(fun, x, *own, **how):
    return fo.minimize(lambda *a: fun(*a).square().sum(), x, *own, **how)


SOLVERS = {"least_squares": fo.least_squares, "minimize": minimized, "root": fo.root}


@pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS)
def test_without_implicit_the_solution_is_a_constant(solve):
    a = ONES.clone().requires_grad_()
    for how in ({}, {"implicit": False}):
        assert solve(lambda x, a: x**3 - a, ONES, (a,), **how).x.requires_grad == (not how)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd, torch.func.jacrev])
@pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS)
def test_the_derivative_of_a_tensor_in_the_closure_is_refused(solve, transform):
    def through_args(a):
        return solve(lambda x, a: x**3 - a, ONES, (a,)).x.sum()

    def as_constant(a):
        return solve(lambda x: x**3 - a.detach(), ONES).x.sum() + a.sum()

    with pytest.raises(ValueError, match=r"not in args; pass it in args, or detach it"):
        transform(lambda a: solve(lambda x: x**3 - a, ONES).x.sum())(8 * ONES)
    torch.testing.assert_close(transform(through_args)(8 * ONES), ONES / 12, atol=1e-4, rtol=1e-4)
    assert torch.equal(transform(as_constant)(8 * ONES), ONES)
    weight = ONES.clone().requires_grad_()  # of another derivative, which needs no args
    other = transform(lambda a: solve(lambda x, a: weight * x**3 - a, ONES, (a,)).x.sum())
    torch.testing.assert_close(other(8 * ONES), ONES / 12, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS)
def test_a_solver_is_refused_under_vmap(solve):
    """Whether the closure or the arguments have a mapped tensor."""
    by_closure = torch.vmap(lambda a: solve(lambda x: x**3 - a, ONES).x)
    by_args = torch.vmap(lambda a: solve(lambda x, a: x**3 - a, a, (a,)).x)
    for call in (by_closure, by_args):
        with pytest.raises(ValueError, match="pass batched=True"):
            call(torch.ones(3, 2).double())


@pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS)
def test_a_solver_in_the_function_of_a_solver_takes_its_point_in_args(solve):
    """The solution of the inner one was a constant for the outer one, which ended elsewhere."""

    def by_closure(x):
        return (solve(lambda y: y**3 + y - x, ONES).x, x)

    def by_args(x):
        return (solve(lambda y, x: y**3 + y - x, ONES, (x,)).x, x)

    def cost(parts):
        return ((parts[0] - parts[1] + 1) ** 2).sum() + parts[1].square().sum()

    with pytest.raises(ValueError, match=r"not in args; pass it in args, or detach it"):
        fo.minimize(lambda x: cost(by_closure(x)), ONES)
    found = fo.minimize(lambda x: cost(by_args(x)), ONES)
    torch.testing.assert_close(found.x, 0 * ONES, rtol=0, atol=1e-4)


@pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS)
def test_points_in_a_closure_may_require_gradients(solve):
    """As those at which a function takes derivatives of a network."""
    t = ONES.clone().requires_grad_()

    def fun(x):
        (slope,) = torch.autograd.grad((x**3 * t**2).sum(), t, create_graph=True)
        return slope - 16  # 2 x³ t

    found = solve(fun, ONES).x
    torch.testing.assert_close(found, 2 * ONES, rtol=0, atol=1e-4)
    assert not found.requires_grad


FIELDS = {
    "minimize": lambda a, **how: (
        fo.minimize(
            lambda x, a: ((x - a) ** 2).sum() + (x * a).sum(), ONES, (a,), gtol=1e-12, **how
        ).fun
    ),
    "cost": lambda a, **how: fo.least_squares(lambda x, a: [x - a, x * a], ONES, (a,), **how).cost,
    "fun": lambda a, **how: (
        fo.least_squares(lambda x, a: torch.cat([x - a, x * a]), ONES, (a,), **how)
        .fun.square()
        .sum()
    ),
    "huber": lambda a, **how: (
        fo.least_squares(
            lambda x, a: [x - a, x * a], ONES, (a,), loss="huber", f_scale=0.7, **how
        ).cost
    ),
}


@pytest.mark.parametrize("bounds", [None, (0.8, 1.2)])
@pytest.mark.parametrize("value", FIELDS.values(), ids=FIELDS)
def test_the_value_at_the_solution_has_derivatives(value, bounds):
    """They were 0 in torch.func's transforms."""
    a, along = torch.tensor([0.9, 1.7]).double(), torch.tensor([0.6, -0.8]).double()

    def f(a):
        return value(a, bounds=bounds)

    g = torch.func.grad(f)(a)
    torch.testing.assert_close(g @ along, difference(f, a, along), rtol=1e-5, atol=1e-7)
    primal, tangent = torch.func.jvp(f, (a,), (along,))
    torch.testing.assert_close(tangent, g @ along)
    assert torch.equal(primal, f(a))
    own = a.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(f(own), own)[0], g)
    second = difference(torch.func.grad(f), a, along)
    torch.testing.assert_close(torch.func.hessian(f)(a) @ along, second, rtol=1e-5, atol=1e-6)


def test_values_of_a_batch_have_derivatives_where_it_has_converged():
    a = torch.tensor([[0.9, 1.7], [float("nan"), 1.0]]).double()

    def total(a):
        found = fo.least_squares(
            lambda x, a: torch.cat([x - a, x * a]), torch.stack([ONES, ONES]), (a,), batched=True
        )
        return found.cost[0] + found.cost[1] + found.fun[:, 0].sum()

    g = torch.func.grad(total)(a)
    assert g[0].ne(0).all()
    assert not g[1].any()


LOST = "bounds, x_scale or f_scale require derivatives; detach them"


@pytest.mark.parametrize("solve", [fo.minimize, fo.least_squares])
def test_bounds_and_scales_have_no_derivatives(solve):
    def scaled(scale, name):
        how = {"loss": "huber", name: scale}
        return fo.least_squares(lambda x: torch.cat([x - 3, x]), ONES, **how).x.sum()

    def ended(upper):
        value = (lambda x: (x - 3).square().sum()) if solve is fo.minimize else (lambda x: x - 3)
        return solve(value, ONES, bounds=(None, upper)).x.sum()

    upper = torch.tensor(1.2, dtype=torch.float64)
    assert ended(upper) == 2.4
    for transform in (torch.func.grad, torch.func.jacfwd):
        with pytest.raises(ValueError, match=LOST):
            transform(ended)(upper)
        assert transform(lambda u: ended(u.detach()) + u)(upper) == 1
        assert transform(lambda u: ended(upper) + u)(upper) == 1
    with pytest.raises(ValueError, match=LOST):
        ended(upper.clone().requires_grad_())
    for name in ("x_scale", "f_scale"):
        assert scaled(upper, name).isfinite()
        with pytest.raises(ValueError, match=LOST):
            torch.func.grad(scaled)(upper, name)
