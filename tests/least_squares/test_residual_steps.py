"""Transformations that know residuals: one step against its formula, and in all combinators."""

import copy
import io

import pytest
import torch
from fits import rosenbrock

import functional_optim as fo
from functional_optim import tree
from functional_optim.solvers import globalization
from functional_optim.solvers.linear import System

DOUBLE = torch.float64
SEED = torch.Generator().manual_seed(5)
X = torch.randn(12, 3, dtype=DOUBLE, generator=SEED)
Y = torch.randn(12, dtype=DOUBLE, generator=SEED)
RECIPES = {
    "gauss_newton": lambda **how: fo.gauss_newton(0.5, 1e-3, **how),
    "levenberg_marquardt": fo.levenberg_marquardt,
    "geodesic": lambda **how: fo.levenberg_marquardt(geodesic=True, **how),
    "dogleg": fo.dogleg,
}


def params(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(3, 2, dtype=DOUBLE, generator=generator),
        "head": {"v": torch.randn(2, dtype=DOUBLE, generator=generator)},
    }


def one(p, x, y):
    return torch.tanh(x @ p["w"]) @ p["head"]["v"] - y


FN = fo.per_sample(one, X, Y)


def plain(p):
    return torch.tanh(X @ p["w"]) @ p["head"]["v"] - Y


def loss(p, fn=FN):
    return float(0.5 * (fn(p) ** 2).sum())


def trained(tx, p, steps=8, fn=FN, state=None):
    state = tx.init(p) if state is None else state
    for _ in range(steps):
        updates, state = tx.update(None, state, p, residual_fn=fn)
        p = fo.apply_updates(p, updates)
    return p, state


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


@pytest.mark.parametrize("solver", ["auto", "cholesky", "qr", "kernel", "cg", "lsmr"])
@pytest.mark.parametrize("fn", [FN, plain], ids=["per sample", "plain"])
def test_gauss_newton_is_its_formula(solver, fn):
    p = params()
    lr, damping = fo.schedules.linear(1.0, 0.5, 2), fo.schedules.linear(0.1, 0.2, 2)
    tx = fo.gauss_newton(lr, damping, solver)
    state = tx.init(p)
    for t in range(3):
        updates, state = tx.update(None, state, p, residual_fn=fn)
        leaves = tree.leaves(p)
        rows = torch.autograd.functional.jacobian(
            lambda *leaves: plain(tree.with_leaves(params(), list(leaves))), tuple(leaves)
        )
        J = torch.cat([x.reshape(12, -1) for x in rows], 1)
        H = J.mT @ J + damping(t) * torch.eye(8, dtype=DOUBLE)
        expected = -lr(t) * torch.linalg.solve(H, J.mT @ plain(p))
        got = torch.cat([u.reshape(-1) for u in tree.leaves(updates)])
        assert torch.allclose(got, expected, rtol=1e-7)
        p = fo.apply_updates(p, updates)


def test_levenberg_marquardt_is_nielsens_loop():
    x = torch.tensor([-1.2, 1.0], dtype=DOUBLE)
    tx = fo.levenberg_marquardt(damping=1e-2)
    state, mu, nu, D = tx.init(x), 1e-2, 2.0, torch.zeros(2, dtype=DOUBLE)
    refused = 0
    for _ in range(15):
        updates, state = tx.update(None, state, x, residual_fn=rosenbrock)
        J, r = torch.func.jacrev(rosenbrock)(x), rosenbrock(x)
        D = torch.maximum(D, (J * J).sum(0).sqrt())
        p = torch.linalg.solve(J.mT @ J + mu * torch.diag(D * D), -J.mT @ r)
        predicted = -(J.mT @ r) @ p - 0.5 * (J @ p) @ (J @ p)
        rho = 0.5 * ((r @ r) - rosenbrock(x + p).square().sum()) / predicted
        assert float(state.value) == pytest.approx(0.5 * float(r @ r))
        if rho > 1e-4:
            assert torch.allclose(updates, p, rtol=1e-6)
            mu, nu = mu * max(1 / 3, 1 - (2 * float(rho) - 1) ** 3), 2.0
        else:
            refused += 1
            assert torch.equal(updates, torch.zeros(2, dtype=DOUBLE))
            assert updates.signbit().all()
            mu, nu = mu * nu, 2 * nu
        assert float(state.damping) == pytest.approx(mu, rel=1e-6)
        x = fo.apply_updates(x, updates)
    assert refused


def test_scales_of_few_residuals_are_at_least_their_root_mean_square():
    A = torch.tensor([[3.0, 0.1, 0.0], [1.0, 0.0, 2.0]], dtype=DOUBLE)
    x, b = torch.zeros(3, dtype=DOUBLE), torch.tensor([1.0, 2.0], dtype=DOUBLE)
    tx = fo.levenberg_marquardt(0.5)
    updates, state = tx.update(None, tx.init(x), x, residual_fn=lambda x: A @ x - b)
    norms = A.norm(dim=0)
    assert torch.allclose(state.scale, norms)
    D = norms.maximum(norms.square().mean().sqrt())
    expected = torch.linalg.solve(A.mT @ A + 0.5 * torch.diag(D * D), A.mT @ b)
    assert torch.allclose(updates, expected)


@pytest.mark.parametrize("method", ["lm", "dogleg"])
def test_least_squares_takes_the_same_steps_for_fewer_residuals_than_parameters(method):
    p, fn = params(), fo.per_sample(one, X[:5], Y[:5])
    tx = {"lm": fo.levenberg_marquardt(), "dogleg": fo.dogleg()}[method]
    for steps in (1, 2, 3, 4):
        found = fo.least_squares(
            fn, p, method=method, max_nfev=steps + 1, ftol=0, xtol=0, gtol=0, implicit=False
        )
        assert float(found.cost) == pytest.approx(loss(trained(tx, p, steps, fn)[0], fn), rel=1e-6)


def test_dogleg_takes_gauss_newton_steps_for_equal_residuals():
    A = torch.randn(5, 90, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    A, b = A.repeat(16, 1), torch.arange(5, dtype=DOUBLE).repeat(16)
    p, _ = trained(fo.dogleg(1e3), torch.zeros(90, dtype=DOUBLE), 1, fn := lambda x: A @ x - b)
    assert float(fn(p).abs().max()) < 1e-11


def test_without_a_gauss_newton_step_dogleg_ends_at_the_cauchy_point():
    gram = torch.tensor([[[1.0, 2.0], [2.0, 1.0]]], dtype=DOUBLE)
    g = torch.tensor([[1.0, 0.5]], dtype=DOUBLE)
    system, D = System(r=g, g=g, gram=gram), torch.ones_like(g)
    for delta, length in ((10.0, 1.25 / 3.25), (0.1, 0.1 / 1.25**0.5)):
        p, found = globalization.dogleg("cholesky", system, D, g.new_tensor([delta]))
        assert not found
        assert torch.allclose(p, -length * g)


@pytest.mark.parametrize("name", RECIPES)
def test_all_descend_and_resume_bitwise(name):
    tx, p = RECIPES[name](), params()
    whole, end = trained(tx, p)
    assert loss(whole) < 0.8 * loss(p)
    half, state = trained(tx, p, 4)
    saved = io.BytesIO()
    torch.save(fo.state_dict(state, half), saved)
    saved.seek(0)
    read = fo.load_state_dict(tx.init(half), torch.load(saved), half)
    again, last = trained(copy.deepcopy(tx), half, 4, state=read)
    assert same(again, whole)
    assert same(last, end)


@pytest.mark.parametrize("name", RECIPES)
def test_frozen_leaves_have_no_columns(name):
    p = params()

    def alone(v):
        return plain({**p, "head": {"v": v}})

    expected, _ = trained(RECIPES[name](), p["head"]["v"], fn=alone)
    ways = [
        fo.chain(fo.freeze("w"), RECIPES[name]()),
        fo.selective_transform(RECIPES[name](), freeze_mask="w"),
        fo.partition(
            {"still": fo.freeze(), "moves": RECIPES[name]()}, {"w": "still", "*": "moves"}
        ),
    ]
    for tx in ways:
        for fn in (plain, FN, fo.stack_residuals(FN)):
            updates, state = tx.update(None, tx.init(p), p, residual_fn=fn)
            assert updates["w"] is None
            sizes = [x.numel() for x in tree.leaves(state) if x.dim()]
            assert not sizes or sizes == [2]
            found, _ = trained(tx, p, fn=fn)
            assert torch.equal(found["w"], p["w"])
            assert torch.allclose(found["head"]["v"], expected, rtol=1e-6)


@pytest.mark.parametrize("fn", [FN, plain], ids=["per sample", "plain"])
@pytest.mark.parametrize("name", RECIPES)
def test_an_ensemble_under_vmap(name, fn):
    tx = RECIPES[name]()
    members = [params(seed) for seed in range(3)]
    stacked = tree.map(lambda *x: torch.stack(x), *members)
    state = torch.vmap(tx.init)(stacked)

    def step(p, state):
        return tx.update(None, state, p, residual_fn=fn)

    found = stacked
    for _ in range(5):
        updates, state = torch.vmap(step)(found, state)
        found = fo.apply_updates(found, updates)
    for i, p in enumerate(members):
        alone, _ = trained(tx, p, 5)
        mine = tree.map(lambda x, i=i: x[i], found)
        for a, b in zip(tree.leaves(mine), tree.leaves(alone), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_clipping_and_averages_follow_in_a_chain():
    tx = fo.chain(fo.levenberg_marquardt(1.0), fo.clip_by_global_norm(0.01), fo.params_ema(0.5))
    p = params()
    updates, _ = tx.update(None, tx.init(p), p, residual_fn=FN)
    assert float(fo.tree.global_norm(updates)) == pytest.approx(0.01)


@pytest.mark.parametrize("around", [lambda tx: tx, lambda tx: fo.chain(fo.freeze("w"), tx)])
@pytest.mark.parametrize("name", RECIPES)
def test_what_changes_gradients_that_are_not_read_is_refused(name, around):
    tx = around(RECIPES[name]())
    halved = fo.leafwise(None, lambda u, slots, p: (0.5 * u, slots))
    for before in (fo.clip_by_global_norm(1.0), fo.masked(fo.trace(0.9), "w"), halved):
        with pytest.raises(ValueError, match="has no effect before a method for residuals"):
            fo.chain(before, tx)
        with pytest.raises(ValueError, match="has no effect before a method for residuals"):
            fo.chain(before, fo.lookahead(tx))
    for sharp in (fo.sam, fo.asam):
        with pytest.raises(TypeError, match="am changes gradients, but a method for residuals"):
            sharp(tx)


def test_what_changes_or_measures_the_gradients_of_other_leaves_stays():
    parts = {"first": fo.gauss_newton(damping=0.1), "second": fo.sgd(0.1)}
    tx = fo.partition(parts, {"w": "second", "*": "first"})
    assert fo.sam(tx).required == ("grad_fn", "residual_fn")
    for each in ({"n": fo.measures.global_norm}, {"n": torch.linalg.vector_norm}):
        watched = fo.named_chain(("watch", fo.monitor(each)), ("step", tx))
        both = fo.chain(fo.monitor(each), fo.levenberg_marquardt())
        for one in (fo.chain(fo.clip_by_global_norm(1.0), tx), watched, both):
            one.init(params())


@pytest.mark.parametrize("name", RECIPES)
def test_float32_parameters_keep_their_dtype(name):
    p = tree.map(lambda x: x.float(), params())
    fn = fo.per_sample(one, X.float(), Y.float())
    found, _ = trained(RECIPES[name](), p, 10, fn)
    assert {x.dtype for x in tree.leaves(found)} == {torch.float32}
    assert loss(found, fn) < 0.5 * loss(p, fn)


def test_geodesic_acceleration_is_second_order():
    """Where the path of the velocity bends, its correction is what Transtrum and Sethna derive."""
    x = torch.tensor([0.5, 0.4], dtype=DOUBLE)
    v = fo.levenberg_marquardt(0.1)
    u = fo.levenberg_marquardt(0.1, geodesic=True)
    velocity, _ = v.update(None, v.init(x), x, residual_fn=rosenbrock)
    both, _ = u.update(None, u.init(x), x, residual_fn=rosenbrock)
    J = torch.func.jacrev(rosenbrock)(x)
    H = J.mT @ J
    second = torch.func.jacfwd(torch.func.jacrev(rosenbrock))(x)
    r2 = torch.einsum("kij,i,j->k", second, velocity, velocity)
    a = torch.linalg.solve(H + 0.1 * torch.diag(H.diagonal()), -J.mT @ r2)
    assert a.norm() > 1e-3
    assert torch.allclose(both, velocity + 0.5 * a, rtol=1e-6)


def lost(p):
    return plain(fo.tree.map(torch.Tensor.detach, p))


def test_errors():
    p = params()
    for name in RECIPES:
        tx = RECIPES[name]()
        state = tx.init(p)
        with pytest.raises(TypeError, match="needs the extra argument residual_fn"):
            tx.update(None, state, p)
        with pytest.raises(TypeError, match="pass the function, not its result"):
            tx.update(None, state, p, residual_fn=plain(p))
        with pytest.raises(ValueError, match="not finite at these parameters"):
            tx.update(None, state, p, residual_fn=lambda p: plain(p) * torch.nan)
        with pytest.raises(ValueError, match="returned one number, such as a loss"):
            tx.update(None, state, p, residual_fn=lambda p: plain(p).square().sum())
        for fn in (lost, fo.stack_residuals(lost), fo.per_sample(lambda p, y: y, Y)):
            with pytest.raises(ValueError, match="does not depend on x by operations"):
                tx.update(None, state, p, residual_fn=fn)
        solved, _ = tx.update(None, state, p, residual_fn=lambda p: 0 * p["w"])
        assert not any(u.any() for u in tree.leaves(solved))
        with pytest.raises(ValueError, match="needs the parameters"):
            tx.update(None, state, residual_fn=FN)
        with pytest.raises(TypeError, match="takes real parameters"):
            tx.init({"z": torch.zeros(1, dtype=torch.complex64)})
        with pytest.raises(TypeError, match="accumulate averages gradients"):
            fo.accumulate(tx, every=2)
        with pytest.raises(ValueError, match="unknown linear_solver"):
            RECIPES[name](linear_solver="lu")
    with pytest.raises(ValueError, match="JᵀJ is singular"):
        fo.gauss_newton(linear_solver="cholesky").update(
            None, fo.gauss_newton().init(p), p, residual_fn=lambda p: p["w"].sum().reshape(1)
        )
    with pytest.raises(ValueError, match=r"JJᵀ is singular.*another linear_solver"):
        fo.gauss_newton(linear_solver="kernel").update(
            None, fo.gauss_newton().init(p), p, residual_fn=lambda p: torch.cat([p["w"]] * 2)
        )
    with pytest.raises(TypeError, match="gauss_newton\\(damping=schedule\\)"):
        fo.levenberg_marquardt(fo.schedules.linear(1.0, 0.0, 3))
    with pytest.raises(ValueError, match="unknown scaling"):
        fo.dogleg(scaling="diag")


def test_a_step_is_one_graph_of_torch_compile():
    tx, p = fo.levenberg_marquardt(), params()

    def step(state, p):
        return tx.update(None, state, p, residual_fn=plain)[0]

    compiled = torch.compile(step, backend="eager", fullgraph=True)(tx.init(p), p)
    plainly = step(tx.init(p), p)
    assert all(map(torch.allclose, tree.leaves(compiled), tree.leaves(plainly)))


@pytest.mark.parametrize("kind", ["cg", "lsmr"])
def test_a_step_of_many_iterations_is_not_compiled(kind):
    tx, p = fo.levenberg_marquardt(linear_solver=kind), params()
    with pytest.raises(RuntimeError, match=r"torch\.compile failed"):
        fo.compile(tx, donate=False, strict=True)(None, tx.init(p), p, residual_fn=plain)


def test_a_train_step_takes_residuals_by_name():
    tx, p = fo.levenberg_marquardt(), params()
    step = fo.compile_train_step(lambda p: 0.5 * (plain(p) ** 2).sum(), tx, compile=False)
    found, state, value = step(p, tx.init(p), residual_fn=FN)
    updates, expected = tx.update(None, tx.init(params()), params(), residual_fn=FN)
    assert float(value) == pytest.approx(loss(params()))
    assert same(found, fo.apply_updates(params(), updates))
    assert same(state, expected)


@pytest.mark.parametrize("place", ["parameters", "closure"])
@pytest.mark.parametrize("name", RECIPES)
def test_derivatives_through_steps_are_those_of_finite_differences(name, place):
    matrix = torch.tensor([[1.0, 2.0], [0.5, -1.0], [2.0, 1.0]], dtype=DOUBLE)

    def run(a):
        start, b = (1.5 * a, 0.5) if place == "parameters" else (1.5, a)
        p = start * torch.tensor([1.0, 0.4], dtype=DOUBLE)
        p, _ = trained(RECIPES[name](), p, 4, lambda p: (matrix @ p) ** 2 - b)
        return (p * p).sum()

    a = torch.tensor(0.7, dtype=DOUBLE)
    expected = (run(a + 1e-6) - run(a - 1e-6)) / 2e-6
    assert torch.allclose(torch.func.grad(run)(a), expected, rtol=1e-5, atol=1e-8)
    if place == "parameters":  # autograd takes a tensor of the closure for a constant
        variable = a.clone().requires_grad_()
        (slope,) = torch.autograd.grad(run(variable), variable)
        assert torch.allclose(slope, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", [x for x in RECIPES if x != "geodesic"])
def test_a_state_keeps_no_graph_of_points_that_require_gradients(name):
    """As those at which residuals take derivatives of a network."""
    t = torch.tensor([1.0, 2.0, 3.0], dtype=DOUBLE, requires_grad=True)

    def fn(p):
        (slope,) = torch.autograd.grad((p[0] * t**2 + p[1] * t).sum(), t, create_graph=True)
        return slope - 2 * t - 1

    tx, p = RECIPES[name](), torch.tensor([0.5, 0.1], dtype=DOUBLE)
    updates, state = tx.update(None, tx.init(p), p, residual_fn=fn)
    assert not any(x.requires_grad for x in fo.tree.leaves((updates, state)) if torch.is_tensor(x))
    assert fn(p + updates).square().sum() < fn(p).square().sum()
