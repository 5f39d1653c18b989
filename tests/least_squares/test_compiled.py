"""Compiled steps: the results of eager ones, whatever the order, in one compilation."""

from __future__ import annotations

import torch
from fits import curves, decay

import functional_optim as fo
from functional_optim.solvers import compiled


def test_a_compiled_step_solves_all_problems_with_one_graph(fresh_dynamo, monkeypatch):
    from functional_optim.solvers import least_squares as front

    monkeypatch.setattr(front, "BLOCK", 4 * 30 * 64)  # slots for 64 problems, filled again
    x0, y = curves(150)
    y[7] = float("nan")
    eager = fo.least_squares(decay, x0, (y,), batched=True)
    graphs = []
    backend = torch.compile

    def counted(fn, **how):
        how.pop("options", None)

        def record(graph, example):
            graphs.append(graph)
            return graph.forward

        return backend(fn, **how, backend=record)

    monkeypatch.setattr(torch, "compile", counted)
    compiled._steps.clear()
    found = fo.least_squares(decay, x0, (y,), batched=True, compile=True)
    assert len(graphs) == 1
    assert torch.equal(found.status, eager.status)
    good = torch.arange(150) != 7
    assert torch.allclose(found.x[good], eager.x[good], rtol=1e-6)
    order = torch.randperm(150)
    mixed = fo.least_squares(decay, x0[order], (y[order],), batched=True, compile=True)
    assert torch.equal(mixed.x, found.x[order])
    assert len(graphs) == 1
    compiled._steps.clear()
