"""L-BFGS as links of a chain: the inverse Hessian, and backtracking."""

from __future__ import annotations

import math

import optree
import pytest
import torch
from helpers import assert_close, assert_same
from lbfgs_runs import bowl, rosenbrock, starts

import functional_optim as fo


def test_the_link_alone_goes_where_torch_goes():
    """With max_iter=1 and no search, torch takes one step of length lr at a time."""
    x = 0.01 * starts()[0]
    p = torch.nn.Parameter(x.clone())
    opt = torch.optim.LBFGS([p], lr=0.1, max_iter=1, history_size=3)
    tx = fo.chain(fo.scale_by_lbfgs(3), fo.scale_by_lr(0.1))
    state = tx.init(x)

    def closure():
        opt.zero_grad()
        loss = bowl(p) + p.sum() / 8  # |g|₁ < 1: torch's first step is not shortened
        loss.backward()
        return loss

    for _ in range(8):
        opt.step(closure)
        g = torch.func.grad(lambda x: bowl(x) + x.sum() / 8)(x)
        u, state = tx.update(g, state, x)
        x = fo.apply_updates(x, u)
        assert_close(x, p.detach(), 1e-10)


def descent(f, **options):
    tx = fo.chain(
        fo.scale_by_lbfgs(5), fo.scale(-1), fo.scale_by_backtracking_linesearch(**options)
    )

    def step(x, state):
        grads, value = torch.func.grad_and_value(f)(x)
        u, state = tx.update(grads, state, x, value=value, grad=grads, value_fn=f)
        return fo.apply_updates(x, u), state

    return tx, step


def test_backtracking_makes_it_a_method():
    tx, step = descent(rosenbrock)
    for x in starts(3):
        state, value = tx.init(x), rosenbrock(x)
        for _ in range(100):
            x, state = step(x, state)
            assert rosenbrock(x) <= value
            value = rosenbrock(x)
        assert torch.func.grad(rosenbrock)(x).norm() < 1e-6


def test_the_first_step_length_that_decreases_enough():
    tried = []

    def f(x):
        tried.append(float(x))
        return 10 * x.square().sum()

    tx = fo.scale_by_backtracking_linesearch(decrease_factor=0.5)
    x = torch.tensor([1.0], dtype=torch.float64)
    extra = {"value": f(x), "grad": 20 * x, "value_fn": f}
    tried.clear()
    u, state = tx.update(-20 * x, tx.init(x), x, **extra)
    lengths = [0.5**k for k in range(5)]
    assert tried == [1 - 20 * t for t in lengths]  # 1/16 is the first below 1/10
    assert_close(u, -20 * x / 16, 1e-12)
    assert float(state.learning_rate) == 1 / 16
    tried.clear()
    tx.update(-20 * x, state, x, **extra)
    assert tried == [1 - 20 * 1.5 / 16]
    up, _ = tx.update(20 * x, tx.init(x), x, **extra)
    assert_same(up, torch.zeros_like(x))

    def both(x):
        return f(x), None

    again, _ = tx.update(-20 * x, tx.init(x), x, value=f(x), grad=20 * x, value_and_grad=both)
    assert_same(again, u)


def test_links_under_vmap_and_compile(fresh_dynamo):
    xs = starts(4)

    def end(x):
        tx, step = descent(rosenbrock, max_backtracking_steps=6)
        state = tx.init(x)
        for _ in range(4):
            x, state = step(x, state)
        return x, state

    expected = optree.tree_map(lambda *leaves: torch.stack(leaves), *[end(x) for x in xs])
    assert_close(torch.vmap(end)(xs), expected, 1e-9)
    compiled = torch.compile(end, backend="aot_eager", fullgraph=True)
    assert_close(compiled(xs[0]), end(xs[0]), 1e-9)


@pytest.mark.parametrize("where", ["start", "trials"])
def test_a_value_that_is_nan_is_no_decrease(where):
    x = torch.ones(3)
    tx = fo.scale_by_backtracking_linesearch()
    value = torch.tensor(math.nan if where == "start" else 3.0)
    u, state = tx.update(-x, tx.init(x), x, value=value, grad=2 * x, value_fn=lambda _: 3 * value)
    assert_same(u, torch.zeros(3))
    assert state.learning_rate > 0


def test_searches_that_fail_do_not_wear_the_step_length_down_to_zero():
    """From zero there would be no way back."""
    x = torch.ones(1)
    tx = fo.scale_by_backtracking_linesearch(increase_factor=4.0)
    state, extra = tx.init(x), {"value": x.sum(), "grad": x}
    for _ in range(60):
        u, state = tx.update(-x, state, x, **extra, value_fn=lambda x: 2 + x.sum())
        assert_same(u, torch.zeros(1))
    assert state.learning_rate > 0
    for _ in range(80):
        _, state = tx.update(-x, state, x, **extra, value_fn=lambda x: x.sum() - 1)
    assert state.learning_rate == 1


def test_values_may_be_python_numbers():
    x = torch.ones(2)

    def f(x):
        return x.square().sum()

    tx = fo.scale_by_backtracking_linesearch()
    found = tx.update(-x, tx.init(x), x, value=2.0, grad=2 * x, value_fn=lambda x: f(x).item())
    assert_same(found, tx.update(-x, tx.init(x), x, value=f(x), grad=2 * x, value_fn=f))
