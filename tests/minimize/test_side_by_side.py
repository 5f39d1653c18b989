"""Many minima side by side: each as it would be alone, compiled too; derivatives of solutions."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import recorded_graphs
from sampling import some
from torch import Tensor
from valleys import rosenbrock

import functional_optim as fo
from functional_optim import tree
from functional_optim.solvers import compiled, programs, slots

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
KEPT = [
    (n, how)
    for n, how in SIZES
    if n == 5 or (n == 16 and how == {"method": "bfgs"}) or (n == 30 and "bounds" not in how)
]


@pytest.mark.parametrize(("n", "how"), some(SIZES, 0, KEPT), ids=str)
def test_bits_do_not_depend_on_neighbours_order_or_nan(how, n):
    """Long vectors are followed for some iterations only."""
    x0, a = starts(37, n)
    a[5] = float("nan")
    a[9] = 1e80
    how = how if n == 5 else {**how, "maxiter": 12}
    whole = fo.minimize(valley, x0, (a,), batched=True, **how)
    order = torch.randperm(37)
    mixed = fo.minimize(valley, x0[order], (a[order],), batched=True, **how)
    good = (order != 5) & (order != 9)
    assert same(rows(mixed, good), rows(whole, order[good]))
    for i in (0, 8, 36) if n == 5 else (0, 36):
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
@pytest.mark.parametrize("method", ["l-bfgs-b", "newton-cg"])
def test_derivatives_of_solutions(method, bounds):
    x0, a = starts(3)
    how = {"method": method, "bounds": bounds, "gtol": 1e-9, "ftol": 0.0, "batched": True}
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


SOLVED = [(fo.least_squares, "lm"), (fo.minimize, None), (fo.minimize, "newton-cg")]
SOLVED += [(fo.root, "newton"), (fo.root, "broyden")]


@pytest.mark.parametrize(("solver", "method"), SOLVED)
def test_none_in_args_is_no_argument(solver, method):
    y = (torch.rand(3, 2, dtype=torch.float64) + 0.5).requires_grad_()

    def fun(x, args):
        r = x - args["y"] * args["pair"][0]
        return r.square().sum() if solver is fo.minimize else r

    args = {"y": y, "pair": (torch.full((3,), 2), None)}
    found = solver(fun, torch.zeros_like(y), (args,), method=method, batched=True)
    torch.testing.assert_close(found.x, 2 * y)
    (derived,) = torch.autograd.grad(found.x.sum(), y)
    torch.testing.assert_close(derived, torch.full_like(y, 2.0))


# ---------------------------------------------------------------- compiled
def solved(method: str, x0: Tensor, a: Tensor, **how: Any) -> Any:
    if method in ("newton", "broyden"):
        return fo.root(torch.func.grad(valley), x0, (a,), method=method, batched=True, **how)
    return fo.minimize(valley, x0, (a,), method=method, bounds=(-1.5, 0.8), batched=True, **how)


@pytest.mark.parametrize(
    "method", ["l-bfgs-b", "bfgs", "ssbroyden", "newton-cg", "newton", "broyden"]
)
def test_one_graph_or_library_solves_any_number_of_problems(method, fresh_dynamo, monkeypatch):
    graphs = recorded_graphs(monkeypatch)
    monkeypatch.setattr(compiled, "BLOCK", 64)
    compiled._steps.clear()
    x0, a = starts(150)
    a[7] = torch.nan
    eager = solved(method, x0, a)
    assert not graphs
    found = solved(method, x0, a, compile=True)
    count = int(method == "newton-cg")
    assert len(graphs) == count
    assert int(found.status[7]) == -1
    assert torch.equal(found.success, eager.success)
    good = eager.success
    value = valley if method not in ("newton", "broyden") else lambda x, a: x.sum()
    f = [torch.vmap(value)(r.x[good], a[good]) for r in (found, eager)]
    assert torch.allclose(*f, rtol=1e-6)
    order = torch.randperm(150)
    mixed = solved(method, x0[order], a[order], compile=True)
    assert torch.equal(mixed.x, found.x[order])
    few = solved(method, x0[20:30], a[20:30], compile=True)
    assert torch.equal(few.x, found.x[20:30])
    assert len(graphs) == count
    compiled._steps.clear()


@dataclass(frozen=True)
class Bowl:
    name: str
    center: Tensor = field(compare=False)

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.center).square().sum()


def test_a_graph_is_that_of_one_function_and_one_tree(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda fun, **how: fun)
    compiled._steps.clear()
    x0 = torch.zeros(3, 2, dtype=torch.float64)
    how: Any = {"method": "newton-cg", "batched": True, "compile": True}
    for center in (torch.ones(2).double(), torch.full((2,), 3.0).double()):
        found = fo.minimize(Bowl("equal to the other", center), x0, **how)
        torch.testing.assert_close(found.x, center.expand(3, 2))

    def fitted(p: dict[str, Tensor]) -> Tensor:
        p = {"a": torch.ones(2), "b": torch.ones(2), **p}
        return (p["a"] - 1).square().sum() + (p["b"] - 3).square().sum()

    for name, end in (("a", 1.0), ("b", 3.0)):
        x = fo.minimize(fitted, {name: x0}, **how).x
        torch.testing.assert_close(x[name], torch.full_like(x0, end))
    compiled._steps.clear()


def test_inside_of_transforms_all_runs_eagerly(monkeypatch):
    def refused(fn, **how):
        def graph(*args):
            raise AssertionError("a graph was called")

        return graph

    monkeypatch.setattr(torch, "compile", refused)
    compiled._steps.clear()
    programs._known.clear()
    x0, a = torch.ones(3, 2, dtype=torch.float64), torch.full((3, 2), 2.0, dtype=torch.float64)
    solvers = [
        lambda a, **how: fo.minimize(lambda x, a: ((x - a) ** 2).sum(), x0, (a,), **how),
        lambda a, **how: fo.root(lambda x, a: x**2 - a, x0, (a,), **how),
        lambda a, **how: fo.least_squares(lambda x, a: x**2 - a, x0, (a,), **how),
    ]
    for solver in solvers:
        plain, graph = [
            torch.func.jacrev(lambda a, s=solver, c=c: s(a, batched=True, compile=c).x)(a)
            for c in (False, True)
        ]
        assert torch.equal(plain, graph)
        assert plain.any()
        assert not programs._known
        solver(a, batched=True, compile=True)
        assert programs._known
        programs._known.clear()
    compiled._steps.clear()


@pytest.mark.full
def test_a_graph_rounds_as_torch_does(fresh_dynamo):
    """Inductor left out the rounding of x to a half type."""
    x = torch.rand(5, generator=torch.Generator().manual_seed(0))
    graph = compiled.in_blocks(object(), lambda x, own: x.bfloat16().float() - own)
    assert torch.equal(graph(x, torch.ones(5)), x.bfloat16().float() - 1)
