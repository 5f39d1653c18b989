"""Updates of dense quasi-Newton matrices, against the formulas of the papers."""

import pytest
import torch
from torch import Tensor

from functional_optim.solvers.dense import Dense, DenseInverse, mixture

METHODS = ("bfgs", "ssbfgs", "ssbroyden")


def pairs(count: int, n: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Positive definite matrices B, steps s along −B⁻¹g, and differences of gradients."""
    generator = torch.Generator().manual_seed(n)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    A = drawn(count, n, n)
    B = A @ A.mT + torch.eye(n, dtype=torch.float64)
    s = drawn(count, n)
    y = (B @ s.unsqueeze(-1))[..., 0] * torch.linspace(0.3, 3, count, dtype=torch.float64)[:, None]
    y = y + 0.2 * drawn(count, n)
    assert bool(((s * y).sum(-1) > 0).all())
    return B, s, y


def by_paper(method: str, B: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """The new inverse of one problem: Urbán, Stefanou, Pons (2024), section 3, line by line."""
    H, n = torch.linalg.inv(B), len(s)
    sy = s @ y
    b, h = s @ B @ s / sy, y @ H @ y / sy
    tau = phi = torch.ones_like(b)
    if method != "bfgs":
        tau = min(torch.ones_like(b), 1 / b)
    if method == "ssbroyden":
        a = h * b - 1
        c = torch.sqrt(a / (a + 1))
        rho = min(torch.ones_like(b), h * (1 - c))
        theta = max((rho - 1) / a, min(1 / rho, (1 - b) / b))
        sigma = 1 + a * theta
        power = abs(sigma) ** (1 / (1 - n))
        first = tau
        tau = first * min(power, 1 / theta) if theta > 0 else min(first * power, sigma)
        phi = (1 - theta) / (1 + a * theta)
    v = torch.sqrt(y @ H @ y) * (s / sy - H @ y / (y @ H @ y))
    inner = H - torch.outer(H @ y, y @ H) / (y @ H @ y) + phi * torch.outer(v, v)
    return inner / tau + torch.outer(s, s) / sy


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("method", METHODS)
def test_a_matrix_and_its_inverse_learn_what_the_papers_say(method, count):
    B, s, y = pairs(count)
    g = -2.0 * (B @ s.unsqueeze(-1))[..., 0]
    known = torch.ones(count, dtype=torch.int64)
    useful = torch.ones(count, dtype=torch.bool)
    direct = Dense(B, known).learned(method, s, y, g, useful).B
    inverse = DenseInverse(torch.linalg.inv(B), known).learned(method, s, y, g, useful).H
    for i in range(count):
        expected = by_paper(method, B[i], s[i], y[i])
        assert torch.allclose(inverse[i], expected, rtol=1e-8, atol=1e-10)
        assert torch.allclose(torch.linalg.inv(direct[i]), expected, rtol=1e-8, atol=1e-10)
        assert torch.allclose(inverse[i] @ y[i], s[i], atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_of_no_use_is_not_learned_and_the_first_pair_scales(method):
    _, s, y = pairs(2)
    eye = torch.eye(6, dtype=torch.float64).expand(2, 6, 6)
    none = torch.zeros(2, dtype=torch.int64)
    useful = torch.tensor([True, False])
    direct = Dense(eye, none).learned(method, s, y, -s, useful)
    inverse = DenseInverse(eye, none).learned(method, s, y, -s, useful)
    assert direct.pairs.tolist() == inverse.pairs.tolist() == [1, 0]
    assert torch.equal(direct.B[1], eye[1])
    assert torch.equal(inverse.H[1], eye[1])
    scaled = by_paper(method, eye[0] * (y[0] @ y[0]) / (s[0] @ y[0]), s[0], y[0])
    assert torch.allclose(inverse.H[0], scaled)
    assert torch.allclose(torch.linalg.inv(direct.B[0]), scaled)


def test_self_scaling_never_raises_b_and_rounding_gives_bfgs():
    b = torch.tensor([0.2, 1.0, 7.0, -1.0, 3.0], dtype=torch.float64)
    h = torch.tensor([6.0, 1.0, 2.0, 1.0, float("nan")], dtype=torch.float64)
    for method in ("ssbfgs", "ssbroyden"):
        tau = mixture(method, b, h, 4).tau
        assert bool((tau <= 1 + 1e-12).all())
        assert bool((tau > 0).all())
    mix = mixture("ssbroyden", b, h, 4)
    assert (float(mix.tau[3]), float(mix.theta[3]), float(mix.phi[3])) == (1.0, 0.0, 1.0)
    assert (float(mix.tau[4]), float(mix.theta[4]), float(mix.phi[4])) == (1.0, 0.0, 1.0)
