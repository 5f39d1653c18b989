"""Many minima side by side: each as it would be alone; derivatives of solutions."""

from __future__ import annotations

import pytest
import torch
from sampling import some
from torch import Tensor
from valleys import rosenbrock

import functional_optim as fo
from functional_optim import tree
from functional_optim.solvers import slots

FIELDS = ("x", "fun", "grad", "optimality", "nfev", "nit", "status", "active_mask")
WAYS = [
    {"method": "l-bfgs-b"},
    {"method": "bfgs"},
    {"method": "l-bfgs-b", "bounds": (-1.5, 0.8)},
    {"method": "bfgs", "bounds": (None, 0.8)},
    {"method": "ssbfgs"},
    {"method": "ssbroyden"},
    {"method": "ssbroyden", "bounds": (None, 0.8)},
    {"method": "newton-cg"},
    {"method": "newton-cg", "bounds": (-1.5, 0.8)},
]


def valley(x: Tensor, a: Tensor) -> Tensor:
    return rosenbrock(x * a) + (x - a).square().sum()


def starts(count: int, n: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    x0 = torch.rand(count, n, dtype=torch.float64, generator=generator) * 2 - 1.3
    return x0, torch.rand(count, n, dtype=torch.float64, generator=generator) + 0.5


def rows(result, index):
    return [tree.map(lambda x: x[index], getattr(result, name)) for name in FIELDS]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


SIZES = [(n, how) for how in WAYS for n in (5, 16, 30)]
KEPT = [(n, how) for n, how in SIZES if n != 16 or how == {"method": "bfgs"}]


@pytest.mark.parametrize(("n", "how"), some(SIZES, 0, KEPT), ids=str)
def test_bits_do_not_depend_on_neighbours_order_or_nan(how, n):
    """Long vectors are followed for some iterations only."""
    x0, a = starts(37, n)
    a[5] = float("nan")
    a[9] = 1e80
    how = how if n == 5 else {**how, "maxiter": 25}
    whole = fo.minimize(valley, x0, (a,), batched=True, **how)
    order = torch.randperm(37)
    mixed = fo.minimize(valley, x0[order], (a[order],), batched=True, **how)
    good = (order != 5) & (order != 9)
    assert same(rows(mixed, good), rows(whole, order[good]))
    for i in (0, 8, 36):
        alone = fo.minimize(valley, x0[i : i + 1], (a[i : i + 1],), batched=True, **how)
        assert same(rows(alone, 0), rows(whole, i))
        if n == 5:
            single = fo.minimize(valley, x0[i], (a[i],), **how)
            assert torch.allclose(single.x, whole.x[i], atol=1e-3)
            assert abs(single.nfev - int(whole.nfev[i])) <= 5
    assert int(whole.status[5]) == -1
    assert torch.equal(whole.x[5], x0[5])
    assert n != 5 or bool(whole.success[torch.arange(37) > 9].all())


def test_bits_do_not_depend_on_the_number_of_slots(monkeypatch):
    x0, a = starts(100)
    whole = fo.minimize(valley, x0, (a,), bounds=(-1.5, 0.8), batched=True)
    monkeypatch.setattr(slots, "LIMIT", 1)
    parts = fo.minimize(valley, x0, (a,), bounds=(-1.5, 0.8), batched=True)
    assert same(rows(parts, slice(None)), rows(whole, slice(None)))


def test_bounds_of_each_problem_are_kept():
    """Outside of them the function is not finite."""
    x0, a = starts(200)
    lower, upper = x0 - 0.1, x0 + torch.rand_like(x0)

    def fun(x, a, low, high):
        return valley(x, a) + torch.where((x < low) | (x > high), torch.nan, 0.0).sum()

    args = (a, lower, upper)
    found = fo.minimize(fun, x0, args, bounds=(lower, upper), batched=True)
    assert bool(found.success.all())
    assert bool(((found.x >= lower) & (found.x <= upper)).all())
    assert torch.equal(found.active_mask == 1, found.x == upper)
    assert int((found.active_mask != 0).sum()) > 300


def polished(a: Tensor, x: Tensor, free: Tensor) -> Tensor:
    for _ in range(4):
        g = torch.func.grad(valley)(x, a)[free]
        H = torch.func.hessian(valley)(x, a)[free][:, free]
        x = x.index_put((free,), x[free] - torch.linalg.solve(H, g))
    return x


@pytest.mark.parametrize("bounds", [None, (None, 0.8)])
def test_derivatives_of_solutions(bounds):
    x0, a = starts(3)
    how = {"bounds": bounds, "gtol": 1e-9, "ftol": 0.0, "batched": True}
    found = fo.minimize(valley, x0, (a,), **how)
    assert bool(found.success.all())

    def f(a):
        return fo.minimize(valley, x0, (a,), **how).x

    J = torch.func.jacrev(f)(a)
    assert torch.allclose(torch.func.jacfwd(f)(a), J, atol=1e-9)
    own = a.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(own).sum(), own)
    assert torch.allclose(g, J.sum((0, 1)), atol=1e-9)
    along = torch.randn(5, dtype=torch.float64)
    for i in range(3):
        free = found.active_mask[i] == 0
        ends = [polished(a[i] + s * along, found.x[i], free) for s in (1e-5, -1e-5)]
        assert torch.allclose(J[i, :, i] @ along, (ends[0] - ends[1]) / 2e-5, atol=1e-6)
    if bounds is not None:
        at_bound = found.active_mask != 0
        assert at_bound.any()
        assert not J[at_bound].any()


def test_second_derivatives():
    x0, a = starts(1)

    def f(a: Tensor) -> Tensor:
        return fo.minimize(valley, x0[0], (a,), gtol=1e-9, ftol=0.0).x[1]

    H = torch.func.hessian(f)(a[0])
    along = torch.randn(5, dtype=torch.float64)
    slope = torch.func.grad(f)
    difference = (slope(a[0] + 1e-5 * along) - slope(a[0] - 1e-5 * along)) / 2e-5
    assert torch.allclose(H @ along, difference, atol=1e-4, rtol=1e-4)


def test_without_implicit_the_solution_is_a_constant():
    x0, a = starts(1)
    a = a[0].requires_grad_()
    assert fo.minimize(valley, x0[0], (a,)).x.requires_grad
    assert not fo.minimize(valley, x0[0], (a,), implicit=False).x.requires_grad


def test_a_solver_under_vmap_is_an_error():
    x0, a = starts(3)
    with pytest.raises(ValueError, match="pass batched=True"):
        torch.vmap(lambda x, a: fo.minimize(valley, x, (a,)).x)(x0, a)
    with pytest.raises(ValueError, match="pass batched=True"):
        torch.vmap(lambda x, a: fo.root(lambda x, a: x - a, x, (a,)).x)(x0, a)
