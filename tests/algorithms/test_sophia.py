"""Sophia with estimates of the Hessian's diagonal: functional, compiled, and as an object."""

import pytest
import torch
from helpers import as_parameters, assert_close, clone, make_grads, make_params, run, step_object
from reference.loops import LOOPS

import functional_optim as fo
from functional_optim import adapters, estimators

HYPER = {"lr": 0.02, "betas": (0.8, 0.9), "rho": 10.0, "weight_decay": 0.1}
STEPS, EVERY = 7, 3


def estimates(params):
    """One for every third step; some are negative."""
    found = make_grads(params, STEPS, seed=5)
    return [h if k % EVERY == 1 else None for k, h in enumerate(found)]


def by_loop(params, grads, hessians):
    by = {name: [None if h is None else h[name].numpy() for h in hessians] for name in params}
    each = {name: [g[name].numpy() for g in grads] for name in params}
    ends = {
        n: LOOPS["sophia"](p.numpy(), each[n], hessians=by[n], **HYPER) for n, p in params.items()
    }
    return {name: torch.as_tensor(end) for name, end in ends.items()}


@pytest.mark.parametrize("way", ["update", "fo.compile", "object"])
def test_steps_with_estimates_are_those_of_the_loop(way):
    params = make_params()
    grads, hessians, tx = make_grads(params, STEPS), estimates(params), fo.sophia(**HYPER)
    mine, moved, state = as_parameters(params), clone(params), tx.init(params)
    opt = adapters.SophiaG(mine, **HYPER, compile=False)
    step = fo.compile(tx, strict=True)
    for g, h in zip(grads, hessians, strict=True):
        if h is not None and way == "object":
            opt.update_hessian(list(h.values()))
        elif h is not None:
            before, old = clone(state.slots), state
            state = estimators.observe_hessian(state, h)
            assert_close(old.slots, before, 0.0)
        if way == "update":
            moved, state = run(tx, moved, [g], state)
        elif way == "fo.compile":
            moved, state = step(g, state, moved)
        else:
            step_object(opt, [g])
            moved = dict(zip(params, [p.detach() for p in mine], strict=True))
    assert_close(moved, by_loop(params, grads, hessians), 1e-10)


def test_the_object_takes_the_gradients_of_sampled_labels():
    mine = as_parameters(make_params())
    opt = adapters.SophiaG(mine, betas=(0.9, lambda count: 0.5 + count), compile=False)
    for p in mine:
        p.grad = torch.ones_like(p)
    opt.step()
    mine[0].grad = None
    mine[1].grad = 3 * torch.ones_like(mine[1])
    opt.update_hessian(batch_size=8)
    assert_close(opt.state[mine[0]]["hessian"], torch.zeros_like(mine[0]), 0.0)
    assert_close(opt.state[mine[1]]["hessian"], torch.full_like(mine[1], 0.5 * 8 * 9), 0.0)


@pytest.mark.parametrize(("grad", "size"), [(1e-4, 1e6), (300.0, 0.01)])
def test_squares_of_half_gradients_neither_underflow_nor_overflow(grad, size):
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    opt = adapters.SophiaG([w], betas=(0.9, 0.5), compile=False)
    w.grad = torch.full_like(w, grad)
    opt.step()
    opt.update_hessian(batch_size=size)
    assert_close(opt.state[w]["hessian"], torch.full_like(w, 0.5 * size * grad**2), 1e-3)


def test_estimates_of_complex_parameters_are_those_of_their_parts():
    p = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
    opt = adapters.SophiaG([p], betas=(0.9, 0.5), compile=False)
    p.grad = torch.tensor([3 + 1j, 1 - 2j])
    opt.step()
    opt.update_hessian(batch_size=2)
    assert_close(opt.state[p]["hessian"], torch.tensor([9 + 1j, 1 + 4j]), 0.0)

    def logits(z):
        return torch.cat([z.real, z.imag])

    found = estimators.gauss_newton_bartlett(logits)(p, 0)
    apart = estimators.gauss_newton_bartlett(lambda x: x.T.reshape(-1))(torch.view_as_real(p), 0)
    assert_close(torch.view_as_real(found), apart, 1e-6)
    found = estimators.hutchinson(lambda z: (2 * z.real**2 + 5 * z.imag**2).sum())(p, 0)
    assert_close(found, torch.tensor([4 + 10j, 4 + 10j]), 1e-6)


def test_an_estimate_is_taken_at_a_rate_that_a_scheduler_has_rounded_below_0():
    w = torch.nn.Parameter(torch.ones(2))
    opt = adapters.SophiaG([w], betas=(0.9, 0.5), compile=False)
    w.grad = torch.ones(2)
    opt.step()
    opt.param_groups[0]["lr"] = -2e-19
    opt.update_hessian([torch.ones(2)])
    assert_close(opt.state[w]["hessian"], torch.full((2,), 0.5), 1e-6)


def test_estimates_that_cannot_be_used_change_nothing():
    w, v = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    opt = adapters.SophiaG([w, v], compile=False)
    w.grad = torch.ones(2)
    opt.step()
    for given, error, says in (
        ((), TypeError, "either estimates of the diagonal, or batch_size="),
        (([torch.ones(2)],), ValueError, "got 1 estimates for 2 parameters"),
        (([torch.ones(2), torch.ones(3)],), ValueError, r"shape \(3,\) for a parameter of shape"),
        (([torch.ones(2), torch.ones(2)],), RuntimeError, "has not been stepped; call step first"),
    ):
        with pytest.raises(error, match=says):
            opt.update_hessian(*given)
    with pytest.raises(ValueError, match=r"must be above 0, but got 0\."):
        opt.update_hessian(batch_size=0)
    assert not opt.state[w]["hessian"].any()
    with pytest.raises(ValueError, match="with one Sophia in it, but found 0"):
        estimators.observe_hessian(fo.adam().init(w), w)


def test_an_estimate_reaches_sophia_inside_of_other_transformations():
    w = {"a": torch.ones(2), "b": torch.ones(2)}
    slow = fo.sophia(betas=(0.9, 0.5))
    for tx in (
        fo.accumulate(slow, 2),
        fo.chain(fo.add_noise(0.1, 0.5, seed=0), slow),
        fo.partition({"slow": slow, "fast": fo.sgd(0.1)}, {"*": "slow"}),
    ):
        state = estimators.observe_hessian(tx.init(w), {"a": torch.ones(2), "b": None})
        assert_close(fo.get(state, "hessian"), {"a": torch.full((2,), 0.5), "b": torch.zeros(2)}, 0)


# ---------------------------------------------------------------- estimators
def test_hutchinson_is_exact_for_a_diagonal_and_unbiased_otherwise():
    torch.manual_seed(0)
    root = torch.randn(4, 4, dtype=torch.float64)
    matrix = root @ root.T
    w = {"a": torch.randn(3, dtype=torch.float64), "b": torch.randn((), dtype=torch.float64)}

    def quadratic(w, matrix):
        x = torch.cat([w["a"], w["b"].reshape(1)])
        return x @ matrix @ x / 2

    once = estimators.hutchinson(quadratic)
    found = once(w, 3, torch.diag(torch.arange(4.0, dtype=torch.float64)))
    assert_close(found, {"a": torch.arange(3.0).double(), "b": torch.tensor(3.0).double()}, 1e-12)
    assert not torch.equal(once(w, 3, matrix)["a"], once(w, 4, matrix)["a"])
    assert_close(once(w, 3, matrix), once(w, torch.tensor(3), matrix), 0.0)
    many = estimators.hutchinson(quadratic, samples=2000)(w, 0, matrix)
    rest = matrix - torch.diag(matrix.diag())
    spread = (rest.square().sum(1) / 2000).sqrt()
    error = torch.cat([many["a"], many["b"].reshape(1)]) - matrix.diag()
    assert (error.abs() < 5 * spread).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_samples_are_averaged_in_full_precision(dtype):
    w = torch.tensor([1.0, 2.0], dtype=dtype)
    found = estimators.hutchinson(lambda w: (3 * w * w).sum(), samples=100)(w, 0)
    assert_close(found, torch.full_like(w, 6.0), 0.0)


def test_gauss_newton_bartlett_has_the_mean_of_the_gauss_newton_diagonal():
    torch.manual_seed(0)
    w, x = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    diagonal = estimators.gauss_newton_bartlett(lambda w, x: x @ w)
    mean = torch.vmap(lambda seed: diagonal(w, seed, x))(torch.arange(3000)).mean(0)
    share = (x @ w).softmax(-1)
    exact = torch.einsum("bi,bc->ic", x.square(), share * (1 - share)) / 5  # of the mean loss
    assert_close(mean, exact, 0.1)
    assert (mean - exact).abs().max() < 0.1 * exact.max()


def test_estimators_say_what_they_need():
    w = torch.ones(2)
    with pytest.raises(ValueError, match="loss function that returns one real number"):
        estimators.hutchinson(lambda w: w)(w, 0)
    with pytest.raises(ValueError, match="a whole number of 1 or more for samples, but got 0"):
        estimators.hutchinson(torch.sum, samples=0)
    with pytest.raises(ValueError, match=r"needs logits of shape .*, but got no tensor"):
        estimators.gauss_newton_bartlett(lambda w: 1.0)(w, 0)


def test_sophia_may_be_one_part_of_a_partition():
    params = {"matrix": torch.ones(3, 3), "bias": torch.ones(4)}
    tx = fo.partition({"s": fo.sophia(), "a": fo.adamw()}, {"matrix": "s", "bias": "a"})
    estimate = {"matrix": torch.full((3, 3), 2.0), "bias": None}
    state = estimators.observe_hessian(tx.init(params), estimate)
    assert_close(state.slots["hessian"]["matrix"], torch.full((3, 3), 0.02), 1e-6)
    both = fo.partition({"s": fo.sophia(), "a": fo.sophia()}, {"matrix": "s", "bias": "a"})
    with pytest.raises(ValueError, match="one Sophia in it"):
        estimators.observe_hessian(both.init(params), estimate)
