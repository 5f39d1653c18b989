"""Newton–Schulz iterations by a library of C++, compared with torch's operations."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from functional_optim import kernels, linalg
from functional_optim.kernels import newton_schulz as iterations
from functional_optim.linalg import newton_schulz

pytestmark = pytest.mark.skipif(not iterations.serves(), reason="ATen multiplies on this processor")

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
SHAPES = [
    *[(64, 64), (33, 32), (31, 40), (1, 1200), (1300, 1), (100, 300), (300, 100), (65, 33)],
    *[(40, 4500), (600, 610), (5, 64, 70), (2, 3, 48, 40)],
]


@pytest.fixture
def called(monkeypatch):
    """The calls of the library."""
    calls: list[tuple[int, ...]] = []
    real = iterations.run

    def run(G: Tensor, *rest, **how):
        calls.append(tuple(G.shape))
        return real(G, *rest, **how)

    monkeypatch.setattr(iterations, "run", run)
    return calls


def error(X, exact):
    return float((X.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_library_computes_what_torch_computes_in_doubles(shape, called):
    torch.manual_seed(0)
    G = torch.randn(shape)
    before, exact = G.clone(), newton_schulz(G, dtype=F64)
    single, half = newton_schulz(G, dtype=F32), newton_schulz(G)
    assert (single.dtype, half.dtype, single.shape, half.shape) == (F32, BF16, shape, shape)
    assert error(single, exact) < 2e-5
    assert error(half, exact) < 0.03
    assert G.equal(before)
    assert len(called) == 2
    tall_or_wide = max(shape[-2:]) > 4 * min(shape[-2:])
    assert (error(half, exact) < 0.003) == tall_or_wide or not linalg.IN_HARDWARE


@pytest.mark.parametrize("coefficients", ["leloykun", "polar_express", (1.5, -0.5, 0.0)])
@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
def test_every_number_of_steps_and_every_set_of_coefficients(coefficients, steps, called):
    torch.manual_seed(1)
    for shape in [(40, 50), (40, 200)]:
        G = torch.randn(shape)
        exact = newton_schulz(G, coefficients, steps, dtype=F64)
        assert error(newton_schulz(G, coefficients, steps, dtype=F32), exact) < 1e-4
        assert error(newton_schulz(G, coefficients, steps), exact) < 0.04
    assert len(called) == 4


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(200, 230), (40, 1000), (1000, 60), (64, 64)])
def test_the_bits_depend_neither_on_threads_nor_on_the_batch(dtype, shape):
    G = torch.randn(5, *shape)
    alone = torch.stack([newton_schulz(x, dtype=dtype) for x in G])
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        assert newton_schulz(G, dtype=dtype).equal(alone)
        assert newton_schulz(G.mT.contiguous().mT, dtype=dtype).equal(alone)
        assert newton_schulz(G[0], dtype=dtype).equal(alone[0])


def test_matrices_without_a_direction_stay_as_torch_leaves_them():
    zero, broken = torch.zeros(40, 40), torch.randn(2, 40, 40)
    broken[1, 3, 5] = float("nan")
    assert newton_schulz(zero).equal(zero.bfloat16())
    found = newton_schulz(broken)
    assert found[1].isnan().all()
    assert found[0].equal(newton_schulz(broken[0]))
    small = 1e-30 * torch.randn(40, 40)
    assert error(newton_schulz(small, eps=0.0), newton_schulz(small, eps=0.0, dtype=F64)) < 0.03
    large = 1e25 * torch.randn(40, 40)
    assert error(newton_schulz(large), newton_schulz(large, dtype=F64)) < 0.03
    bound = newton_schulz(small, steps=0, eps=1e-28, dtype=F32)
    assert torch.allclose(bound, small / 1e-28, rtol=1e-6)


def test_what_torch_must_see_goes_through_torch(called):
    G = torch.randn(40, 40)
    exact = torch.func.grad(lambda x: newton_schulz(x, dtype=F64).square().sum())(G)
    leaf = G.clone().requires_grad_()
    (found,) = torch.autograd.grad(newton_schulz(leaf, dtype=F32).square().sum(), leaf)
    assert error(found, exact) < 1e-4
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(G, torch.ones_like(G))
        forward_ad.unpack_dual(newton_schulz(dual, dtype=F32)).tangent.norm()
    torch.vmap(newton_schulz)(torch.randn(2, 40, 40))
    torch.compile(newton_schulz, fullgraph=True, backend="eager")(G)
    newton_schulz(G.double())
    newton_schulz(torch.randn(32, 32))  # as fast
    negative = torch._neg_view(G)
    assert error(newton_schulz(negative, dtype=F32), -newton_schulz(G, dtype=F64)) < 1e-4
    assert not called
    with torch.no_grad():
        newton_schulz(leaf)
    assert called


def test_torch_computes_where_nothing_can_be_built(monkeypatch):
    G = torch.randn(3, 40, 40)
    expected = newton_schulz(G, dtype=F32)
    monkeypatch.setattr(iterations, "library", lambda source: None)
    found = newton_schulz(G, dtype=F32)
    assert torch.allclose(found, expected, atol=1e-5)
    assert not found.equal(expected) or not kernels.folder()
