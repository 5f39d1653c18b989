"""Self-scaled quasi-Newton methods: transformations, optimizer objects, and the solver's steps."""

import copy
import math
from itertools import count
from typing import Any

import pytest
import torch
from lbfgs_runs import minimize
from torch import Tensor, nn
from torch.autograd import forward_ad
from valleys import rosenbrock

import functional_optim as fo
from functional_optim import adapters

MAKE = {"ssbfgs": (fo.ssbfgs, adapters.SSBFGS), "ssbroyden": (fo.ssbroyden, adapters.SSBroyden)}
names = pytest.mark.parametrize("name", MAKE)


def value_and_grad(x: Any) -> tuple[Tensor, Any]:
    return torch.func.grad_and_value(rosenbrock)(x)[::-1]


def start() -> Tensor:
    return torch.tensor([-1.2, 1.0, 0.4, -0.3], dtype=torch.float64)


@names
def test_updates_of_any_length_take_the_steps_of_minimize(name):
    whole = fo.minimize(rosenbrock, start(), method=name, maxiter=12, ftol=0.0, gtol=0.0)
    assert whole.nit == 12
    for each in (1, 3, 12):
        tx = MAKE[name][0](max_iter=each, max_eval=1000, tolerance_grad=0.0)
        x, state = minimize(tx, value_and_grad, start(), 12 // each)
        assert torch.allclose(x, whole.x, atol=1e-6)
        assert int(state.n_iter) == 12
        assert int(state.func_evals) == whole.nfev + 12 // each - 1
        assert int(state.pairs) <= 12
        H = state[-1]
        assert torch.allclose(H, H.mT, rtol=1e-9)


@names
def test_an_optimizer_object_takes_the_steps_of_its_transformation(name):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    net[2].bias.requires_grad_(False)
    x = torch.rand(30, 2, dtype=torch.float64)
    y = (x[:, :1] * 3).sin() + x[:, 1:]
    before = {k: p.detach().clone() for k, p in net.named_parameters()}
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters()}]
    opt = MAKE[name][1](groups, max_iter=7)
    losses = []

    def closure() -> Tensor:
        opt.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        losses.append(float(loss.detach()))
        return loss

    first = opt.step(closure)
    assert float(first.detach()) == losses[0]
    opt.step(closure)
    moving = {k: p for k, p in before.items() if k != "2.bias"}

    def fn(p: Any) -> tuple[Tensor, Any]:
        def loss(p: Any) -> Tensor:
            found = torch.func.functional_call(net, {**before, **p}, (x,))
            return (found - y).square().mean()

        return torch.func.grad_and_value(loss)(p)[::-1]

    p, state = minimize(MAKE[name][0](max_iter=7), fn, moving, 2)
    for key, mine in net.named_parameters():
        expected = p.get(key, before[key])
        assert torch.allclose(mine.detach(), expected, rtol=1e-6, atol=1e-9), key
    kept = opt.state[net[0].weight]
    mine, other = [H.diagonal().sort()[0] for H in ([*kept.values()][-1], state[-1])]
    assert torch.allclose(mine, other, rtol=1e-4)  # the order of parameters is another
    assert int(kept["func_evals"]) == len(losses)
    assert losses[-1] < 0.5 * losses[0]


def test_physics_gets_far_below_bfgs():
    """−u'' = f on (0, 1): after as many evaluations."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))
    p0 = {k: p.detach() for k, p in net.double().named_parameters()}
    x = torch.linspace(0, 1, 30, dtype=torch.float64)

    def u(p: Any, x: Tensor) -> Tensor:
        return x * (1 - x) * torch.func.functional_call(net, p, (x.reshape(1),))[0]

    def loss(p: Any) -> Tensor:
        second = torch.vmap(torch.func.grad(torch.func.grad(u, 1), 1), (None, 0))(p, x)
        return (second / math.pi**2 + torch.sin(math.pi * x)).square().mean()

    def least(method: str) -> float:
        how = {"gtol": 0.0, "ftol": 0.0, "max_nfev": 600}
        return float(fo.minimize(loss, p0, method=method, **how).fun)

    assert max(map(least, MAKE)) < 0.05 * least("bfgs")


@names
def test_a_solution_stays_and_a_failed_search_forgets(name):
    tx = MAKE[name][0]()
    x = torch.ones(3, dtype=torch.float64)
    value, grads = value_and_grad(x)
    u, state = tx.update(grads, tx.init(x), x, value=value, value_and_grad=value_and_grad)
    assert torch.equal(u, torch.full_like(x, -0.0))
    assert bool(torch.signbit(u).all())
    assert int(state.n_iter) == 0

    def uphill(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.square().sum(), -2 * x

    u, state = tx.update(-2 * x, state, x, value=uphill(x)[0], value_and_grad=uphill)
    assert torch.equal(u, torch.full_like(x, -0.0))
    assert torch.equal(state[-1], torch.eye(3, dtype=torch.float64))


@names
def test_a_search_that_fails_forgets_before_it_gives_up(name):
    calls = count()

    def higher_from_now_on(x: Tensor) -> Tensor:
        return rosenbrock(x) + (1000.0 if next(calls) >= 10 else 0.0)

    found = fo.minimize(higher_from_now_on, start(), method=name, max_nfev=500)
    assert found.nit > 3
    assert found.status == -2
    assert found.nfev < 300


@names
@pytest.mark.parametrize("of", ["objective", "start", "function"])
def test_transforms_that_differentiate_or_batch_the_update_raise_an_error(name, of):
    tx, one = MAKE[name][0](max_iter=2), torch.tensor(1.0, dtype=torch.float64)

    def end(a: Tensor) -> Tensor:
        x = start() * (a if of == "start" else 1.0)
        scale = 1.0 if of == "start" else a

        def fn(x: Tensor) -> tuple[Tensor, Tensor]:
            value, grads = value_and_grad(x)
            return scale * value, scale * grads

        value, grads = value_and_grad(x) if of == "function" else fn(x)
        updates, _ = tx.update(grads, tx.init(x), x, value=value, value_and_grad=fn)
        return fo.apply_updates(x, updates).sum()

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        with pytest.raises(ValueError, match=f"update of {name} has no derivatives, .* detach"):
            transform(end)(one)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="has no derivatives"):
        end(forward_ad.make_dual(one, one))
    with pytest.raises(ValueError, match=f"{name} cannot run under torch.vmap"):
        torch.func.vmap(end)(one.expand(2))
    other = torch.func.grad(lambda b: b * end(one))(one)  # what it differentiates is constant here
    assert torch.equal(other, end(one))


@names
def test_max_eval_begins_no_iteration(name):
    tx = MAKE[name][0](max_iter=100, max_eval=5)
    _, state = minimize(tx, value_and_grad, start())
    assert 5 <= int(state.func_evals) < 12
    assert int(state.n_iter) < 6
    _, state = minimize(MAKE[name][0](max_eval=1), value_and_grad, 0.1 * start())
    assert int(state.n_iter) == 1  # whose search takes two evaluations
    assert int(state.func_evals) == 3


@names
def test_bad_calls_change_nothing(name):
    make, obj = MAKE[name]
    for how in ({"max_iter": 0}, {"max_iter": 2.5}, {"max_eval": 0}):
        with pytest.raises(ValueError, match=f"{name} needs a whole number of 1 or more for max_"):
            make(**how)
        with pytest.raises(ValueError, match=f"{name} needs a whole number of 1 or more for max_"):
            obj([torch.ones(2, requires_grad=True)], **how)
    for how in ({"tolerance_grad": -1.0}, {"tolerance_change": float("nan")}):
        with pytest.raises(ValueError, match="must be 0 or more"):
            make(**how)
    tx, x = make(), start()
    state, (value, grads) = tx.init(x), value_and_grad(x)
    more = {"value": value, "value_and_grad": value_and_grad}
    with pytest.raises(ValueError, match=f"minimize\\(method='{name}', batched=True\\)"):
        torch.vmap(lambda x: tx.update(x, state, x, **more)[0])(torch.ones(2, 4).double())
    with pytest.raises(ValueError, match="not finite at these parameters"):
        tx.update(grads, state, x, value=value * torch.nan, value_and_grad=value_and_grad)
    with pytest.raises(ValueError, match="a state for 4 parameters, but there are 3"):
        tx.update(grads[:3], state, x[:3], **more)
    (other,) = [methods[0] for key, methods in MAKE.items() if key != name]
    for wrong in (fo.lbfgs().init(x), other().init(x)):
        with pytest.raises(TypeError, match=f"of {name} got a .*State; pass .* own init returned"):
            tx.update(grads, wrong, x, **more)
    with pytest.raises(TypeError, match=r"return \(value, gradients\)"):
        tx.update(grads, state, x, value=value, value_and_grad=lambda x: value)
    with pytest.raises(TypeError, match=r"the value has shape \(4,\), .* has them in reverse"):
        tx.update(grads, state, x, value=value, value_and_grad=lambda x: (x, x))
    p = nn.Parameter(torch.ones(2, dtype=torch.float64))
    opt = obj([p])
    with pytest.raises(TypeError, match="needs a closure"):
        opt.step()
    with pytest.raises(ValueError, match="not finite"):
        opt.step(lambda: (p * torch.nan).sum())
    assert not opt.state
    other = obj([nn.Parameter(torch.ones(3))])
    opt.step(lambda: closure_of(p))
    with pytest.raises(ValueError, match="for 2 parameters, but 3 move"):
        other.load_state_dict(copy.deepcopy(opt.state_dict()))
    with pytest.raises(RuntimeError, match="nothing to step"):
        obj([torch.ones(2)]).step(lambda: torch.ones(()))
    unequal = obj([{"params": [p]}, {"params": [nn.Parameter(torch.ones(1))], "max_iter": 3}])
    with pytest.raises(ValueError, match="different max_iter"):
        unequal.step(lambda: closure_of(p))


def closure_of(p: Tensor) -> Tensor:
    p.grad = None
    loss = (p - 3).square().sum()
    loss.backward()
    return loss


@names
def test_a_closure_without_a_backward_is_refused(name):
    w = nn.Parameter(start())
    with pytest.raises(RuntimeError, match="left no gradients"):
        MAKE[name][1]([w]).step(lambda: rosenbrock(w))
    assert torch.equal(w, start())


@names
def test_a_closure_that_does_not_clear_the_gradients_is_refused(name):
    w = nn.Parameter(start())
    opt = MAKE[name][1]([w])

    def adding() -> Tensor:
        loss = rosenbrock(w)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="a closure that does not clear the gradients"):
        opt.step(adding)
    assert torch.equal(w, start())
    assert float(w.grad.abs().max()) < 1e4


@pytest.mark.parametrize("change", ["exchanged", "reversed"])
@pytest.mark.parametrize("make", [adapters.SSBFGS, adapters.SSBroyden, adapters.LBFGS])
def test_parameters_in_another_order_do_not_take_the_curvatures_of_others(make, change):
    """All of a state of one vector goes by the places of its elements."""
    params = [nn.Parameter(torch.full((2,), x, dtype=torch.float64)) for x in (1.0, 2.0, 3.0)]
    opt = make(params, max_iter=2)
    order = opt.param_groups[0]["params"]

    def closure() -> Tensor:
        opt.zero_grad()
        loss = sum([(k + 1) * (p - 5).square().sum() for k, p in enumerate(params)])
        loss.backward()
        return loss

    opt.step(closure)
    before = [p.detach().clone() for p in params]
    order[:] = [order[0], *order[:0:-1]] if change == "exchanged" else order[::-1]
    with pytest.raises((RuntimeError, ValueError), match=r"other parameters|in an earlier step"):
        opt.step(closure)
    assert all(torch.equal(p, x) for p, x in zip(params, before, strict=True))
    order[:] = params
    opt.step(closure)
