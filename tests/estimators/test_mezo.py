"""MeZO: a leaf of noise at a time, weights that do not drift, and runs made again from scalars."""

import ctypes
import json
import signal

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, clone
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

import functional_optim as fo
from functional_optim import estimators
from functional_optim.core import base
from functional_optim.estimators.pairs import Lazy
from functional_optim.kernels import private


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside hold at one time."""

    def __init__(self):
        super().__init__()
        self.known, self.now, self.most = WeakTensorKeyDictionary(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if self.is_(x)}
        for x in tree_leaves(result):
            storage = x.untyped_storage() if self.is_(x) else None
            if storage is not None and storage.data_ptr() not in known:
                self.known[x] = storage.nbytes()
        self.now = sum({x.untyped_storage().data_ptr(): n for x, n in self.known.items()}.values())
        self.most = max(self.most, self.now)
        return result

    @staticmethod
    def is_(x):
        return isinstance(x, torch.Tensor)


WIDTH, DEPTH = 512, 12
LEAF = 4 * WIDTH * WIDTH
"""Bytes of a layer's weight."""


def network(dtype=torch.float32, depth=DEPTH):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)]
    model = torch.nn.Sequential(*layers).to(dtype)
    return model, {name: p.detach() for name, p in model.named_parameters()}


def loss_of(model):
    x = torch.ones(2, WIDTH)

    def loss_fn(params):
        dtype = next(iter(params.values())).dtype
        out = torch.func.functional_call(model, params, (x.to(dtype),))
        return (out.float() - 1).square().mean()

    return loss_fn


def peak_of(fn):
    with Peak() as peak:
        fn()
    return peak.most


def test_no_more_than_a_leaf_of_noise_is_ever_there():
    model, params = network()
    est = fo.mezo(eps=1e-2)
    state = est.init(params, 0)
    found = []

    def whole_step():
        _, after = est.measure(loss_of(model))(state, params)
        estimators.mezo_step_(params, after, lr=1e-3)
        found.append(after)

    # a leaf's noise, its product with a number, their sum with the weight; a block of words
    assert peak_of(whole_step) < 3.1 * LEAF
    (after,) = found
    assert peak_of(lambda: est.gradient(after, params)) > (DEPTH - 1) * LEAF  # so it is seen
    kept = [x for x in after if isinstance(x, torch.Tensor)]
    assert sum(x.numel() * x.element_size() for x in kept) == 24


def test_lazy_parameters_are_those_of_eager_ones_but_for_rounding():
    """The library that draws for a lazy one rounds logarithms otherwise than torch under vmap."""
    model, params = network(depth=2)
    est = fo.mezo(eps=1e-2)
    state = est.init(params, 0)
    value, after = est.measure(loss_of(model))(state, params)
    candidates, _ = est.ask(state, params)
    losses = [loss_of(model)({k: x[i] for k, x in candidates.items()}) for i in range(2)]
    assert float(value) == pytest.approx(float(torch.stack(losses).double().mean()), rel=1e-6)
    told = est.tell(candidates, torch.stack(losses), state)[1]
    for x, y in zip(tree_leaves(told), tree_leaves(after), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)


def test_a_lazy_parameter_is_made_wherever_it_is_read():
    p, made = torch.ones(2, 3), []

    def make():
        made.append(1)
        return p + 1

    x = Lazy(p, make)
    assert (x.shape, x.dtype, x.dim(), x.size(0), x.numel()) == ((2, 3), p.dtype, 2, 2, 6)
    assert made == []
    for result in (x.T.T, x[:], torch.cat([x, x])[:2], x.to(torch.float64).float(), x.data, +x):
        assert type(result) is torch.Tensor
        assert torch.equal(result, p + 1)
    assert torch.equal(torch.nn.functional.linear(torch.eye(3), x), (p + 1).T)
    assert len(made) == 8
    attention = torch.nn.MultiheadAttention(4, 2)  # reads a child's weights without calling it
    tree = {name: p.detach() for name, p in attention.named_parameters()}
    lazy = {name: Lazy(p, lambda p=p: p + 1) for name, p in tree.items()}
    eager = {name: p + 1 for name, p in tree.items()}
    q = torch.randn(3, 1, 4)
    with torch.no_grad():
        a, b = [torch.func.functional_call(attention, t, (q, q, q))[0] for t in (lazy, eager)]
    assert torch.equal(a, b)


def cubes(w):
    return (w**3).sum()


def clamped(p):
    p["w"].clamp_(-1, 1)
    return p["w"].sum()


def first_set(p):
    p["w"][0] = 5.0
    return p["w"].sum()


@pytest.mark.parametrize("loss", [clamped, first_set])
@pytest.mark.parametrize("est", [fo.mezo(), fo.spsa(batched=False)], ids=lambda e: e.name)
def test_a_loss_that_writes_into_a_parameter_is_refused(est, loss):
    """The next operation would read the parameter as it was."""
    params = {"w": torch.arange(3.0)}
    with pytest.raises(RuntimeError, match="writes into a parameter inside the loss"):
        est.value_and_grad(loss)(est.init(params, seed=0), params)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("est", [fo.mezo(), fo.spsa(batched=False)], ids=lambda e: e.name)
def test_an_embedding_may_limit_the_norms_of_the_rows_that_it_reads(est, tied):
    """A head that is tied to it reads the limited rows."""
    ids = torch.tensor([0, 2])

    def found(of):
        params = {"w": torch.arange(6.0).view(3, 2)}

        def loss(p):
            w = of(p["w"])
            x = F.embedding(ids, w, max_norm=0.5)
            return (x @ w.T).square().sum() if tied else x.sum()

        return est.value_and_grad(loss)(est.init(params, seed=0), params)[:2]

    assert_same(found(lambda w: w), found(torch.clone))


READ_BELOW_PYTHON = {
    "vmap": lambda w: torch.vmap(cubes)(w).sum(),
    "grad": lambda w: torch.func.grad(cubes)(w).sum(),
    "vjp": lambda w: torch.func.vjp(cubes, w)[0],
    "jacrev": lambda w: torch.func.jacrev(cubes)(w).sum(),
    "functionalize": lambda w: torch.func.functionalize(cubes)(w),
    "script": lambda w: torch.jit.trace(cubes, (torch.zeros(3, 4),))(w),
    "copy": lambda w: w.new_tensor(w).sum(),
    "address": lambda w: torch.tensor(sum((ctypes.c_float * 12).from_address(w.data_ptr()))),
}


@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:`torch.jit")
@pytest.mark.parametrize("name", READ_BELOW_PYTHON)
@pytest.mark.parametrize(
    "est", [fo.mezo(eps=0.1), fo.spsa(c=0.1, batched=False)], ids=lambda e: e.name
)
def test_lazy_parameters_are_perturbed_for_code_below_python(name, est):
    params = {"w": torch.linspace(1, 2, 12).reshape(3, 4)}
    loss_fn, state = READ_BELOW_PYTHON[name], est.init(params, 1)
    (value, grads), _ = est.value_and_grad(lambda p: loss_fn(p["w"]))(state, params)
    candidates, asked = est.ask(state, params)
    losses = torch.stack([loss_fn(w.clone()) for w in candidates["w"]])
    told = est.gradient(est.tell(candidates, losses, asked)[1], params)
    assert float(grads["w"].norm()) > 1
    torch.testing.assert_close(grads, told, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(value, losses.mean().to(value), rtol=1e-5, atol=0)


def test_without_tensors_that_have_no_memory_parameters_are_computed_first(monkeypatch):
    params = {"w": torch.linspace(1, 2, 12).reshape(3, 4)}
    est = fo.mezo(eps=0.1)
    seen = []

    def loss_fn(p):
        seen.append(type(p["w"]))
        return cubes(p["w"])

    one = est.value_and_grad(loss_fn)(est.init(params), params)
    monkeypatch.setattr(private, "without_memory", None)
    other = est.value_and_grad(loss_fn)(est.init(params), params)
    assert seen == [Lazy, Lazy, torch.Tensor, torch.Tensor]
    assert_same(one, other)


def test_a_thousand_steps_without_a_learning_rate_leave_bfloat16_as_it_was():
    torch.manual_seed(0)
    params = {"w": 0.3 * torch.randn(40, 10).to(torch.bfloat16)}
    start = clone(params)
    est, tx = fo.mezo(eps=1e-3), fo.sgd(0.0)
    state, opt_state, functional = est.init(params, 0), tx.init(params), params

    def loss_fn(params):
        return params["w"].float().square().sum()

    for _ in range(1000):
        _, state = est.measure(loss_fn)(state, functional)
        estimators.mezo_step_(params, state, lr=0.0)
    for _ in range(3):
        (_, grads), state = est.value_and_grad(loss_fn)(state, functional)
        updates, opt_state = tx.update(grads, opt_state, functional)
        functional = fo.apply_updates(functional, updates)
    assert int(state.step) == 1003
    assert_same((params, functional), (start, start))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mezo", "mezo-adam", "spsa", "forward"])
def test_a_run_is_made_again_from_its_scalars_bit_for_bit(name, dtype):
    torch.manual_seed(0)
    start = {"w": torch.randn(4, 3).to(dtype), "b": torch.randn(3).to(dtype)}
    est = {
        "mezo": fo.mezo(eps=0.05),
        "mezo-adam": fo.mezo(eps=0.05, samples=2),
        "spsa": fo.spsa(c=0.1),
        "forward": fo.forward_gradient(2),
    }[name]
    schedule = fo.schedules.linear(0.05, 0.0, 50)
    tx = fo.sgd(schedule) if name == "mezo" else fo.chain(fo.trace(0.9), fo.adam(schedule))
    params, state, opt_state, log = start, est.init(start, 3), tx.init(start), []
    for _ in range(30):
        (_, grads), state = est.value_and_grad(
            lambda p: (p["w"].float().sum(0) - p["b"].float() + 1).square().sum()
        )(state, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = fo.apply_updates(params, updates)
        log.append(state)
    text = json.dumps([[x.tolist() for x in state] for state in log])  # numbers survive as text
    read = [
        estimators.EstimatorState(
            torch.tensor(step), torch.tensor(seed), torch.tensor(weights, dtype=torch.float64)
        )
        for step, seed, weights in json.loads(text)
    ]
    assert_same(estimators.replay(est, tx, start, read), (params, opt_state))
    assert not torch.equal(params["w"], start["w"])
    half = estimators.replay(est, tx, start, read[:17])
    assert_same(estimators.replay(est, tx, half[0], read[17:], half[1])[0], params)


def test_steps_in_place_are_made_again_from_their_scalars():
    _, params = network(torch.bfloat16, depth=2)
    model, other = network(torch.bfloat16, depth=2)
    est, log = fo.mezo(eps=0.02), []
    state = est.init(params, 0)
    for i in range(20):
        _, state = est.measure(loss_of(model))(state, params)
        estimators.mezo_step_(params, state, lr=0.1 / (1 + i))
        log.append(state)
    before = clone(other)
    for i, entry in enumerate(log):
        estimators.mezo_step_(other, entry, lr=0.1 / (1 + i))
    assert_same(other, params)
    assert not torch.equal(before["0.weight"], params["0.weight"])


def test_a_step_in_place_is_all_or_nothing(monkeypatch, pythons_own_handler):
    params = {name: torch.zeros(3) for name in "abc"}
    est = fo.mezo()
    _, state = est.measure(lambda p: sum((x - 1).square().sum() for x in p.values()))(
        est.init(params, 0), params
    )
    folded = {**params, "d": torch.zeros(1).expand(3)}
    with pytest.raises(ValueError, match="'d' has several elements in one place"):
        estimators.mezo_step_(folded, state, lr=0.1)
    assert not any(p.any() for p in params.values())
    add, done = base.add, []

    def interrupted(*args):
        done.append(args)
        if len(done) == 2:
            signal.raise_signal(signal.SIGINT)
        return add(*args)

    monkeypatch.setattr(base, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        estimators.mezo_step_(params, state, lr=0.1)
    assert all(p.all() for p in params.values())


def test_a_step_in_place_refuses_what_it_would_round_or_spread():
    """Integers were truncated, and a vector was a learning rate for each column."""
    est, w = estimators.mezo(), torch.ones(2)
    _, state = est.measure(lambda w: w @ w)(est.init(w), w)
    whole = torch.tensor([1, 2])
    with pytest.raises(TypeError, match="has dtype torch"):
        estimators.mezo_step_(whole, state, 0.5)
    for bad in (torch.tensor([0.1, 0.2]), None, fo.schedules.constant(0.1)):
        with pytest.raises(TypeError, match="mezo_step_ takes a number or a 0-dim tensor as lr"):
            estimators.mezo_step_(w, state, bad)
    loss = torch.Tensor.sum
    for other in (fo.spsa(), fo.forward_gradient(distribution="rademacher")):
        made = other.measure(loss)(other.init(w), w)[1]
        for use in (lambda x: estimators.mezo_step_(w, x, 0.5), lambda x: est.gradient(x, w)):
            for signs in (other.init(w), made):
                with pytest.raises(TypeError, match="estimator with random signs, such as spsa"):
                    use(signs)
        assert other.gradient(made, w).isfinite().all()
    for other in (fo.mezo(), fo.forward_gradient(), fo.es_gradient(2, 0.1)):
        made, moved = other.measure(loss)(other.init(w), w)[1], w.clone()
        estimators.mezo_step_(moved, made, 0.5)
        assert torch.allclose(moved, w - 0.5 * other.gradient(made, w))
    with pytest.raises(ValueError, match="mezo_step_ got a tree without parameters"):
        estimators.mezo_step_({}, state, 0.1)
    assert torch.equal(w, torch.ones(2))
    assert whole.tolist() == [1, 2]
