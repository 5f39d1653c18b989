"""Bounds: never evaluated outside, and no worse than the better of scipy's two methods."""

import numpy as np
import pytest
import torch
from fits import beale, curves, decay, powell, rosenbrock, wood

import functional_optim as fo

optimize = pytest.importorskip("scipy.optimize")


Y = curves(1)[1][0]
CASES = {
    "rosenbrock": (rosenbrock, [-1.2, 1.0], [-1.5, -2.0], [0.5, 2.0]),
    "rosenbrock at a corner": (rosenbrock, [-2.0, 2.0], [-2.0, 1.5], [2.0, 3.0]),
    "powell": (powell, [3.0, -1.0, 0.0, 1.0], [0.1, -20.0, -1.0, -1.0], [100.0, 20.0, 1.0, 50.0]),
    "wood": (wood, [-3.0, -1.0, -3.0, -1.0], [-100.0] * 4, [0.0, 10.0, 100.0, 100.0]),
    "beale": (beale, [1.0, 1.0], [0.6, 0.5], [10.0, 100.0]),
    "decay": (lambda x: decay(x, Y), [1.0, 0.5, 0.5], [0.0, 0.0, 0.4], [9.0, 0.6, 9.0]),
    "fixed": (lambda x: decay(x, Y), [1.0, 0.5, 0.5], [0.0, 0.5, 0.0], [9.0, 0.5, 9.0]),
}


@pytest.mark.parametrize("case", CASES)
def test_no_worse_than_scipy_and_never_outside(case):
    fun, x0, lower, upper = CASES[case]
    low, high = (torch.tensor(x, dtype=torch.float64) for x in (lower, upper))
    seen = []

    def watched(x):
        if not torch._C._functorch.is_functorch_wrapped_tensor(x):
            seen.append(x.detach().clone())
        return fun(x)

    found = fo.least_squares(
        watched, torch.tensor(x0, dtype=torch.float64), bounds=(low, high), ftol=1e-12,
        xtol=1e-12, gtol=1e-10,
    )  # fmt: skip
    points = torch.stack(seen)
    assert len(points) > 3
    assert bool(((points >= low) & (points <= high)).all())
    assert found.success

    def plain(x):
        return fun(torch.as_tensor(x)).numpy()

    spread = [h if h > a else h + 1e-9 for a, h in zip(lower, upper, strict=True)]
    begin = np.clip(x0, np.array(lower) + 1e-10, np.array(spread) - 1e-10)
    costs = [
        optimize.least_squares(
            plain, begin, bounds=(lower, spread), method=method, xtol=1e-12, ftol=1e-12, gtol=1e-10
        ).cost
        for method in ("trf", "dogbox")
    ]
    assert float(found.cost) <= min(costs) * (1 + 1e-7) + 1e-15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("solver", [fo.least_squares, fo.minimize], ids=lambda f: f.__name__)
def test_bounds_of_more_digits_than_x0_are_rounded_inwards(solver, dtype):
    low = torch.tensor([0.1, -0.3, -1e300], dtype=torch.float64)
    high = torch.tensor([0.7, 0.7, 0.1], dtype=torch.float64)
    seen = []

    def fun(x):  # lower beyond both ends
        if not torch._C._functorch.is_functorch_wrapped_tensor(x):
            seen.append(x.detach().double())
        r = x - torch.tensor([-1.0, 2.0, 3.0], dtype=dtype)
        return r if solver is fo.least_squares else r.square().sum()

    start = low.clamp(min=-1).to(dtype)  # at the bounds, rounded to nearest
    found = solver(fun, start, bounds=(low, high))
    points = torch.stack([*seen, found.x.double()])
    assert len(points) >= 3
    assert bool(((points >= low) & (points <= high)).all())
    ends = [float(x) for x in (low[0], high[1], high[2])]
    assert torch.allclose(found.x.double(), torch.tensor(ends).double(), rtol=1e-2)
    assert found.active_mask.tolist() == [-1, 1, 1]

    at = torch.full((3,), 0.1, dtype=dtype)  # numbers are those of x0's dtype
    fixed = solver(fun, at, bounds=(0.1, {torch.float32: 0.1}.get(dtype, 0.2)))
    assert float(fixed.x[0]) == float(torch.tensor(0.1, dtype=dtype).float())
    narrow = low.nextafter(high)
    with pytest.raises(ValueError, match="no number of x0's dtype is between"):
        solver(fun, narrow.to(dtype), bounds=(narrow, narrow))


def test_a_step_to_a_bound_ends_at_it_to_the_last_bit():
    """x + (bound − x) is often another number than the bound."""
    x0, y = curves(200)
    upper = torch.full((200, 3), torch.inf, dtype=torch.float64)
    upper[:, 2] = torch.rand(200, dtype=torch.float64) / 20
    x0[:, 2] = -3.0
    found = fo.least_squares(decay, x0, (y,), bounds=(None, upper), batched=True)
    assert bool((found.x <= upper).all())
    assert int((found.x == upper).sum()) > 100
    assert torch.equal(found.active_mask == 1, found.x == upper)


def test_the_mask_names_the_bound_and_gtol_looks_at_free_parameters():
    found = fo.least_squares(
        rosenbrock,
        torch.tensor([-1.2, 1.0], dtype=torch.float64),
        bounds=(None, torch.tensor([0.5, 9.0])),
    )
    assert found.active_mask.tolist() == [1, 0]
    solution = torch.tensor([0.5, 0.25], dtype=torch.float64)
    at_once = fo.least_squares(rosenbrock, solution, bounds=(None, solution.new_tensor([0.5, 9.0])))
    assert (at_once.status, at_once.nfev) == (1, 1)
    assert found.x[0] == 0.5
    assert float(found.optimality) < 1e-4 < 0.4 < float(found.grad.abs().max())


def test_trees_and_bounds_of_each_problem():
    x0, y = curves(3)
    low = torch.tensor([[0.0], [5.0], [0.0]], dtype=torch.float64)
    start = {"a": x0[:, :1].maximum(low), "rest": x0[:, 1:]}

    def fun(x, y):
        return decay(torch.cat([x["a"], x["rest"]]), y)

    found = fo.least_squares(
        fun, start, (y,), bounds=({"a": low, "rest": None}, None), batched=True
    )
    assert found.active_mask["a"].tolist() == [[0], [-1], [0]]
    assert not found.active_mask["rest"].any()
    free = fo.least_squares(decay, x0, (y,), batched=True)
    assert torch.allclose(found.x["a"][[0, 2], 0], free.x[[0, 2], 0], rtol=1e-5)


@pytest.mark.parametrize("compile", [False, True])
def test_linear_problems_end_at_their_minima_also_in_float32(compile):
    """A step of coupled parameters may lead one out of the box that alone would move inside."""
    gen = torch.Generator().manual_seed(1)
    n, m, many = 6, 9, 400
    A = torch.randn(many, m, n, generator=gen) * torch.randn(many, 1, n, generator=gen).exp()
    b = 3 * torch.randn(many, m, generator=gen)
    low, high = -torch.rand(many, n, generator=gen), torch.rand(many, n, generator=gen)
    x0 = low + (high - low) * torch.rand(many, n, generator=gen)

    def fun(x, A, b):
        return A @ x - b

    found = fo.least_squares(fun, x0, (A, b), bounds=(low, high), batched=True, compile=compile)
    assert bool(found.success.all())
    wide = [x.double().numpy() for x in (A, b, low, high)]
    least = [
        optimize.lsq_linear(A, b, (u, v), tol=1e-12).cost for A, b, u, v in zip(*wide, strict=True)
    ]
    assert bool((found.cost.numpy() <= np.array(least) * (1 + 1e-4)).all())


@pytest.mark.parametrize("solver", [fo.least_squares, fo.minimize])
def test_equal_bounds_fix_a_parameter(solver):
    """Also where the gradient is 0, which says nothing of what holds it."""
    low, high = torch.tensor([[-5.0, 1.0], [5.0, 1.0]], dtype=torch.float64)

    def solved(a):
        def fun(x, a):
            r = torch.stack([x[0] - a, x[1] - x[0]])
            return r if solver is fo.least_squares else r.square().sum()

        return solver(fun, low.new_ones(2), (a,), bounds=(low, high))

    found = solved(low[1])
    assert found.active_mask.tolist() == [0, 1]
    slope = torch.func.jacrev(lambda a: solved(a).x)(low[1])
    torch.testing.assert_close(slope, low.new_tensor([0.5, 0.0]))
