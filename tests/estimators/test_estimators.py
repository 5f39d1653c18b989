"""Gradient estimators: right on average, with the variance that theory gives, and pure."""

import math

import optree
import pytest
import torch
from helpers import assert_close, assert_same, clone, through_file
from torch._dynamo.testing import CompileCounterWithBackend

import functional_optim as fo
from functional_optim import estimators

EVERY = {
    "forward": lambda **k: fo.forward_gradient(3, **k),
    "forward-signs": lambda **k: fo.forward_gradient(3, distribution="rademacher", **k),
    "spsa": lambda **k: fo.spsa(c=0.1, samples=2, **k),
    "es-ranks": lambda **k: fo.es_gradient(population=6, sigma=0.1, **k),
    "es-raw": lambda **k: fo.es_gradient(population=6, sigma=0.1, ranks=False, **k),
    "mezo": lambda **k: fo.mezo(eps=0.01, samples=2),
}
TOLD = [name for name in EVERY if not name.startswith("forward")]
every = pytest.mark.parametrize("name", EVERY)


def make_params(dtype=torch.float64):
    torch.manual_seed(0)
    return {"w": torch.randn(3, 2, dtype=dtype), "b": [torch.randn(2, dtype=dtype)]}


def quartic(params, scale=1.0):
    w, b = params["w"], params["b"][0]
    return scale * ((w * w).sum() + (w @ b).cos().sum() + (b**4).sum() / 4)


def quadratic(params):
    w, b = params["w"], params["b"][0]
    return ((w.sum(0) + b).square().sum() + (w * w).sum()) / 2


def linear(params):
    return (params["w"] * torch.arange(6.0, dtype=torch.float64).reshape(3, 2)).sum() - 3 * params[
        "b"
    ][0].sum()


def vector(tree):
    return torch.cat([x.reshape(-1) for x in optree.tree_leaves(tree)])


def estimates(est, loss_fn, params, count):
    """(count, d): independent estimates, one for each seed."""

    def one(seed):
        (_, grads), _ = est.value_and_grad(loss_fn)(est.init(params, seed), params)
        return vector(grads)

    return torch.vmap(one)(torch.arange(count))


# ---------------------------------------------------------------- proof
UNBIASED = {
    "forward": (fo.forward_gradient(), quartic, lambda g: g @ g + g * g),
    "forward-signs": (
        fo.forward_gradient(distribution="rademacher"),
        quartic,
        lambda g: g @ g - g * g,
    ),
    "forward-many": (fo.forward_gradient(4), quartic, lambda g: (g @ g + g * g) / 4),
    "spsa": (fo.spsa(c=0.5, gamma=0.0), quadratic, lambda g: g @ g - g * g),
    "spsa-samples": (fo.spsa(samples=5), quadratic, lambda g: (g @ g - g * g) / 5),
    "mezo": (fo.mezo(), quadratic, lambda g: g @ g + g * g),
    "es-raw": (fo.es_gradient(8, sigma=0.7, ranks=False), quadratic, lambda g: (g @ g + g * g) / 4),
}


@pytest.mark.parametrize("name", UNBIASED)
def test_the_mean_is_the_gradient_and_the_variance_is_theorys(name):
    est, loss_fn, variance = UNBIASED[name]
    params, n = make_params(), 6000
    g = vector(torch.func.grad(loss_fn)(params))
    found = estimates(est, loss_fn, params, n)
    expected = variance(g)
    errors = (found.mean(0) - g).abs() / (expected / n).sqrt()
    assert errors.max() < 5
    # products of normal numbers have heavy tails: 4 to 8 times the spread of normal ones
    assert_close(found.var(0), expected, 0.2)
    half = found / 2  # the test can fail
    assert ((half.mean(0) - g).abs() / (expected / n).sqrt()).max() > 5


def test_ranks_point_along_the_gradient():
    params = make_params()
    g = vector(torch.func.grad(quartic)(params))
    mean = estimates(fo.es_gradient(64, sigma=0.02), quartic, params, 200).mean(0)
    assert torch.cosine_similarity(mean, g, dim=0) > 0.99
    scaled = estimates(
        fo.es_gradient(64, sigma=0.02), lambda p: (1e4 * quartic(p)).exp(), params, 200
    )
    assert torch.isfinite(scaled).all()  # most losses overflow


@pytest.mark.parametrize("name", ["spsa", "mezo", "es-raw", "forward", "forward-signs"])
def test_linear_losses_give_exact_projections(name):
    """Whatever the reach, the estimate is the mean of (g · z) z."""
    params = make_params()
    g = vector(torch.func.grad(linear)(params))
    est = EVERY[name]()
    (_, grads), state = est.value_and_grad(linear)(est.init(params, 3), params)
    n = state.weights.shape[0]
    total = torch.zeros_like(g)
    for i in range(n):
        alone = state._replace(weights=torch.eye(n, dtype=torch.float64)[i])
        z = vector(est.gradient(alone, params))
        total = total + (g @ z) * z / n
    assert_close(vector(grads), total, 1e-9)


def test_one_dimension_of_signs_is_a_central_difference():
    est = fo.spsa(c=0.1, gamma=0.0)
    x = torch.tensor(2.0, dtype=torch.float64)
    (value, grad), _ = est.value_and_grad(torch.exp)(est.init(x, 5), x)
    assert_close(grad, x.exp() * math.sinh(0.1) / 0.1, 1e-12)
    assert_close(value, x.exp() * math.cosh(0.1), 1e-12)


@pytest.mark.parametrize("batched", [True, False])
def test_a_state_of_another_number_of_directions_is_refused(batched):
    """Its weights would be repeated for the others, or left out."""
    w, one, four = torch.ones(3), estimators.spsa(), estimators.spsa(samples=4, batched=batched)
    _, state = one.measure(lambda w: w @ w)(one.init(w), w)
    with pytest.raises(ValueError, match="has 4 directions, but the state has 1"):
        estimators.replay(four, fo.sgd(0.1), w, [state])
    _, state = four.measure(lambda w: w @ w)(state, w)  # any state starts a measurement
    assert four.gradient(state, w).shape == (3,)
    with pytest.raises(ValueError, match="has 1 directions, but the state has 4"):
        one.gradient(state, w)


def test_wrong_calls_of_an_estimator_get_a_sentence():
    est, w = estimators.spsa(), torch.ones(3)
    state = est.init(w)
    for call in (
        lambda: est.value_and_grad(torch.sum)(w, state),
        lambda: est.ask(w, state),
        lambda: est.tell(torch.ones(2, 3), torch.ones(2), None),
        lambda: est.gradient(w, state),
    ):
        with pytest.raises(TypeError, match="needs the state of an estimator"):
            call()
    with pytest.raises(TypeError, match="returns one real number, but it returned a dict"):
        estimators.mezo().measure(lambda w: {"loss": w.sum()})(state, w)
    with pytest.raises(ValueError, match="hutchinson got a tree without parameters"):
        estimators.hutchinson(lambda w: 0.0)({}, 0)


def test_spalls_gains_are_spalls():
    lr = estimators.spsa_gain(a=0.5, stability=10.0)
    assert_close(
        torch.tensor([lr(k) for k in range(5)]),
        torch.tensor([0.5 / (11 + k) ** 0.602 for k in range(5)]),
        1e-7,
    )
    est, x = fo.spsa(c=0.2), torch.zeros(1, dtype=torch.float64)
    state, reach = est.init(x), []
    for _ in range(4):
        candidates, state = est.ask(state, x)
        reach.append(candidates[0].abs())
        _, state = est.tell(candidates, candidates.sum(1), state)
    assert_close(
        torch.cat(reach), torch.tensor([0.2 / t**0.101 for t in (1, 2, 3, 4)]).double(), 1e-7
    )


# ---------------------------------------------------------------- the protocol
@every
def test_it_is_pure_and_resumes_bitwise(name):
    est, params = EVERY[name](), make_params(torch.float32)
    tx = fo.chain(fo.clip_by_global_norm(1.0), fo.adam(0.05))

    def run(params, state, opt_state, steps):
        for _ in range(steps):
            (_, grads), state = est.value_and_grad(quartic)(state, params, 2.0)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = fo.apply_updates(params, updates)
        return params, state, opt_state

    start = (params, est.init(params, seed=7), tx.init(params))
    before = clone(start)
    rng = torch.get_rng_state()
    whole = run(*start, 6)
    assert_same(start, before)
    assert torch.equal(torch.get_rng_state(), rng)
    kept = through_file([list(x) if isinstance(x, tuple) else x for x in run(*start, 3)[:2]])
    half = run(*start, 3)
    assert_same(run(kept[0], estimators.EstimatorState(*kept[1]), half[2], 3), whole)
    other = run(params, est.init(params, seed=8), tx.init(params), 3)
    assert not torch.equal(other[0]["w"], half[0]["w"])


@pytest.mark.parametrize("name", TOLD)
def test_ask_and_tell_make_the_same_estimate(name):
    est, params = EVERY[name](), make_params(torch.float32)
    state = est.init(params, 1)
    for _ in range(2):
        candidates, asked = est.ask(state, params)
        assert_same(asked, state)
        losses = torch.vmap(quartic)(candidates)
        assert candidates["w"].shape == (len(losses), 3, 2)
        told = est.tell(candidates, losses, asked)
        direct = est.value_and_grad(quartic)(state, params)
        assert_close(told, direct, 2e-3)  # mezo evaluates one by one
        if name != "mezo":
            assert_same(told, direct)
        state = told[1]


@every
def test_one_by_one_equals_all_at_once(name):
    params = make_params()
    kinds = [EVERY[name](batched=True), EVERY[name](batched=False)]
    found = [est.value_and_grad(quartic)(est.init(params, 2), params) for est in kinds]
    assert_close(found[1], found[0], 1e-9)


@every
def test_an_ensemble_over_seeds_equals_the_loop(name):
    est, params = EVERY[name](), make_params()

    def one(seed):
        return est.value_and_grad(quartic)(est.init(params, seed), params)

    together = torch.vmap(one)(torch.tensor([0, 5, 2**40]))
    for i, seed in enumerate((0, 5, 2**40)):
        assert_close(optree.tree_map(lambda x, i=i: x[i], together), one(seed), 1e-9)


LEAST = {
    "forward": fo.forward_gradient(),
    "spsa": fo.spsa(c=0.1),
    "es-ranks": fo.es_gradient(population=2),
    "mezo": fo.mezo(eps=0.01),
}


@pytest.mark.parametrize("name", LEAST)
@pytest.mark.usefixtures("fresh_dynamo")
def test_estimate_and_update_are_one_graph_for_all_steps(name):
    est, tx = LEAST[name], fo.sgd(0.05)
    w = make_params()["w"]  # one leaf: the graph grows with each

    def step(w, state, opt_state):
        (_, grads), state = est.value_and_grad(lambda w: (w**4).sum())(state, w)
        updates, opt_state = tx.update(grads, opt_state, w)
        return fo.apply_updates(w, updates), state, opt_state

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    eager = traced = (w, est.init(w, 0), tx.init(w))
    frames = []
    for _ in range(3):
        eager, traced = step(*eager), compiled(*traced)
        assert_close(traced, eager, 1e-9)
        frames.append(counter.frame_count)
    assert frames == [frames[0]] * 3


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64])
def test_every_dtype_gets_a_gradient_in_its_own_width(name, dtype):
    p = {"x": torch.ones(4, dtype=dtype), "empty": torch.zeros(0, 2, dtype=dtype), "none": None}
    est = EVERY[name]()

    def loss_fn(p):
        x = torch.view_as_real(p["x"]) if dtype.is_complex else p["x"]
        return (x - 3).square().sum()

    (value, grads), _ = est.value_and_grad(loss_fn)(est.init(p), p)
    assert grads["x"].dtype is (torch.complex64 if dtype.is_complex else torch.float32)
    assert grads["x"].shape == (4,)
    assert grads["empty"].shape == (0, 2)
    assert grads["none"] is None
    assert value.dtype is torch.float64
    if dtype.is_complex:
        assert (grads["x"].imag != 0).any()


@pytest.mark.parametrize("batched", [True, False])
def test_a_forward_gradient_keeps_nothing_for_a_backward_pass(batched):
    params = optree.tree_map(lambda x: x.requires_grad_(), make_params())
    est = fo.forward_gradient(4, batched=batched)

    def refuse(x):
        raise AssertionError("something was kept for a backward pass")

    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse), torch.no_grad():
        with pytest.raises(AssertionError, match="was kept"):
            torch.enable_grad()(quartic)(params)
        (_, grads), _ = est.value_and_grad(quartic)(est.init(params), params)
    assert vector(grads).abs().max() > 0.1
    assert all(p.grad is None for p in optree.tree_leaves(params))


# ---------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", TOLD)
def test_a_pair_with_a_bad_loss_counts_nothing(name, bad):
    est, params = EVERY[name](), make_params()
    state = est.init(params, 0)
    candidates, _ = est.ask(state, params)
    losses = torch.vmap(quartic)(candidates)
    n = len(losses) // 2
    broken = losses.clone()
    broken[0] = bad
    (value, grads), after = est.tell(candidates, broken, state)
    assert torch.isfinite(vector(grads)).all()
    assert torch.isfinite(value)
    if name == "es-ranks":
        worst = losses.clone()
        worst[0] = 1e9
        assert_same(after.weights, est.tell(candidates, worst, state)[1].weights)
    else:
        (_, _), good = est.tell(candidates, losses, state)
        assert after.weights[0] == 0
        assert_close(after.weights[1:] * (n - 1), good.weights[1:] * n, 1e-12)
    (value, grads), after = est.tell(candidates, torch.full_like(losses, bad), state)
    assert torch.equal(vector(grads), torch.zeros(8, dtype=torch.float64))
    assert value == math.inf
    assert int(after.step) == 1


def test_a_loss_is_one_real_number():
    x = torch.ones(3)
    forward = fo.forward_gradient(2), fo.forward_gradient(2, batched=False)
    for est in (*forward, fo.spsa(), fo.mezo()):
        for loss_fn in (lambda x: x, lambda x: x.sum() * 1j):
            with pytest.raises(ValueError, match="returns one real number, but got a tensor of"):
                est.value_and_grad(loss_fn)(est.init(x), x)
        flat = est.value_and_grad(lambda x: (x @ x).reshape(1))(est.init(x), x)
        assert_same(flat, est.value_and_grad(lambda x: x @ x)(est.init(x), x))


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(
    "loss_fn",
    [lambda x: (x @ x).item(), lambda x: x.detach() @ x.detach(), lambda x: (x > 0).float().sum()],
    ids=["item", "detach", "steps"],
)
def test_forward_gradients_need_a_derivative(loss_fn, batched):
    est, x = fo.forward_gradient(2, batched=batched), torch.ones(3)
    with pytest.raises(ValueError, match="depends on the parameters by differentiable operations"):
        est.value_and_grad(loss_fn)(est.init(x), x)
    values = fo.spsa(batched=batched)
    assert values.value_and_grad(lambda x: x.detach() @ x)(values.init(x), x)[0][1].any()


@every
def test_a_loss_may_be_nan_or_random_but_not_none(name):
    est, x = EVERY[name](), torch.ones(3, dtype=torch.float64)

    def estimate(loss_fn):
        return est.value_and_grad(loss_fn)(est.init(x), x)[0][1]

    assert_same(estimate(lambda x: x.sum() * torch.nan), torch.zeros_like(x))
    assert estimate(lambda x: torch.nn.functional.dropout(x).sum()).isfinite().all()
    with pytest.raises(TypeError, match="returns one real number, but it returned None; end it"):
        estimate(lambda x: None)


@pytest.mark.parametrize("make", [fo.spsa, fo.mezo, lambda c: fo.es_gradient(4, c)])
def test_a_reach_that_has_fallen_to_zero_estimates_nothing(make):
    est, x = make(fo.schedules.linear(0.1, 0.0, 1)), torch.ones(3)
    (_, before), state = est.value_and_grad(lambda x: x @ x)(est.init(x), x)
    (_, after), _ = est.value_and_grad(lambda x: x @ x)(state, x)
    assert (before != 0).any()
    assert torch.equal(after, torch.zeros(3))


@pytest.mark.parametrize(
    "est",
    [fo.mezo(), fo.spsa(batched=False), fo.es_gradient(population=4, sigma=0.1, batched=False)],
    ids=lambda est: est.name,
)
def test_losses_may_be_in_the_same_memory_each_time(est):
    params, memory = make_params(), torch.zeros((), dtype=torch.float64)
    state = est.init(params)
    plain = est.value_and_grad(quartic)(state, params)
    same = est.value_and_grad(lambda p: memory.copy_(quartic(p)))(state, params)
    assert_same(same, plain)
    assert float(vector(plain[0][1]).norm()) > 0.1
