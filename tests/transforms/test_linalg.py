"""Products of matrices of which only a part is computed."""

import pytest
import torch
from helpers import assert_close

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
