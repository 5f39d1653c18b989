"""Where a kernel must not run: under a tracer, and inside a transform of torch.func."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_close, clone, copy_of, make_grads, run, step_object
from objects import DROP_INS, parameters
from torch.fx.experimental.proxy_tensor import make_fx

import functional_optim as fo
from functional_optim import adapters

EXACT = 1e-12
SHAPE = (3, 2)

compiled_pairs = pytest.mark.parametrize("pair", parameters([DROP_INS[1], DROP_INS[3]]))
either_way = pytest.mark.parametrize("donate", [True, False])


def stepped(pair, grads):
    """A pair over one matrix; ours has its kernel, and has made the steps."""
    params = {"matrix": torch.ones(SHAPE, dtype=torch.float64)}
    ours, mine, theirs, other = pair.make(params)
    ours.compile = True
    step_object(ours, grads)
    return ours, mine, theirs, other


def matrices(n):
    return make_grads({"matrix": torch.ones(SHAPE, dtype=torch.float64)}, n)


@compiled_pairs
def test_a_step_that_make_fx_traces_is_in_its_graph(pair):
    """With its step count: a graph that is run again counts on."""
    grads = matrices(6)
    ours, mine, theirs, other = stepped(pair, grads[:2])

    def step(g):
        mine[0].grad = g
        ours.step()

    graph = make_fx(step)(grads[2]["matrix"].clone())  # tracing is a step, too
    with torch.no_grad():
        for g in grads[3:5]:
            graph(g["matrix"])
    step_object(ours, grads[5:])
    step_object(theirs, grads)
    assert_close(copy_of(mine), copy_of(other), EXACT)


@compiled_pairs
def test_a_step_inside_functionalize(pair):
    """Its tensors have no memory: a kernel would read at address 0."""
    grads = matrices(3)
    ours, mine, theirs, other = stepped(pair, grads[:2])
    step_object(theirs, grads[:2])

    def moved(p, g, opt):
        opt.param_groups[0]["params"] = [p]
        opt.state.clear()
        p.grad = g
        opt.step()
        return p.clone()

    results = [
        torch.func.functionalize(lambda p, g, opt=opt: moved(p, g, opt))(
            known[0].detach().clone(), grads[2]["matrix"]
        )
        for opt, known in ((ours, mine), (theirs, other))
    ]
    assert_close(results[0], results[1], EXACT)


def test_a_gradient_of_torch_func_goes_through_a_differentiable_step():
    def loss(w):
        p = w.clone()
        p.grad = 2 * w
        opt = adapters.SGD([p], lr=0.25, differentiable=True)
        opt.step()  # to w / 2
        return p.square().sum()

    w = torch.tensor([1.0, -3.0], dtype=torch.float64)
    assert_close(torch.func.grad(loss)(w), w / 2, EXACT)


@either_way
def test_a_compiled_step_that_make_fx_traces_is_in_its_graph(donate):
    tx = fo.adamw(lr=0.1)
    params = {"w": torch.ones(SHAPE, dtype=torch.float64)}
    grads = [{"w": g["matrix"]} for g in matrices(3)]
    step = fo.compile(tx, donate=donate)
    graph = make_fx(step)(grads[0], tx.init(params), clone(params))
    want = (params, tx.init(params))
    got = clone(want)
    for g in grads[1:]:
        got = graph(g, got[1], got[0])
        want = run(tx, want[0], [g], want[1])
    assert_close(got, want, EXACT)


@either_way
@pytest.mark.parametrize("tx", [fo.adamw(lr=0.1), fo.nadam(lr=0.1)], ids=["adamw", "carry"])
def test_a_compiled_step_under_vmap(donate, tx):
    params = {"w": torch.randn(4, *SHAPE, dtype=torch.float64)}
    grads = {"w": torch.randn(4, *SHAPE, dtype=torch.float64)}
    state = torch.vmap(tx.init)(params)
    held = clone(params)
    got, after = torch.vmap(fo.compile(tx, donate=donate))(grads, state, held)
    for i in range(4):
        alone = {"w": params["w"][i]}
        want, _ = run(tx, alone, [{"w": grads["w"][i]}])
        assert_close({"w": got["w"][i]}, want, EXACT)
    assert_close(held, got if donate else params, 0.0)
    assert after.step.tolist() == [1] * 4


def test_a_gradient_goes_through_a_compiled_step():
    """Through one that does not donate: what it wrote into its arguments would be lost."""
    tx = fo.sgd(lr=0.25)
    step = fo.compile(tx, donate=False)

    def loss(w):
        moved, _ = step({"w": 2 * w}, tx.init({"w": w}), {"w": w})  # to w / 2
        return moved["w"].square().sum()

    w = torch.tensor([1.0, -3.0], dtype=torch.float64)
    assert_close(torch.func.grad(loss)(w), w / 2, EXACT)
