"""A kernel that does something else than its rule is not used: it is tried on small tensors."""

from __future__ import annotations

import warnings

import pytest
import torch
from compilers import forget

import functional_optim as fo
from functional_optim.kernels.points import POINT


def scaled(size):
    def update(u, slots, p):
        return -size * (u * u), slots

    return fo.leafwise(None, update, name="scaled")


@pytest.fixture
def wrong(monkeypatch):
    """Kernels add where they are to multiply."""
    forget(monkeypatch)
    monkeypatch.setitem(POINT, "mul.Tensor", lambda b, n, x, y: b.add(x, y))


def stepped(tx, **options):
    params = {"w": torch.ones(3, 4), "b": torch.ones(5)}
    grads = {"w": torch.full((3, 4), 3.0), "b": torch.full((5,), 3.0)}
    return fo.compile(tx, **options)(grads, tx.init(params), params)[0]


@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_a_wrong_kernel_gives_way_to_the_rule(wrong, size):
    with pytest.warns(RuntimeWarning, match="something else than the rules do") as caught:
        params = stepped(scaled(size))
    for p in params.values():
        torch.testing.assert_close(p, torch.full_like(p, 1.0 - 9.0 * size), rtol=1e-7, atol=0)
    assert len(caught) == 1


def test_a_wrong_kernel_is_an_error_where_a_step_must_be_compiled(wrong):
    with pytest.raises(RuntimeError, match="something else than the rules do"):
        stepped(scaled(0.5), strict=True)


def test_a_right_kernel_is_used():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = stepped(scaled(0.5), strict=True)
    torch.testing.assert_close(params["b"], torch.full((5,), -3.5))
