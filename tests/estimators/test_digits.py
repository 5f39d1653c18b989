"""Digits to 90 % by evolution, without one backward pass."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import functional_optim as fo
from functional_optim import search
from functional_optim.adapters import GradientFree

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:sklearn")


@pytest.fixture
def digits(monkeypatch):
    """The example's data and network; whoever calls backward fails."""
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(EXAMPLES)

    def never(*args, **kwargs):
        raise AssertionError("backward was called")

    engine = importlib.import_module("torch.autograd.graph")
    monkeypatch.setattr(engine, "_engine_run_backward", never)
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", never)
    with pytest.raises(AssertionError, match="backward was called"):
        torch.ones((), requires_grad=True).backward()
    return importlib.import_module("digits")


def test_openai_es_learns_digits_in_one_graph_without_recompiling(digits, fresh_dynamo):
    data, model = digits.load(), digits.network()
    method = search.openai_es(128, 0.05, fo.adam(0.05))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def loss_fn(params, x, y):
        return digits.loss_of(model, params, x, y)

    @torch.compile(fullgraph=True, backend=backend)
    def generation(state, x, y):
        candidates, state = method.ask(state)
        return method.tell(candidates, search.evaluate(loss_fn, candidates, x, y), state)

    batches = torch.Generator().manual_seed(0)
    state = method.init(dict(model.named_parameters()))
    for _ in range(60):
        state = generation(state, *data.batch(128, batches))
    assert digits.accuracy(model, search.center(state), data) > 0.9
    assert len(graphs) == 1


def test_the_optimizer_object_learns_digits(digits):
    data, model = digits.load(), digits.network()
    opt = GradientFree(
        model.named_parameters(), search.openai_es, population=64, sigma=0.05, tx=fo.adam, lr=0.05
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=150, eta_min=0.005)
    batches = torch.Generator().manual_seed(0)
    for _ in range(150):
        x, y = data.batch(128, batches)
        opt.step(lambda x=x, y=y: torch.nn.functional.cross_entropy(model(x), y))
        schedule.step()
    assert digits.accuracy(model, dict(model.named_parameters()), data) > 0.9
