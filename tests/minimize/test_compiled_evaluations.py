"""Compiled evaluations of many problems: the results of eager ones, in one compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from valleys import rosenbrock

import functional_optim as fo
from functional_optim.solvers import compiled, programs


def valley(x: Tensor, a: Tensor) -> Tensor:
    return rosenbrock(x * a) + (x - a).square().sum()


def equations(x: Tensor, a: Tensor) -> Tensor:
    return torch.func.grad(valley)(x, a)


def solved(method: str, x0: Tensor, a: Tensor, **how: Any) -> Any:
    if method in ("newton", "broyden"):
        return fo.root(equations, x0, (a,), method=method, batched=True, **how)
    return fo.minimize(valley, x0, (a,), method=method, bounds=(-1.5, 0.8), batched=True, **how)


@pytest.mark.parametrize(
    "method", ["l-bfgs-b", "bfgs", "ssbroyden", "newton-cg", "newton", "broyden"]
)
def test_one_graph_or_library_solves_any_number_of_problems(method, fresh_dynamo, monkeypatch):
    graphs = []
    compile = torch.compile

    def counted(fn, **how):
        how.pop("options", None)

        def record(graph, example):
            graphs.append(graph)
            return graph.forward

        return compile(fn, **how, backend=record)

    monkeypatch.setattr(torch, "compile", counted)
    monkeypatch.setattr(compiled, "BLOCK", 64)
    compiled._steps.clear()
    generator = torch.Generator().manual_seed(0)
    x0 = torch.rand(150, 5, dtype=torch.float64, generator=generator) * 2 - 1.3
    a = torch.rand(150, 5, dtype=torch.float64, generator=generator) + 0.5
    a[7] = torch.nan
    eager = solved(method, x0, a)
    assert not graphs
    found = solved(method, x0, a, compile=True)
    count = int(method == "newton-cg")
    assert len(graphs) == count
    assert int(found.status[7]) == -1
    assert torch.equal(found.success, eager.success)
    good = eager.success
    value = valley if method not in ("newton", "broyden") else lambda x, a: x.sum()
    f = [torch.vmap(value)(r.x[good], a[good]) for r in (found, eager)]
    assert torch.allclose(*f, rtol=1e-6)
    order = torch.randperm(150, generator=generator)
    mixed = solved(method, x0[order], a[order], compile=True)
    assert torch.equal(mixed.x, found.x[order])
    few = solved(method, x0[20:30], a[20:30], compile=True)
    assert torch.equal(few.x, found.x[20:30])
    assert len(graphs) == count
    compiled._steps.clear()


def test_inside_of_transforms_all_runs_eagerly(monkeypatch):
    def refused(fn, **how):
        def graph(*args):
            raise AssertionError("a graph was called")

        return graph

    monkeypatch.setattr(torch, "compile", refused)
    compiled._steps.clear()
    programs._known.clear()
    x0, a = torch.ones(3, 2, dtype=torch.float64), torch.full((3, 2), 2.0, dtype=torch.float64)
    solvers = [
        lambda a, **how: fo.minimize(lambda x, a: ((x - a) ** 2).sum(), x0, (a,), **how),
        lambda a, **how: fo.root(lambda x, a: x**2 - a, x0, (a,), **how),
        lambda a, **how: fo.least_squares(lambda x, a: x**2 - a, x0, (a,), **how),
    ]
    for solver in solvers:
        plain, graph = [
            torch.func.jacrev(lambda a, s=solver, c=c: s(a, batched=True, compile=c).x)(a)
            for c in (False, True)
        ]
        assert torch.equal(plain, graph)
        assert plain.any()
        assert not programs._known
        solver(a, batched=True, compile=True)
        assert programs._known
        programs._known.clear()
    compiled._steps.clear()


def test_one_problem_is_not_compiled():
    x0 = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="pass batched=True"):
        fo.minimize(rosenbrock, x0, compile=True)
    with pytest.raises(ValueError, match="pass batched=True"):
        fo.root(lambda x: x - 1, x0, compile=True)


@pytest.mark.full
def test_a_graph_rounds_as_torch_does(fresh_dynamo):
    """Inductor left out the rounding of x to a half type."""
    x = torch.rand(5, generator=torch.Generator().manual_seed(0))
    graph = compiled.in_blocks(object(), lambda x, own: x.bfloat16().float() - own)
    assert torch.equal(graph(x, torch.ones(5)), x.bfloat16().float() - 1)
