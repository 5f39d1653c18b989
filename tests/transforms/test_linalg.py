"""Products of matrices of which only a part is computed."""

import pytest
import torch
from helpers import assert_close

import functional_optim as fo
from functional_optim import linalg
from functional_optim.linalg import symmetric_product


@pytest.mark.parametrize("shape", [(700, 40), (513, 513), (3, 300, 8), (2, 1, 260, 5), (0, 300, 4)])
def test_a_symmetric_product_is_the_plain_one(shape):
    X = torch.randn(shape, dtype=torch.float64)
    assert_close(symmetric_product(X, X), X @ X.mT, 1e-12)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_symmetric_product_adds_what_it_is_asked_to(batch):
    A = torch.randn(*batch, 600, 600, dtype=torch.float64)
    A = A + A.mT
    B = A @ A
    assert_close(symmetric_product(A, B, A, beta=2.0, alpha=0.5), 2 * A + 0.5 * (A @ B), 1e-10)


def test_symmetric_products_pass_torch_func_and_autograd(monkeypatch):
    monkeypatch.setattr(linalg, "WHOLE", 2)
    X, weight = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)

    def through(product):
        return torch.vmap(torch.func.grad(lambda x: (weight * product(x)).sum()))(X)

    blocks = through(lambda x: symmetric_product(x, x))
    assert_close(blocks, through(lambda x: x @ x.mT), 1e-12)


def rarely_used(seed: int) -> torch.Tensor:
    """A gradient in which most rows are zero, such as that of an embedding of rare words."""
    random = torch.Generator().manual_seed(seed)
    G = torch.zeros(64, 8)
    live = torch.randperm(64, generator=random)[:16]
    G[live] = torch.randn(16, 8, generator=random) * torch.logspace(-6, 0, 16)[:, None]
    return G


@pytest.mark.parametrize("seed", range(40))
def test_matrices_with_many_zero_rows_have_eigenvectors(seed):
    """LAPACK's float32 routine raises an error for some of them, and returns NaN for others."""
    A = rarely_used(seed) @ rarely_used(seed).T
    values, V, finite = linalg.eigh(torch.stack([A, torch.eye(64)])[: 1 + seed % 2])
    assert bool(finite.all())
    torch.testing.assert_close((V * values[:, None, :] @ V.mT)[0], A, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close((V.mT @ V)[0], torch.eye(64), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("recipe", [fo.soap, fo.kl_soap, fo.shampoo, fo.galore])
def test_steps_are_finite_where_most_rows_are_zero(recipe):
    tx = recipe()
    grads = [rarely_used(seed) for seed in range(40)]
    together = torch.vmap(lambda G: tx.update(G, tx.init(G), G)[0])(torch.stack(grads))
    step = fo.compile(tx)
    for G, member in zip(grads, together, strict=True):
        updates, state = tx.update(G, tx.init(G), G)
        torch.testing.assert_close(member, updates, atol=1e-4, rtol=1e-3)
        assert all(x.isfinite().all() for x in (updates, *fo.tree.leaves(state.slots)))
        new, _ = step(G.clone(), tx.init(G), G.clone())
        torch.testing.assert_close(new, G + updates)
