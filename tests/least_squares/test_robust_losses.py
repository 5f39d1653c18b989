"""Robust losses: fits whose residuals are all far off at first."""

from __future__ import annotations

import pytest
import torch

import functional_optim as fo

KWARGS = {"ftol": 1e-14, "xtol": 1e-14, "gtol": 1e-10}


def line(x, t, y):
    return x[0] + x[1] * t - y


@pytest.mark.parametrize("loss", ["soft_l1", "huber"])
@pytest.mark.parametrize("start", [0.0, 100.0])
def test_a_convex_loss_has_one_minimum_from_everywhere(loss, start):
    torch.manual_seed(0)
    t = torch.linspace(0, 4, 60, dtype=torch.float64)
    y = 2 - t + 0.02 * torch.randn(60, dtype=torch.float64)
    y[::9] += 5
    x0 = torch.full((2,), start, dtype=torch.float64)
    found = fo.least_squares(line, x0, (t, y), loss=loss, f_scale=0.05, **KWARGS)
    x = found.x.clone().requires_grad_()
    z = (line(x, t, y) / 0.05) ** 2
    rho = torch.where(z > 1, 2 * z.sqrt() - 1, z) if loss == "huber" else 2 * ((1 + z).sqrt() - 1)
    (0.5 * 0.05**2 * rho).sum().backward()
    assert found.status > 0
    assert x.grad.abs().max() < 1e-7
    torch.testing.assert_close(found.x, x.new_tensor([2.0, -1.0]), rtol=0, atol=0.02)


@pytest.mark.parametrize("loss", ["soft_l1", "huber", "cauchy"])
def test_a_decay_with_outliers_is_found(loss):
    t = torch.linspace(0, 4, 50, dtype=torch.float64)
    y = 2.5 * torch.exp(-1.3 * t) + 0.5
    y[::7] += 3

    def decay(x):
        return x[0] * torch.exp(-x[1] * t) + x[2] - y

    x0 = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    found = fo.least_squares(decay, x0, loss=loss, f_scale=0.1, max_nfev=1000)
    assert found.status > 0
    torch.testing.assert_close(found.x, x0.new_tensor([2.5, 1.3, 0.5]), rtol=0, atol=0.1)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("how", [{}, {"bounds": (None, 9.0)}], ids=["free", "bounds"])
def test_a_loss_that_bends_the_other_way_ends_with_success(how, compile):
    """Damping stays large: the curvature of the loss at 1 is not in the model."""
    x0 = torch.tensor([[1.0, 5.0], [0.5, 5.0]], dtype=torch.float64)
    found = fo.least_squares(
        lambda x: torch.stack([x[0] ** 2 + 1, x[1] - 5]), x0, loss="huber", f_scale=0.3,
        batched=True, compile=compile, **how,
    )  # fmt: skip
    assert found.status.tolist() == [2, 2]
    assert torch.allclose(found.cost, found.cost.new_tensor(0.255), rtol=1e-8)
