"""Sharpness-aware minimization: against loops, in all ways of stepping, and as an object."""

import copy

import pytest
import torch
from helpers import assert_close, assert_same, run

import functional_optim as fo
from functional_optim import adapters

SGD = fo.sgd(0.1, momentum=0.9)
RECIPES = {"sam": lambda rho=0.1: fo.sam(SGD, rho)}
RECIPES |= {"asam": lambda rho=0.1: fo.asam(SGD, rho, eta=0.05)}
CLASSES = {"sam": (adapters.SAM, {}), "asam": (adapters.ASAM, {"eta": 0.05})}
each = pytest.mark.parametrize("name", RECIPES)
torch.manual_seed(0)
X = torch.randn(16, 3, dtype=torch.float64)


START = {"a": torch.randn(3, 2, dtype=torch.float64), "b": torch.randn(2, dtype=torch.float64)}


def params():
    return {k: x.clone() for k, x in START.items()}


def loss(p, x=X):
    return ((x @ p["a"] + p["b"]).tanh() - 1).square().mean()


grad_fn = torch.func.grad(loss)


def purely(tx, steps=5, start=None):
    return run(tx, params() if start is None else start, [grad_fn] * steps, grad_fn=grad_fn)


def by_hand(name, steps=5, rho=0.1):
    """The papers' steps, tensor by tensor, with momentum 0.9 and a rate of 0.1."""
    p, momentum = params(), None
    for _ in range(steps):
        g = grad_fn(p)
        size = {k: x.abs() + 0.05 if name == "asam" else torch.ones_like(x) for k, x in p.items()}
        norm = sum(float((size[k] * x).square().sum()) for k, x in g.items()) ** 0.5
        worse = {k: x + rho * size[k] ** 2 * g[k] / norm for k, x in p.items()}
        g = grad_fn(worse)
        momentum = g if momentum is None else {k: 0.9 * momentum[k] + x for k, x in g.items()}
        p = {k: x - 0.1 * momentum[k] for k, x in p.items()}
    return p


@each
def test_it_is_the_papers_loop(name):
    assert_close(purely(RECIPES[name]())[0], by_hand(name), 1e-12)
    plain, _ = run(SGD, params(), [grad_fn] * 5)
    assert_close(purely(RECIPES[name](0.0))[0], plain, 1e-15)  # no step uphill


@each
def test_compiled_steps_are_the_pure_ones(name):
    want, after = purely(RECIPES[name]())
    for donate in (True, False):
        step = fo.compile(RECIPES[name](), strict=True, donate=donate)
        p = params()
        state = step.tx.init(p)
        first = (p, state)
        for _ in range(5):
            p, state = step(grad_fn(p), state, p, grad_fn=grad_fn)
        assert_close((p, state), (want, after), 1e-12)
        assert (p["a"] is first[0]["a"]) == donate
        assert int(first[1].ascent.step) == (5 if donate else 0)
    whole = fo.compile_train_step(loss, RECIPES[name](), strict=True)
    p = params()
    state = whole.tx.init(p)
    for _ in range(5):
        p, state, _ = whole(p, state)
    assert_close(p, want, 1e-12)


@each
def test_rho_may_be_a_tensor_a_schedule_or_a_batch(name):
    make = RECIPES[name]
    want, _ = purely(make())
    assert_close(purely(make(torch.tensor(0.1, dtype=torch.float64)))[0], want, 1e-12)
    assert_close(purely(make(fo.schedules.constant(0.1)))[0], want, 1e-12)
    rhos = torch.tensor([0.1, 0.2], dtype=torch.float64)
    both = torch.vmap(lambda rho: purely(make(rho))[0])(rhos)
    assert_close({k: x[1] for k, x in both.items()}, purely(make(0.2))[0], 1e-12)

    def end(rho):
        return loss(purely(make(rho))[0])

    assert torch.autograd.gradcheck(end, torch.tensor(0.1, dtype=torch.float64, requires_grad=True))


def objects(name, start=None, **hyper):
    p = params() if start is None else start
    mine = {k: torch.nn.Parameter(x.clone()) for k, x in p.items()}
    cls, own = CLASSES[name]
    given = {"rho": 0.1, "lr": 0.1, "momentum": 0.9, "compile": False, **own, **hyper}
    return mine, cls(mine.items(), fo.sgd, **given)


def closure_of(mine, opt, factor=1.0):
    def closure():
        opt.zero_grad()
        value = loss(mine) * factor
        value.backward()
        return value

    return closure


def step_object(mine, opt, count=1):
    for _ in range(count):
        value = opt.step(closure_of(mine, opt))
    return value


def values(mine):
    return {k: p.detach().clone() for k, p in mine.items()}


@each
@pytest.mark.parametrize("compile", ["strict", False])
def test_the_object_is_the_pure_loop(name, compile):
    want, _ = purely(RECIPES[name]())
    mine, opt = objects(name, compile=compile)
    first = step_object(mine, opt)
    assert first.item() == loss(params()).item()
    step_object(mine, opt, 4)
    assert_close(values(mine), want, 1e-12)
    assert isinstance(opt, torch.optim.Optimizer)


def test_the_norm_is_that_of_all_groups():
    want, _ = purely(RECIPES["sam"]())
    mine = {k: torch.nn.Parameter(x) for k, x in params().items()}
    groups = [{"params": [mine["a"]]}, {"params": [mine["b"]]}]
    opt = adapters.SAM(groups, rho=0.1, lr=0.1, momentum=0.9, compile=False)
    step_object(mine, opt, 5)
    assert_close(values(mine), want, 1e-12)
    opt.param_groups[1]["rho"] = 0.2
    before = values(mine)
    with pytest.raises(ValueError, match=r"different rho: \[0.1, 0.2\]; use one value for all"):
        step_object(mine, opt)
    assert_same(values(mine), before)


def test_a_frozen_leaf_and_a_gradient_that_is_nan():
    tx = fo.apply_if_finite(fo.sgd(0.1), 3)
    p = params()
    mine = {k: torch.nn.Parameter(x, requires_grad=k == "a") for k, x in p.items()}
    opt = adapters.SAM(mine.items(), lambda: tx, rho=0.1, compile=False)
    step_object(mine, opt)
    assert_same(mine["b"].detach(), p["b"])
    before = mine["a"].detach().clone()
    opt.step(closure_of(mine, opt, torch.nan))
    assert_same(mine["a"].detach(), before)


def freezing(frozen=True):
    return fo.chain(fo.freeze("b" if frozen else ()), fo.sgd(0.1, momentum=0.9))


@each
@pytest.mark.parametrize("make", [freezing, lambda: fo.with_schedule(lambda c: freezing(), c=1)])
def test_what_the_recipe_freezes_does_not_climb(name, make):
    uphill = {"rho": 0.1, **CLASSES[name][1]}
    around = getattr(fo, name)
    want, _ = purely(fo.chain(fo.freeze("b"), around(fo.sgd(0.1, momentum=0.9), **uphill)))
    tx = around(make(), **uphill)
    assert_same(purely(tx)[0], want)
    step, p = fo.compile(tx), params()
    state = tx.init(p)
    for _ in range(5):
        p, state = step(grad_fn(p), state, p, grad_fn=grad_fn)
    assert_close(p, want, 1e-12)
    mine = {k: torch.nn.Parameter(x) for k, x in params().items()}
    opt = CLASSES[name][0](mine.items(), make, compile=False, **uphill)
    step_object(mine, opt, 5)
    assert_close(values(mine), want, 1e-12)


def test_a_list_of_frozen_leaves_may_be_edited_in_place():
    """The steps saw it, and the ascent did not."""
    mine, held = [{k: torch.nn.Parameter(x) for k, x in params().items()} for _ in range(2)]

    def make(fixed=()):
        return fo.chain(fo.freeze(tuple(fixed)), fo.sgd(0.1))

    opt = adapters.SAM(mine.items(), make, rho=0.1, compile=False, fixed=[])
    step_object(mine, opt)
    opt.param_groups[0]["fixed"].append("b")
    for k, p in mine.items():
        held[k].data.copy_(p.data)
    step_object(mine, opt)
    other = adapters.SAM(held.items(), make, rho=0.1, compile=False, fixed=("b",))
    step_object(held, other)
    assert_same(values(mine), values(held))


def test_a_group_that_is_thawed_climbs():
    want, _ = purely(RECIPES["sam"](), 1)
    mine = {k: torch.nn.Parameter(x) for k, x in params().items()}
    opt = adapters.SAM(mine.items(), freezing, rho=0.1, compile=False)
    step_object(mine, opt)
    opt.param_groups[0]["frozen"] = False
    opt.load_state_dict({**opt.state_dict(), "state": {}})
    with torch.no_grad():
        for k, p in mine.items():
            p.copy_(START[k])
    step_object(mine, opt)
    assert_close(values(mine), want, 1e-12)


@pytest.mark.parametrize("given", [None, torch.tensor(1.0)])
def test_a_step_of_the_object_needs_a_closure(given):
    with pytest.raises(RuntimeError, match=r"SAM needs the gradients at two points"):
        adapters.SAM([torch.nn.Parameter(torch.ones(2))]).step(given)


def test_the_object_asks_its_recipe_for_frozen_parameters_only_after_changes():
    """Steps with the same hyperparameters do not call it again; a new value does."""
    calls = []

    def recipe(lr):
        calls.append(lr)
        return fo.sgd(lr)

    w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    opt = adapters.SAM([w], recipe, lr=0.1)

    def closure():
        opt.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    opt.step(closure)
    before = len(calls)
    for _ in range(3):
        opt.step(closure)
    assert len(calls) == before
    opt.param_groups[0]["lr"] = 0.2
    opt.step(closure)
    assert len(calls) > before


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    ("dtype", "start"),
    [
        (torch.float32, 2.0),
        (torch.bfloat16, 2.0),
        (torch.float16, 20.0),
        (torch.float16, 9000.0),
        (torch.float16, -20.0),
        (torch.complex64, 2.0),
        (torch.complex64, 2.0 - 1.0j),
    ],
)
def test_a_closure_that_does_not_clear_the_gradients_is_refused(dtype, start, set_to_none):
    """It would step along the sum of the gradients at both points; nothing has changed then."""
    a, b = (torch.nn.Parameter(torch.full((n,), start, dtype=dtype)) for n in (3, 2))
    opt = adapters.SAM([a, b], rho=0.1, lr=0.1, momentum=0.9)

    def backward(create_graph=False):
        loss = a.abs().square().sum() + b.abs().square().sum()
        loss.backward(create_graph=create_graph)
        return loss

    def closure():
        opt.zero_grad(set_to_none)
        return backward()

    opt.step(closure)
    held, state = [a.clone(), b.clone()], copy.deepcopy(opt.state_dict())
    for adding in (backward, lambda: backward(create_graph=True)):
        opt.zero_grad()
        with pytest.raises(RuntimeError, match="a closure that does not clear the gradients"):
            opt.step(adding)
        assert_same(([a, b], opt.state_dict()), (held, state))
        assert max(float(p.grad.detach().abs().max()) for p in (a, b)) < 5 * abs(start)  # no mark
    opt.step(closure)
    assert not torch.equal(a, held[0])


@pytest.mark.parametrize("make", [fo.sam, fo.asam])
@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: fo.chain(fo.clip_by_value(1.0), tx)])
def test_one_around_another_is_refused_at_once(make, wrap):
    """The inner one would get no `grad_fn`."""
    with pytest.raises(TypeError, match="sam does not pass grad_fn on, but the transf"):
        make(wrap(fo.asam(SGD)))


@pytest.mark.parametrize("eps", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("make", [fo.sam, fo.asam])
def test_gradients_of_zero_make_no_step_uphill_without_an_eps(make, eps):
    """The loss is flat there, so there is no direction."""
    w, met = torch.tensor([1.0, 2.0]), []

    def flat(p):
        met.append(p)
        return torch.ones(2)

    tx = make(fo.sgd(0.5), eps=eps)
    updates, _ = tx.update(torch.zeros(2), tx.init(w), w, grad_fn=flat)
    assert_same((met[0], updates), (w, torch.full((2,), -0.5)))
