"""Optimizer objects that know residuals: closures, groups, checkpoints, and who came before."""

import pytest
import torch

import functional_optim as fo
from functional_optim import adapters

X = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
Y = torch.sin(X.sum(1))


def model():
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    return made.double()


def residuals(net):
    return lambda: net(X)[:, 0] - Y


def sampled(net):
    def one(params, x, y):
        return torch.func.functional_call(net, params, (x,))[0] - y

    return lambda: fo.per_sample(one, X, Y)


MADE = {
    "lm": lambda net, **how: adapters.LevenbergMarquardt(net.named_parameters(), **how),
    "dogleg": lambda net, **how: adapters.Dogleg(net.named_parameters(), **how),
    "gn": lambda net, **how: adapters.GaussNewton(net.named_parameters(), 0.5, 1e-2, **how),
}


def values(net):
    return [p.detach().clone() for p in net.parameters()]


def close(a, b, **how):
    return all(torch.allclose(x, y, **how) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", MADE)
def test_a_closure_and_per_sample_take_the_steps_of_the_transformation(name):
    nets = [model(), model()]
    for net, of in zip(nets, (residuals, sampled), strict=True):
        opt = MADE[name](net)
        losses = [opt.step(of(net)) for _ in range(6)]
        assert losses[0] == pytest.approx(0.5 * residuals(model())().detach().square().sum())
        assert losses[-1] < 0.5 * losses[0]
        assert all(p.grad is None for p in net.parameters())
    assert close(values(nets[0]), values(nets[1]), rtol=1e-6, atol=1e-9)
    known = {"lm": fo.levenberg_marquardt, "dogleg": fo.dogleg}
    tx = known[name]() if name in known else fo.gauss_newton(0.5, 1e-2)
    p = dict(model().named_parameters())
    p = {key: x.detach() for key, x in p.items()}
    state = tx.init(p)
    for _ in range(6):
        updates, state = tx.update(None, state, p, residual_fn=sampled(model())())
        p = fo.apply_updates(p, updates)
    assert close(values(nets[1]), list(p.values()), rtol=1e-6, atol=1e-9)


def test_frozen_parameters_and_groups():
    net = model()
    net[0].weight.requires_grad_(False)
    groups = [{"params": list(net[0].parameters())}, {"params": list(net[2].parameters())}]
    opt = adapters.LevenbergMarquardt(groups)
    before = values(net)
    first = opt.step(residuals(net))
    for _ in range(5):
        last = opt.step(residuals(net))
    assert last < first
    assert torch.equal(net[0].weight, before[0])
    assert not torch.equal(net[0].bias, before[1])
    assert opt.state[net[0].bias]["scale"].shape == (4 + 4 + 1,)
    opt.param_groups[1]["scaling"] = None
    with pytest.raises(ValueError, match="different scaling"):
        opt.step(residuals(net))


def test_a_refused_step_leaves_every_bit():
    w = torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))

    opt = adapters.LevenbergMarquardt([w], damping=1e-8)
    refused = 0
    for _ in range(20):
        before = w.detach().clone()
        damping = float(opt.state[w]["damping"]) if opt.state[w] else 1e-8
        opt.step(lambda: torch.stack([10 * (w[1] - w[0] ** 2), 1 - w[0]]))
        if float(opt.state[w]["damping"]) > damping:
            refused += 1
            assert torch.equal(w.detach().view(torch.int64), before.view(torch.int64))
    assert refused


def test_learning_rate_schedulers():
    net = model()
    opt = MADE["gn"](net)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.0)
    opt.step(residuals(net))
    scheduler.step()
    before = values(net)
    opt.step(residuals(net))
    assert all(map(torch.equal, before, values(net)))


def test_a_warm_start_after_adamw_and_lbfgs():
    net = model()
    adam = adapters.AdamW(net.parameters(), lr=1e-2, compile=False)
    lbfgs = adapters.LBFGS(net.parameters(), max_iter=5, line_search_fn="strong_wolfe")

    def closure():
        net.zero_grad()
        loss = 0.5 * residuals(net)().square().sum()
        loss.backward()
        return loss

    for _ in range(20):
        adam.step(closure)
    warm = lbfgs.step(closure)
    opt = MADE["lm"](net)
    assert opt.step(residuals(net)) < warm.detach()
    for _ in range(30):
        end = opt.step(residuals(net))
    assert float(end) < 0.5 * float(warm.detach())


def test_lightnings_manual_optimization(pl):
    class Fit(pl.ByHand):
        def training_step(self, batch, index):
            goal = batch[0].sum(1, keepdim=True)
            loss = self.optimizers().step(lambda: self.layers(batch[0]) - goal)
            self.losses.append(float(loss))

    fit = Fit(lambda m: adapters.LevenbergMarquardt(m.named_parameters()))
    pl.fit(fit, max_epochs=2)
    assert fit.losses[-1] < 0.8 * fit.losses[0]


def test_errors_change_nothing():
    net = model()
    opt = MADE["lm"](net)
    before = values(net)
    with pytest.raises(TypeError, match="step needs a closure"):
        opt.step()
    with pytest.raises(TypeError, match="returned a single number"):
        opt.step(lambda: residuals(net)().square().mean())
    with pytest.raises(RuntimeError, match="depend on none of the parameters"):
        opt.step(lambda: residuals(net)().detach())
    with pytest.raises(ValueError, match="not finite"):
        opt.step(lambda: residuals(net)() * float("nan"))
    with pytest.raises(TypeError, match="let the closure return per_sample"):
        MADE["lm"](net, geodesic=True).step(residuals(net))
    with pytest.raises(TypeError, match="choose 'kernel'"):
        MADE["gn"](net, linear_solver="cg").step(residuals(net))
    for p in net.parameters():
        p.requires_grad_(False)
    with pytest.raises(RuntimeError, match="nothing to step"):
        opt.step(residuals(net))
    assert all(map(torch.equal, before, values(net)))
    assert not opt.state[next(net.parameters())]
    with pytest.raises(ValueError, match="Invalid damping"):
        MADE["lm"](net, damping=0.0)
