"""Newton's method by conjugate gradients: quadratics, saddles, bounds, and derivatives."""

import pytest
import torch
from torch import Tensor
from valleys import rosenbrock

import functional_optim as fo


def quadratic(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    A = torch.randn(n, n, dtype=torch.float64, generator=generator)
    c = torch.randn(n, dtype=torch.float64, generator=generator)
    return A @ A.mT / n + torch.eye(n, dtype=torch.float64), c


def solved(fun, x0, **how):
    return fo.minimize(fun, x0, method="newton-cg", **how)


def test_a_quadratic_of_several_scales_takes_few_steps():
    A, c = quadratic(20)
    s = torch.logspace(-1, 1, 20, dtype=torch.float64)

    def fun(x: Tensor) -> Tensor:
        z = s * x
        return 0.5 * z @ A @ z - c @ z

    x0 = torch.zeros(20, dtype=torch.float64)
    found = solved(fun, x0, gtol=1e-7, ftol=0.0)
    assert found.success
    assert torch.allclose(found.x * s, torch.linalg.solve(A, c), atol=1e-5)
    assert found.nit < 30
    slow = fo.minimize(fun, x0, gtol=1e-7, ftol=0.0)
    assert found.nfev < 0.5 * slow.nfev


def test_products_are_counted_and_bounded():
    A, c = quadratic(30)
    calls = []

    class Product(torch.autograd.Function):
        """A x, which counts how often its derivative is taken."""

        @staticmethod
        def forward(ctx, x):
            return A @ x

        @staticmethod
        def backward(ctx, g):
            calls.append(len(calls))
            return Product.apply(g)

    def fun(x: Tensor) -> Tensor:
        return 0.5 * x @ Product.apply(x) - c @ x

    x0 = torch.zeros(30, dtype=torch.float64)
    found = solved(fun, x0, ftol=0.0, gtol=1e-8)
    assert found.success
    # a gradient takes one backward of A x, a product with the Hessian two
    gradients = found.nfev + found.nit + 1
    assert 2 * found.nhev <= len(calls) <= 2 * found.nhev + gradients
    assert 2 * found.nit < found.nhev <= 60 * found.nit
    assert fo.minimize(fun, x0).nhev == 0


def test_variables_at_their_bounds_take_no_part_in_a_step():
    A, c = quadratic(30)
    A = A - 0.95 * torch.eye(30, dtype=torch.float64)
    x0 = torch.zeros(30, dtype=torch.float64)
    found = solved(lambda x: 0.5 * x @ A @ x - c @ x, x0, bounds=(-0.1, 0.1), ftol=0.0, gtol=1e-10)
    assert found.success
    assert 10 < int((found.active_mask != 0).sum()) < 30
    assert found.nit < 12
    assert found.nhev < 60  # with them, hundreds


def test_far_off_a_step_is_not_solved_exactly():
    x0 = torch.linspace(-50, 50, 40, dtype=torch.float64)
    found = solved(lambda x: ((x - 3) ** 4).sum() + 0.01 * rosenbrock(x), x0, gtol=1e-6, ftol=0.0)
    assert found.success
    assert found.nhev < 12 * found.nit


def test_where_the_function_curves_down_it_is_followed():
    """From a point beside a saddle, whose gradient nearly vanishes, the first step leads far."""

    def saddle(x: Tensor) -> Tensor:
        return x[0] ** 2 - x[1] ** 2 + 0.1 * x[1] ** 4

    x0 = torch.tensor([1e-2, 1e-3], dtype=torch.float64)
    found = solved(saddle, x0, gtol=1e-8, return_history=True)
    assert abs(float(found.fun) + 2.5) < 1e-10
    assert found.nfev < 25

    def concave(x: Tensor) -> Tensor:
        return -(x**2).sum() + x[0]

    found = solved(concave, torch.full((3,), 0.1, dtype=torch.float64), bounds=(-1, 2))
    assert found.success
    assert bool((found.active_mask != 0).all())
    line = solved(lambda x: x.sum(), torch.ones(2, dtype=torch.float64), bounds=(-5, None))
    assert torch.equal(line.x, torch.full_like(line.x, -5.0))


def test_under_torch_func_and_for_functions_without_curvature():
    def outer(a: Tensor) -> Tensor:
        found = solved(lambda x, a: ((x - a) ** 4).sum() + (x * a).sum(), a.detach() * 0, args=(a,))
        return found.x.sum()

    a = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert bool(torch.func.grad(outer)(a).isfinite().all())
    flat = solved(lambda x: x.sum() * 0.0 + 1.0, torch.ones(2, dtype=torch.float64))
    assert (flat.status, flat.nhev) == (1, 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_function_without_a_minimum_is_no_success(dtype):
    """Its decrease ends at the smallest number of the dtype."""
    found = solved(lambda x: x.sum(), torch.ones(2, dtype=dtype))
    assert float(found.fun) < -3e38
    assert (found.status, found.success) == (-2, False)
