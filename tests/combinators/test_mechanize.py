"""Mechanic against the authors' steps, written out, and what it must refuse."""

import numpy as np
import pytest
import torch
from helpers import as_parameters, assert_close, copy_of, make_grads, make_params, run, step_object

import functional_optim as fo
from functional_optim import adapters
from functional_optim.combinators.mechanize import BETAS


def loop(params, grads, lr, s_decay=0.01, betas=BETAS, s_init=1e-8, eps=1e-8):
    """Mechanic around SGD, for a list of arrays."""
    b, start = np.array(betas), params
    s, v, r, m = (np.full(len(b), x) for x in (0.0, 0.0, 0.0, 1e-6))
    deltas = [np.zeros_like(p) for p in params]

    def dot(xs, ys):
        return sum((x * y).sum() for x, y in zip(xs, ys, strict=True))

    for own in grads:
        there = [p - lr * g for p, g in zip(params, own, strict=True)]
        norms = np.sqrt(dot(own, own)) / (np.sqrt(dot(there, there)) + eps)
        h = dot(deltas, own) + s_decay * s.sum() * norms * dot(deltas, there)
        m = np.maximum(b * m, abs(h))
        v = b**2 * v + h**2
        r = np.maximum(b * r - s * h, 0)
        s = (m * s_init / len(b) + r) / (np.sqrt(v) + eps)
        deltas = [d - lr * g for d, g in zip(deltas, own, strict=True)]
        params = [p + max(s.sum(), 0) * d for p, d in zip(start, deltas, strict=True)]
    return params, s


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("hyper", [{}, {"s_decay": 0.3, "betas": (0.5, 0.9), "s_init": 1e-3}])
def test_it_is_the_authors_step(hyper):
    params = make_params()
    grads = make_grads(params, 50)
    # gradients that mostly agree, so that the scale grows
    grads = [{k: x + 1 for k, x in g.items()} for g in grads]
    found, state = run(fo.mechanize(fo.sgd(0.1), **hyper), params, grads)
    steps = [[x.numpy() for x in g.values()] for g in grads]
    want, s = loop([p.numpy() for p in params.values()], steps, 0.1, **hyper)
    assert_close(list(found.values()), [torch.as_tensor(x) for x in want], 1e-10)
    assert [float(state.carry[f"s_{i}"]) for i in range(len(s))] == pytest.approx(list(s), rel=1e-9)
    assert sum(s) > 10 * hyper.get("s_init", 1e-8)


def test_groups_are_measured_together_and_a_kernel_does_it():
    params = make_params()
    grads = make_grads(params, 6)
    want, _ = run(fo.mechanize(fo.adamw(1.0), s_init=0.01), params, grads)
    for compile in ("strict", False):
        mine = as_parameters(params)
        cut = [{"params": mine[:2]}, {"params": mine[2:]}]
        recipe = lambda: fo.mechanize(fo.adamw(1.0), s_init=0.01)  # noqa: E731
        step_object(adapters.Optimizer(cut, recipe, compile=compile), grads)
        assert_close(copy_of(mine), list(want.values()), 1e-12)
