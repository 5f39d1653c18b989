"""L-BFGS as a pure transformation, as links of a chain, and what it is made of."""

import math
import warnings

import optree
import pytest
import torch
from helpers import assert_close, assert_finite, assert_same, clone
from lbfgs_runs import (
    SEARCHES,
    bowl,
    minimize,
    one_by_one,
    rosenbrock,
    starts,
    tree_problem,
    with_grad,
)

import functional_optim as fo
from functional_optim import adapters
from functional_optim.algorithms.lbfgs import quasi_newton
from functional_optim.core.ravel import Ravel
from functional_optim.kernels import callers


# ---------------------------------------------------------------- one problem
@SEARCHES
@pytest.mark.parametrize("history_size", [1, 4, 100])
def test_it_evaluates_where_the_object_does(history_size, search):
    options = {"max_iter": 40, "history_size": history_size, "line_search_fn": search}
    for x in starts(3):
        fn = with_grad(rosenbrock)
        end, state = minimize(fo.lbfgs(**options), fn, x, 2)
        first = minimize(fo.lbfgs(**options), with_grad(rosenbrock), x)[1].func_evals
        for cls in (torch.optim.LBFGS, adapters.LBFGS):
            p, points = torch.nn.Parameter(x.clone()), []
            opt = cls([p], **options)
            for _ in range(2):
                opt.step(lambda opt=opt, p=p, points=points: closure(opt, p, points))
            assert int(state.func_evals) == opt.state[p]["func_evals"] == len(points)
            assert int(state.n_iter) == opt.state[p]["n_iter"]
            assert_close(fn.points[:first], points[:first], 1e-10)
            # then comes one rounding, of params + updates, which a run without a search blows up
            if search:
                assert_close(end, p.detach(), 1e-7)


def closure(opt, p, points):
    opt.zero_grad()
    points.append(p.detach().clone())
    loss = rosenbrock(p)
    loss.backward()
    return loss


@SEARCHES
def test_trees_strides_and_complex_numbers(search):
    params, f = tree_problem()
    tx = fo.lbfgs(line_search_fn=search, max_iter=200, tolerance_change=0)
    before = clone(params)
    (end, state), _ = minimize(tx, with_grad(f), params), None
    assert_same(params, before)
    assert optree.tree_structure(end) == optree.tree_structure(params)
    assert float(f(end)) < 1e-8 < float(f(params))
    assert state.d.shape == (6 + 1 + 2 * 2,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_narrow_parameters_are_stepped_in_float32(dtype):
    target = torch.linspace(-1, 1, 8)

    def f(p):
        return ((p["x"].float() - target) ** 2).sum()

    params = {"x": torch.zeros(8, dtype=dtype)}
    end, state = minimize(fo.lbfgs(), with_grad(f), params, 2)
    assert end["x"].dtype == dtype
    assert state.d.dtype == torch.float32
    assert_close(end["x"], target.to(dtype), 1e-2 if dtype != torch.float32 else 1e-5)


@SEARCHES
@pytest.mark.parametrize("batched", [False, True])
def test_a_state_keeps_its_structure_and_nobody_its_arguments_change(batched, search):
    tx = fo.lbfgs(max_iter=3, history_size=4, line_search_fn=search, batched=batched)
    fn = torch.vmap(with_grad(rosenbrock)) if batched else with_grad(rosenbrock)
    x = starts() if batched else starts()[0]
    state = tx.init(x)
    for _ in range(5):
        value, grads = fn(x)
        before = clone((grads, state, x))
        u, new = tx.update(grads, state, x, value=value, value_and_grad=fn)
        assert_same((grads, state, x), before)
        for a, b in zip(new, state, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
        x, state = fo.apply_updates(x, u), new
    assert (state.ro[..., -3:] != 0).all()


def test_missing_gradients_count_as_zero():
    params = {"a": starts()[0], "b": torch.ones(2, dtype=torch.float64)}

    def fn(p):
        value, grads = with_grad(rosenbrock)(p["a"])
        return value, {"a": grads, "b": None}

    end, _ = minimize(fo.lbfgs(max_iter=50, line_search_fn="strong_wolfe"), fn, params)
    assert_same(end["b"], params["b"])
    assert rosenbrock(end["a"]) < 0.1 * rosenbrock(params["a"])


def test_a_search_of_one_evaluation_is_told_that_it_does_not_move(monkeypatch):
    monkeypatch.setattr(callers, "_warned", set())
    search = {"max_iter": 1, "line_search_fn": "strong_wolfe"}
    x, fn = torch.zeros(2, dtype=torch.float64), with_grad(rosenbrock)
    with pytest.warns(UserWarning, match="pass max_iter=1, max_eval=25") as seen:
        stays = fo.lbfgs(**search)
    assert seen[0].filename == __file__
    assert_same(minimize(stays, fn, x, 5)[0], x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fo.lbfgs(max_iter=1)
        moves = fo.lbfgs(**search, max_eval=25)
    assert rosenbrock(minimize(moves, fn, x, 40)[0]) < 1e-6


# ---------------------------------------------------------------- many problems
@SEARCHES
@pytest.mark.parametrize("how", ["batched", "vmap", "blocks", "trees"])
def test_many_at_once_are_as_one_by_one(how, search, monkeypatch):
    options = {"max_iter": 12, "history_size": 5, "line_search_fn": search, "lr": 0.7}
    options["tolerance_change"] = 1e-2
    xs = torch.cat([starts(), torch.ones(1, 4), 3 * starts(2)]).to(torch.float64)
    expected = one_by_one(fo.lbfgs(**options), rosenbrock, xs, 2)
    if how == "vmap":
        tx = fo.lbfgs(**options)
        found = torch.vmap(lambda x: minimize(tx, with_grad(rosenbrock), x, 2))(xs)
    else:
        if how == "blocks":
            monkeypatch.setattr(quasi_newton, "GRAIN", 2 * xs.numel())
        tree = {"head": xs[:, :1], "tail": xs[:, 1:].reshape(-1, 3, 1)}
        join = lambda p: torch.cat([p["head"], p["tail"].flatten()])  # noqa: E731
        fn = with_grad(rosenbrock if how != "trees" else lambda p: rosenbrock(join(p)))
        tx = fo.lbfgs(**options, batched=True)
        found = minimize(tx, torch.vmap(fn), tree if how == "trees" else xs, 2)
        found = (torch.vmap(join)(found[0]), found[1]) if how == "trees" else found
    assert_same(found[1].func_evals, expected[1].func_evals)
    assert_same(found[1].n_iter, expected[1].n_iter)
    assert len(set(expected[1].func_evals.tolist())) > 2
    scale = {"old_dirs": 100.0, "old_stps": 1.0, "ro": 1e4}
    assert_close(found[0], expected[0], 1e-9)
    for name, a, b in zip(found[1]._fields, found[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * scale.get(name, 1.0))


@SEARCHES
@pytest.mark.parametrize("max_iter", [1, 3])
def test_a_batch_remembers_from_update_to_update(max_iter, search):
    """A history that is not full at the end of an update."""
    options = {"max_iter": max_iter, "max_eval": 9, "lr": 0.1, "line_search_fn": search}
    xs = starts()
    expected, state = one_by_one(fo.lbfgs(**options), rosenbrock, xs, 4)
    tx = fo.lbfgs(**options, batched=True)
    found, new = minimize(tx, torch.vmap(with_grad(rosenbrock)), xs, 4)
    assert_close(found, expected, 1e-8)
    assert_same((new.ro != 0).sum(1), (state.ro != 0).sum(1))
    assert (new.ro != 0).sum(1).max() > max_iter


def test_a_batch_is_solved_to_the_last_problem():
    xs = starts(16, 10)
    tx = fo.lbfgs(max_iter=500, tolerance_change=0, line_search_fn="strong_wolfe", batched=True)
    end, state = minimize(tx, torch.vmap(with_grad(rosenbrock)), xs)
    _, grads = torch.vmap(with_grad(rosenbrock))(end)
    assert grads.norm(dim=1).max() < 1e-6
    assert state.func_evals.min() < state.func_evals.max() < 400


@SEARCHES
@pytest.mark.parametrize("how", ["batched", "vmap"])
def test_a_problem_that_fails_leaves_the_others_alone(how, search):
    options = {"max_iter": 25, "line_search_fn": search}
    good = starts().to(torch.float64)
    lost = [torch.full((4,), x, dtype=torch.float64) for x in (math.nan, math.inf, 1e200)]
    xs = torch.stack([*lost, *good])

    def solve(xs):
        if how == "vmap":
            tx = fo.lbfgs(**options)
            return torch.vmap(lambda x: minimize(tx, with_grad(rosenbrock), x, 2)[0])(xs)
        return minimize(fo.lbfgs(**options, batched=True), torch.vmap(with_grad(rosenbrock)), xs)[0]

    assert_same(solve(xs)[3:], solve(good))


def test_an_empty_batch_is_solved():
    def fn(x):
        return (x**2).sum(1), 2 * x

    for compiled in (False, True):
        tx = fo.lbfgs(batched=True, compile=compiled)
        end, state = minimize(tx, fn, torch.empty(0, 3))
        assert end.shape == (0, 3)
        assert state.ro.shape == (0, 100)


def test_vmap_over_the_learning_rate():
    x = starts()[0]

    def end(lr):
        return minimize(fo.lbfgs(lr=lr, max_iter=4, history_size=3), with_grad(rosenbrock), x)[0]

    rates = torch.tensor([0.01, 0.1, 0.5], dtype=torch.float64)
    found = torch.vmap(end)(rates)
    assert_close(found, torch.stack([end(float(lr)) for lr in rates]), 1e-10)
    assert not torch.allclose(found[0], found[2])


# ---------------------------------------------------------------- compiled
@SEARCHES
def test_a_transition_and_an_update_are_one_graph(search, fresh_dynamo):
    tx = fo.lbfgs(max_iter=3, history_size=3, line_search_fn=search)

    def end(x):
        return minimize(tx, with_grad(rosenbrock), x)

    compiled = torch.compile(end, backend="eager", fullgraph=True)
    for x in starts(3):
        assert_close(compiled(x), end(x), 1e-10)


@pytest.mark.parametrize("batched", [False, True])
def test_compiled_transitions_give_the_same(batched):
    options = {"max_iter": 30, "history_size": 4, "line_search_fn": "strong_wolfe"}
    xs = starts()
    expected = one_by_one(fo.lbfgs(**options), rosenbrock, xs, 2)
    tx = fo.lbfgs(**options, batched=batched, compile=True)
    if batched:
        end, state = minimize(tx, torch.vmap(with_grad(rosenbrock)), xs, 2)
    else:
        end, state = one_by_one(tx, rosenbrock, xs, 2)
    assert_close(end, expected[0], 1e-7)
    assert (state.func_evals - expected[1].func_evals).abs().max() <= 1


# ---------------------------------------------------------------- derivatives
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@SEARCHES
def test_the_derivative_of_a_run(search):
    x = starts()[0]

    def end(lr, x):
        tx = fo.lbfgs(lr=lr, max_iter=3, history_size=3, line_search_fn=search)
        return bowl(minimize(tx, with_grad(bowl), x, 2)[0])

    lr = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(end(lr, x), lr)[0]
    assert_close(torch.func.grad(end)(lr.detach(), x), slope, 1e-10)
    if search is None:
        assert abs(slope) > 0.1
        assert torch.autograd.gradcheck(end, (lr, x.clone().requires_grad_()))
        assert torch.autograd.gradcheck(end, (lr, x), check_forward_ad=True)


# ---------------------------------------------------------------- links of a chain
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
        for _ in range(2):
            x, state = step(x, state)
        return x, state

    expected = optree.tree_map(lambda *leaves: torch.stack(leaves), *[end(x) for x in xs])
    assert_close(torch.vmap(end)(xs), expected, 1e-9)
    compiled = torch.compile(end, backend="eager", fullgraph=True)
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
    tx = fo.scale_by_backtracking_linesearch(decrease_factor=0.3, increase_factor=4.0)
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


# ---------------------------------------------------------------- parts
def test_flat_is_there_and_back():
    params, _ = tree_problem(torch.float32)
    flat = Ravel(params)
    assert flat.dtype == torch.float64
    assert not flat.exact
    assert_same(flat.tree(flat.vector(params)), params)
    conjugate = {**params, "z": params["z"].conj()}
    assert_close(flat.tree(flat.vector(conjugate))["z"], params["z"].conj().resolve_conj(), 0.0)
    assert_finite(flat.snap(flat.vector(params)))
