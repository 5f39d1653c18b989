"""Residuals and their Jacobians: plain, per sample, stacked; over trees; in blocks."""

import pytest
import torch

import functional_optim as fo
from functional_optim.core.ravel import Ravel
from functional_optim.solvers import losses, residuals

DRAWN = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
W = {"w": DRAWN[:3, :2], "b": DRAWN[3, :2]}
X, Y = DRAWN[5:], DRAWN[5:, :2].cos()


def one(params, x, y):
    return torch.tanh(x @ params["w"] + params["b"]) - y


def plain(params):
    return torch.tanh(X @ params["w"] + params["b"]) - Y


def dense(fn):
    flat = Ravel(W)
    x = flat.vector(W)
    return torch.autograd.functional.jacobian(lambda v: fn(flat.tree(v)).reshape(-1), x)


@pytest.mark.parametrize("limit", [2**24, 20])
def test_all_structures_have_the_jacobian_of_autograd(limit, monkeypatch):
    monkeypatch.setattr(residuals, "LIMIT", limit)
    flat = Ravel(W)
    x = flat.vector(W)
    sampled = fo.per_sample(one, X, Y)
    joined = fo.stack_residuals(sampled, lambda p: 0.1 * p["b"], plain)
    for fn in (plain, sampled, joined):
        r, J = residuals.jacobian(fn, flat, x)
        assert torch.allclose(r, fn(W).reshape(-1))
        assert torch.allclose(J, dense(fn))
        again, push, pull = residuals.products(fn, flat, x)
        v, u = torch.randn_like(x), torch.randn_like(r)
        assert torch.allclose(again, r)
        assert torch.allclose(push(v), J @ v)
        assert torch.allclose(pull(u), u @ J)


def test_blocks_of_samples_are_bounded(monkeypatch):
    monkeypatch.setattr(residuals, "LIMIT", 33)  # two samples of two residuals, eight parameters
    flat = Ravel(W)
    sizes = [len(r) for r, _ in residuals.blocks(fo.per_sample(one, X, Y), flat, flat.vector(W))]
    assert sizes == [4, 4, 4, 2]


def test_per_sample_is_the_plain_function():
    assert torch.equal(fo.per_sample(one, X, Y)(W), plain(W).reshape(-1))
    with pytest.raises(ValueError, match="number of samples"):
        fo.per_sample(one, X, Y[:3])
    with pytest.raises(TypeError, match="put what all samples share into the function"):
        fo.per_sample(one, X, 2.0)
    with pytest.raises(TypeError, match="fn\\(params, \\*sample\\) first"):
        fo.per_sample(X, one)
    with pytest.raises(ValueError, match="at least one function"):
        fo.stack_residuals()


def test_a_function_without_forward_derivatives_is_differentiated_backward():
    class Square(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] * g

    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = fo.least_squares(lambda v: torch.cat([Square.apply(v) - 4, v - 2]), x)
    assert torch.allclose(found.x, torch.full_like(x, 2.0))


@pytest.mark.parametrize("name", list(losses.LOSSES))
def test_losses_and_their_derivatives_are_scipys(name):
    scipy_losses = pytest.importorskip("scipy.optimize._lsq.least_squares")
    z = torch.tensor([0.0, 0.3, 1.0, 1.7, 50.0], dtype=torch.float64)
    rho = losses.LOSSES[name](z)
    if name != "linear":
        known = scipy_losses.construct_loss_function(5, name, 0.5)((z.sqrt() * 0.5).numpy())
        ours = torch.stack([rho.value * 0.25, rho.first, rho.second / 0.25])
        assert torch.allclose(ours, torch.as_tensor(known), rtol=1e-12)
    first = torch.func.vmap(torch.func.grad(lambda z: losses.LOSSES[name](z).value))(z)
    assert torch.allclose(first, rho.first)
