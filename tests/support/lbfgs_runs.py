"""Problems for the L-BFGS tests, and runs of torch's class and ours on them."""

import copy

import optree
import pytest
import torch
from helpers import copy_of

import functional_optim as fo
from functional_optim import adapters

Torch, Ours = torch.optim.LBFGS, adapters.LBFGS
SEARCHES = pytest.mark.parametrize("search", [None, "strong_wolfe"])


def quadratic(dtype=torch.float64):
    """Condition number 1e4."""
    stiffness = torch.logspace(-2, 2, 8).to(dtype)
    start = torch.nn.Parameter(torch.randn(8, dtype=dtype))
    return [start], lambda p: 0.5 * (stiffness * (p[0] - 1)).abs().pow(2).sum()


def rosenbrock(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def valley(n, dtype=torch.float64):
    """Rosenbrock's, over two parameters."""
    params = [torch.nn.Parameter(torch.randn(k, dtype=dtype)) for k in (1, n - 1)]
    return params, lambda p: rosenbrock(torch.cat([x.reshape(-1) for x in p]))


def logistic(dtype=torch.float64):
    x, y = torch.randn(40, 6, dtype=dtype), (torch.arange(40) % 2).to(dtype)
    w, b = torch.nn.Parameter(torch.zeros(6, dtype=dtype)), torch.nn.Parameter(x.new_zeros(()))

    def f(p):
        logits = x @ p[0] + p[1]
        return torch.nn.functional.softplus(logits).mean() - (y * logits).mean()

    return [w, b], f


def network(dtype=torch.float64):
    x = torch.randn(12, 3, dtype=dtype)
    y = x.prod(1, keepdim=True)
    shapes = (3, 5), (5,), (5, 1)
    params = [torch.nn.Parameter(0.5 * torch.randn(s, dtype=dtype)) for s in shapes]
    return params, lambda p: ((torch.tanh(x @ p[0] + p[1]) @ p[2] - y).abs() ** 2).mean()


def two_precisions():
    """A network whose first parameter is narrower than the others."""
    params, f = network()
    params[0] = torch.nn.Parameter(params[0].detach().float())
    return params, lambda p: f([p[0].double(), *p[1:]])


PROBLEMS = {
    "quadratic": quadratic,
    "rosenbrock-2": lambda dtype=torch.float64: valley(2, dtype),
    "rosenbrock-10": lambda dtype=torch.float64: valley(10, dtype),
    "logistic": logistic,
    "network": network,
}


class Run:
    """An optimizer at work, and where it has evaluated what."""

    def __init__(self, cls, problem, seed=0, **options):
        torch.manual_seed(seed)
        self.params, self.f = problem()
        self.opt = cls(self.params, **options)
        self.points, self.losses = [], []

    def closure(self):
        self.opt.zero_grad()
        loss = self.f(self.params)
        loss.backward()
        self.points.append(copy_of(self.params))
        self.losses.append(loss.detach())
        return loss

    def steps(self, n):
        return [self.opt.step(self.closure).detach() for _ in range(n)]


def pair(problem, steps=4, seed=0, **options):
    """torch's class and ours, on the same problem. The second run has its own copies of options."""
    runs = [Run(cls, problem, seed, **copy.deepcopy(options)) for cls in (Torch, Ours)]
    for run in runs:
        run.steps(steps)
    return runs


def assert_agree(ours, theirs, tolerance=1e-10):
    """The same evaluations, parameters, and states with the same types."""
    assert len(ours.losses) == len(theirs.losses)
    pairs = [(ours.losses, theirs.losses), (ours.points, theirs.points)]
    for a, b in (*pairs, (copy_of(ours.params), copy_of(theirs.params))):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert_alike(ours.opt.state_dict()["state"], theirs.opt.state_dict()["state"], tolerance)


def assert_alike(a, b, tolerance):
    """Equal types all the way down, and close numbers."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_alike(a[key], b[key], tolerance)
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_alike(x, y, tolerance)
    elif a is None or isinstance(a, str):
        assert a == b
    else:
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


# ---------------------------------------------------------------- the functional side
def with_grad(f):
    """Evaluate one problem; keeps a list of where."""

    def fn(x):
        fn.points.append(x)
        grads, value = torch.func.grad_and_value(f)(x)
        return value, grads

    fn.points = []
    return fn


def minimize(tx, fn, x, updates=1):
    """The functional loop."""
    state = tx.init(x)
    for _ in range(updates):
        value, grads = fn(x)
        u, state = tx.update(grads, state, x, value=value, value_and_grad=fn)
        x = fo.apply_updates(x, u)
    return x, state


def starts(problems=6, n=4):
    return torch.randn(problems, n, dtype=torch.float64)


def one_by_one(tx, f, xs, updates=1):
    """Solve the problems in a loop, and stack the results."""
    results = [minimize(tx, with_grad(f), x, updates) for x in xs]
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *results)


def bowl(x):
    return (torch.arange(1.0, 5, dtype=x.dtype) * x**2).sum() + (x**4).sum()


def tree_problem(dtype=torch.float64):
    target = torch.randn(3, 2, dtype=dtype)
    params = {
        "a": [torch.randn(3, 2, dtype=dtype).t().contiguous().t(), torch.randn((), dtype=dtype)],
        "z": torch.randn(2, dtype=torch.complex128),
    }

    def f(p):
        main = ((p["a"][0] - target) ** 2 * p["a"][1].cosh()).sum() + (p["z"] - 1j).abs().pow(
            4
        ).sum()
        return main.to(torch.float64)

    return params, f
