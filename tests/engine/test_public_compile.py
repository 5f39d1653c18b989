"""Steps through torch.compile itself, as on devices without kernels of ours."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch

import functional_optim as fo
from functional_optim import kernels

SIZES = (5, 1, 0, 7, 1, 3)


@pytest.fixture
def public(monkeypatch):
    """No native library and no direct call of Inductor; torch.compile with the quickest backend."""

    def refused(*args, **more):
        raise RuntimeError("not here")

    monkeypatch.setattr(kernels, "_built", {})
    monkeypatch.setattr(kernels, "sweep", lambda *args, **more: None)
    monkeypatch.setattr(kernels, "lower_with_products", refused)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def steps(count=4):
    torch.manual_seed(0)
    tx = fo.adamw(0.1)
    params = {str(i): torch.randn(size) for i, size in enumerate(SIZES)}
    state, step = tx.init(params), fo.compile(tx)
    for _ in range(count):
        grads = {name: torch.randn_like(p) for name, p in params.items()}
        params, state = step(grads, state, params)
    return [x for x in fo.tree.leaves((params, state)) if isinstance(x, torch.Tensor)]


def test_the_recompile_limit_tears_no_state(public):
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=2):
        mine = steps()
    assert any(isinstance(x, kernels.Public) for x in kernels._built.values())
    kernels._built.clear()
    for x, y in zip(mine, steps(), strict=True):
        assert torch.equal(x, y)
