"""Known minima, with bounds and without, never outside of them, and no more work than scipy's."""

import functools
from typing import Any

import pytest
import torch
from sampling import some
from valleys import BOUNDED, FREE, rosenbrock

import functional_optim as fo

optimize = pytest.importorskip("scipy.optimize")
METHODS = ("l-bfgs-b", "bfgs", "ssbfgs", "ssbroyden", "newton-cg")
ALL = {**FREE, **BOUNDED}


def watched(fun: Any, seen: list[torch.Tensor]) -> Any:
    def recorded(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.detach().clone())
        return fun(x)

    return recorded


@functools.cache
def by_scipy(name, **options):
    valley = ALL[name]

    def plain(z):
        x = torch.tensor(z, requires_grad=True)
        f = valley.fun(x)
        (g,) = torch.autograd.grad(f, x)
        return float(f.detach()), g.numpy()

    bounds = None if valley.lower is None else list(zip(valley.lower, valley.upper, strict=True))
    begin = valley.start()
    begin = begin if bounds is None else begin.clamp(*valley.bounds())
    return optimize.minimize(
        plain, begin.numpy(), jac=True, method="L-BFGS-B", bounds=bounds, options=options
    )


def solved(valley, method, dtype=torch.float64, **how):
    x0, bounds = valley.start(dtype), valley.bounds(dtype)
    x0 = x0 if bounds is None else x0.clamp(*bounds)
    seen = []
    found = fo.minimize(watched(valley.fun, seen), x0, method=method, bounds=bounds, **how)
    points = torch.stack(seen)
    if bounds is not None:
        assert bool(((points >= bounds[0]) & (points <= bounds[1])).all())
    again = found.nit + 1 if method == "newton-cg" else 0
    assert found.nfev <= len(seen) <= found.nfev + again
    assert bool(points.isfinite().all())
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ALL)
def test_known_minima(name, method):
    valley = ALL[name]
    found = solved(valley, method, ftol=0.0, gtol=1e-7)
    distance = min(abs(float(found.fun) - f) for f in valley.least)
    assert found.success or float(found.optimality) < 1e-5, found.message
    assert distance < 1e-6 * max(1.0, abs(valley.least[-1])), float(found.fun)
    exact = torch.func.grad(valley.fun)(found.x)
    assert torch.allclose(found.grad, exact, atol=1e-10, rtol=1e-8)
    assert torch.equal(found.fun, valley.fun(found.x))


def by_turns():
    """Each valley with each method; those that keep a matrix in turns, the rest in `full`."""
    every = [(name, method) for name in ALL for method in METHODS]
    turns = [(name, ("bfgs", "ssbfgs", "ssbroyden")[i % 3]) for i, name in enumerate(ALL)]
    return some(every, 0, [x for x in every if x[1] in ("l-bfgs-b", "newton-cg") or x in turns])


@pytest.mark.parametrize(("name", "method"), by_turns())
def test_float32_ends_at_its_floor(name, method):
    """It is no worse than scipy with the tolerance that float32 allows, and does not search on."""
    valley = ALL[name]
    found = solved(valley, method, torch.float32)
    assert found.x.dtype == torch.float32
    assert bool(found.x.isfinite().all())
    assert found.nfev < 150
    theirs = by_scipy(name, ftol=1.2e-6)
    lower = min(valley.least, key=lambda f: abs(f - float(found.fun)))
    size = max(1.0, abs(theirs.fun))
    assert float(found.fun) <= max(theirs.fun, lower) + 1e-3 * size
    endless = solved(valley, method, torch.float32, gtol=0.0, ftol=0.0)
    assert endless.nfev < 400


def test_evaluations_are_those_of_scipy():
    ours = [solved(x, "l-bfgs-b").nfev for x in ALL.values()]
    theirs = [by_scipy(name).nfev for name in ALL]
    assert sum(ours) <= 1.1 * sum(theirs)


def test_many_variables_and_more_steps_than_the_ring_has_slots():
    x0 = torch.tensor([-1.2, 1.0] * 100, dtype=torch.float64)
    upper = torch.full((200,), 2.0, dtype=torch.float64)
    upper[::5] = 0.5
    for bounds in (None, (None, upper)):
        begin = x0 if bounds is None else x0.minimum(upper)
        found = fo.minimize(rosenbrock, begin, bounds=bounds)
        limits = None if bounds is None else [(None, float(u)) for u in upper]
        theirs = optimize.minimize(
            optimize.rosen, begin.numpy(), jac=optimize.rosen_der, method="L-BFGS-B", bounds=limits
        )
        assert found.success
        assert float(found.fun) <= theirs.fun + 1e-5 * max(1.0, theirs.fun)
        assert found.nfev <= 1.25 * theirs.nfev


def test_statuses():
    x0 = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    assert fo.minimize(rosenbrock, x0).status == 1
    assert fo.minimize(rosenbrock, x0, ftol=1e-2).status == 2
    short = fo.minimize(rosenbrock, x0, maxiter=3)
    assert (short.status, short.nit, short.success) == (0, 3, False)
    few = fo.minimize(rosenbrock, x0, max_nfev=5)
    assert (few.status, few.nfev) == (0, 5)
    assert float(few.fun) < float(rosenbrock(x0))
    at_once = fo.minimize(rosenbrock, torch.ones(2, dtype=torch.float64))
    assert (at_once.status, at_once.nfev, at_once.nit) == (1, 1, 0)

    class Wrong(torch.autograd.Function):
        """Its gradient leads uphill, so no step is lower."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square().sum()

        @staticmethod
        def backward(ctx, g):
            return -2 * g * ctx.saved_tensors[0]

    lost = fo.minimize(Wrong.apply, x0)
    assert (lost.status, lost.success) == (-2, False)
    assert torch.equal(lost.x, x0)
    assert lost.message.startswith("No progress")


def test_a_function_that_is_not_finite_somewhere():
    """A step into NaN or infinity is shortened."""

    def fun(x):
        return (x - 3 * x.log()).sum()

    found = fo.minimize(fun, torch.tensor([0.05, 20.0], dtype=torch.float64), gtol=1e-9)
    assert found.success
    assert torch.allclose(found.x, torch.full_like(found.x, 3.0))
    with pytest.raises(ValueError, match="not finite at x0"):
        fo.minimize(fun, torch.tensor([-1.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("outside", [torch.inf, 1e3])
def test_a_function_that_is_constant_outside_of_its_domain(method, outside):
    """A step to such a point ended with an error of autograd."""

    def fun(x):
        if bool((x >= 1).any()):
            return torch.tensor(outside, dtype=x.dtype)
        return (1 / (1 - x) - 2 * x).sum()

    found = fo.minimize(fun, torch.full((2,), -10.0, dtype=torch.float64), method=method)
    assert found.success
    assert torch.allclose(found.x, torch.full_like(found.x, 1 - 0.5**0.5), atol=1e-4)


def test_the_mask_and_bounds_of_a_tree():
    start = {"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros((), dtype=torch.float64)}

    def fun(x, c):
        return (x["a"] - c).square().sum() + (x["b"] + 1) ** 2 + x["a"].prod()

    c = torch.tensor([2.0, -1.0], dtype=torch.float64)
    found = fo.minimize(fun, start, (c,), bounds=({"a": -0.5, "b": None}, {"a": 1, "b": 0}))
    assert found.active_mask["a"].tolist() == [1, -1]
    assert found.active_mask["b"].item() == 0
    assert abs(float(found.x["b"]) + 1) < 1e-6
    assert float(found.optimality) < 1e-5


CASES = {
    "fun": (TypeError, "takes a function", {"fun": 3.0}),
    "residuals": (ValueError, "one number", {"fun": lambda x: x}),
    "float": (TypeError, "returned float; .* without item", {"fun": lambda x: 1.0}),
    "method": (ValueError, "unknown method 'newton'", {"method": "newton"}),
    "gtol": (ValueError, "gtol must be 0 or more", {"gtol": -1.0}),
    "gtol word": (TypeError, "gtol must be a number of 0 or more", {"gtol": "small"}),
    "ftol none": (TypeError, "got None; pass 0 for the smallest", {"ftol": None}),
    "jac's place": (TypeError, "takes args third, .* got '2-point'; pass", {"args": "2-point"}),
    "jac=True": (TypeError, "returned tuple; .* alone, .*gradient", {"fun": lambda x: (x @ x, x)}),
    "maxiter": (ValueError, "a whole number of 1 or more for maxiter", {"maxiter": 0}),
    "maxiter float": (ValueError, "for maxiter, but got 2.5", {"maxiter": 2.5}),
    "maxiter word": (ValueError, "for maxiter, but got '9'", {"maxiter": "9"}),
    "maxiter flag": (ValueError, "for maxiter, but got True", {"maxiter": True}),
    "max_nfev": (ValueError, "minimize needs a whole number", {"max_nfev": 2.5, "method": "bfgs"}),
    "tol": (TypeError, "minimize has no argument tol; pass gtol= or ftol=", {"tol": 1e-3}),
    "jac": (TypeError, "has no argument jac; leave it out, since", {"jac": True}),
    "options": (TypeError, "pass its values as arguments", {"options": {"maxiter": 3}}),
    "unknown": (TypeError, "no argument max_iter; it takes fun, x0", {"max_iter": 3}),
    "flag": (TypeError, "batched must be True or False", {"batched": "yes"}),
    "array": (TypeError, "x0 is a float, not a tensor", {"x0": 1.0}),
    "integers": (TypeError, "x0 has dtype torch.int64, but", {"x0": torch.zeros(2).long()}),
    "arity": (TypeError, "with 2 args, which", {"args": (1, 2)}),
    "words": (TypeError, "bounds got 'a' for a parameter", {"bounds": ("a", None)}),
    "a dict": (TypeError, "bounds got {'w': 0} for", {"bounds": ({"w": 0}, None)}),
    "outside": (ValueError, "outside the bounds", {"bounds": (1.0, None)}),
    "detached": (ValueError, "autograd records", {"fun": lambda x: x.detach().sum()}),
    "no problems": (ValueError, "without problems", {"x0": torch.zeros(0, 2), "batched": True}),
    "pairs": (ValueError, "dtype=torch.float32", {"bounds": [(0.0, 2.0), (1.0, 3.0)]}),
    "Bounds": (ValueError, r"as \(bounds.lb, bounds.ub\)", {"bounds": optimize.Bounds(0, 1)}),
    "numpy": (RuntimeError, "minimize differentiates", {"fun": lambda x: x.numpy().sum()}),
    "Powell": (ValueError, "call functional_optim.search.cma_es", {"method": "Powell"}),
    "trust-ncg": (ValueError, "'trust-ncg'; pass 'newton-cg'", {"method": "trust-ncg"}),
    "crossed": (ValueError, "lower bound is above", {"bounds": (1.0, 0.0)}),
    "complex": (TypeError, "must be real", {"x0": torch.zeros(2, dtype=torch.complex128)}),
    "args": (ValueError, "leading dimension", {"args": (torch.zeros(3),), "batched": True}),
    "compile": (ValueError, "pass batched=True", {"compile": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_told_at_once(case):
    error, text, change = CASES[case]
    given = {"fun": rosenbrock, "x0": torch.zeros(2), **change}
    with pytest.raises(error, match=text):
        fo.minimize(given.pop("fun"), given.pop("x0"), **given)


def test_scipys_pairs_become_bounds_by_the_error_and_its_names_of_methods_are_known():
    pairs, x0 = [(0.0, 0.1), (-torch.inf, 2.0)], torch.zeros(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="pass scipy's pairs as tuple") as error:
        fo.minimize(rosenbrock, x0, bounds=pairs)
    advice = str(error.value).partition("pairs as ")[2].partition(", with")[0]
    bounds = eval(advice, {"torch": torch, "pairs": pairs})
    found = fo.minimize(rosenbrock, x0, bounds=bounds, method="BFGS")
    assert found.success
    assert found.x[0] == 0.1


@pytest.mark.parametrize("method", METHODS)
def test_a_path_bent_by_bounds_is_not_taken_for_the_end(method):
    """Projected onto the bounds, a step may be worse than the Cauchy point where it begins."""
    generator = torch.Generator().manual_seed(1)
    x0 = 4 * torch.rand(40, 2, generator=generator, dtype=torch.float64) - 2
    upper = x0 + torch.rand(40, 2, generator=generator, dtype=torch.float64)

    def solved(begin, method, *, gtol=1e-5):
        return fo.minimize(
            rosenbrock, begin, bounds=(None, upper), method=method, gtol=gtol, batched=True
        )

    found = solved(x0, method)
    polished = solved(found.x, "l-bfgs-b", gtol=1e-9)
    assert bool((found.fun - polished.fun <= 1e-5 * found.fun.clamp(min=1)).all())


@pytest.mark.parametrize("method", METHODS[:-1])
def test_a_function_may_return_the_same_memory_each_time(method):
    """As the functions of torch.cuda.make_graphed_callables do, and their gradients."""
    value, slope = torch.zeros((), dtype=torch.float64), torch.zeros(2, dtype=torch.float64)

    class Static(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            g, f = torch.func.grad_and_value(rosenbrock)(x)
            ctx.save_for_backward(g)
            return value.copy_(f).view(())

        @staticmethod
        def backward(ctx, *grads):
            return slope.copy_(ctx.saved_tensors[0] * grads[0])

    x0 = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    plain = fo.minimize(rosenbrock, x0, method=method)
    same = fo.minimize(Static.apply, x0, method=method)
    assert torch.equal(same.x, plain.x)
    assert (same.status, same.nfev) == (plain.status, plain.nfev)
    assert float(plain.fun) < 1e-8
