"""torch.compile around model and step together: equal to eager, and compiled once for all rates."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import lr_scheduler

import functional_optim as fo
from functional_optim import adapters

RATES = [0.1, 0.07, 0.05, 0.03, 0.02, 0.01]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def model_of():
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    return torch.nn.Sequential(*layers).double()


def batches():
    torch.manual_seed(1)
    return [torch.randn(6, 4, dtype=torch.float64) for _ in RATES]


def loss_of(model, x):
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def recipe(lr):
    return fo.chain(fo.clip_by_global_norm(0.5), fo.adamw(lr), fo.params_ema(0.9))


# ---------------------------------------------------------------- the functional step


@pytest.mark.parametrize("form", ["schedule", "tensor"])
def test_one_graph_of_forward_backward_and_step(form):
    model = model_of()

    def step(params, state, x, lr):
        tx = recipe(lr if form == "tensor" else schedule)

        def loss(params):
            y = torch.func.functional_call(model, params, (x,))
            return (y - x.sum(1, keepdim=True)).square().mean()

        grads = torch.func.grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return fo.apply_updates(params, updates), state

    def schedule(count):
        return 0.1 * 0.7**count

    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    params = {name: p.detach() for name, p in model.named_parameters()}
    ours = theirs = (params, recipe(0.1).init(params))
    graphs = []
    for x, lr in zip(batches(), RATES, strict=True):
        lr = torch.tensor(lr, dtype=torch.float64)
        ours, theirs = compiled(*ours, x, lr), step(*theirs, x, lr)
        graphs.append(backend.frame_count)
    assert_close(ours, theirs, 1e-12)
    assert graphs == [graphs[0]] * len(RATES)  # no step but the first compiles


# ---------------------------------------------------------------- the object, torch.optim's way


def ours(params, lr):
    return adapters.AdamW(params, lr=lr)


def stock(params, lr):
    return torch.optim.AdamW(params, lr=lr)


def measured(params, lr):
    return adapters.Optimizer(params, recipe, lr=torch.tensor(lr, dtype=torch.float64))


def trained(make, backend=None):
    """A model after some steps, and how many graphs there were after each; lr always changes."""
    model = model_of()
    opt = make(model.parameters(), RATES[0])
    scheduler = lr_scheduler.LambdaLR(opt, lambda i: RATES[min(i, len(RATES) - 1)] / RATES[0])

    def step(x):
        opt.zero_grad()
        loss_of(model, x).backward()
        opt.step()

    go = step if backend is None else torch.compile(step, backend=backend)
    graphs, seen = [], set()
    for x in batches():
        seen.add(float(opt.param_groups[0]["lr"]))
        go(x)
        graphs.append(backend.frame_count if backend else 0)
        scheduler.step()
    assert len(seen) == len(RATES)
    return values(model), graphs


FLOATS = pytest.mark.xfail(
    torch.__version__ < "2.13",
    reason="torch 2.11 and 2.12 compile again for a float that meets tensors only as -lr",
)


@pytest.mark.parametrize("make", [pytest.param(ours, marks=FLOATS), measured])
def test_a_compiled_loop_around_an_object_equals_the_eager_one(make):
    """torch.optim's own way; torch's compiler breaks the graph at `backward` and goes on."""
    expected, _ = trained(make)
    found, graphs = trained(make, CompileCounterWithBackend("aot_eager"))
    assert_close(found, expected, 1e-10)
    assert graphs[2:] == [graphs[2]] * (len(RATES) - 2)  # the first makes the state
    if make is ours:
        assert_close(found, trained(stock)[0], 1e-10)


def test_a_step_that_measures_is_one_graph():
    lr = torch.tensor(0.1, dtype=torch.float64)
    model = model_of()
    opt = adapters.Optimizer(model.parameters(), recipe, lr=lr)
    other = model_of()
    twin = adapters.Optimizer(other.parameters(), recipe, lr=lr, compile=False)
    step = torch.compile(opt.step, backend="aot_eager", fullgraph=True)
    for x in batches()[:3]:
        for m in (model, other):
            m.zero_grad()
            loss_of(m, x).backward()
        step()
        twin.step()
    assert_close(values(model), values(other), 1e-10)
