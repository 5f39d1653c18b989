"""The algorithms that CONTRIBUTING.md adds are what their formulas say, however they are run."""

import inspect
import re

import pytest
import snippets
import torch
from helpers import assert_close, clone
from torch import Tensor
from undeclared import WAYS

import functional_optim as fo

PAGE = (snippets.ROOT / "CONTRIBUTING.md").read_text()
NAMES = snippets.run_page("CONTRIBUTING.md", PAGE)
SHAPES = {"matrix": (3, 4), "twin": (3, 4), "tall": (5, 2)}


def soft_sign(gs: list[Tensor], lr: float, beta: float = 0.9, eps: float = 1e-2) -> Tensor:
    """The sum of the steps of a tensor, from its gradients."""
    m, moved = torch.zeros_like(gs[0]), torch.zeros_like(gs[0])
    for g in gs:
        m = beta * m + (1 - beta) * g
        moved = moved - lr * m / (m.abs() + eps)
    return moved


def left_inverse(gs: list[Tensor], lr: float, beta: float = 0.9, eps: float = 0.1) -> Tensor:
    rows, moved = len(gs[0]), torch.zeros_like(gs[0])
    L, P = torch.zeros(rows, rows, dtype=moved.dtype), torch.eye(rows, dtype=moved.dtype)
    for k, g in enumerate(gs):
        L = beta * L + (1 - beta) * g @ g.T
        if k % 3 == 0:
            P = torch.linalg.inv(L + eps * torch.eye(rows, dtype=L.dtype))
        moved = moved - lr * P @ g
    return moved


LOOPS = {"soft_sign": soft_sign, "left_inverse": left_inverse}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOOPS)
def test_an_algorithm_of_the_page_is_its_formula(name, way):
    torch.manual_seed(0)
    params = {n: torch.randn(shape, dtype=torch.float64) for n, shape in SHAPES.items()}
    grads = [{n: torch.randn_like(p) for n, p in params.items()} for _ in range(7)]
    options = {"strict": True} if way == "fo.compile" else {}
    moved, _ = WAYS[way](NAMES[name](lr=0.1), clone(params), grads, **options)
    for n, p in params.items():
        assert_close(moved[n], p + LOOPS[name]([g[n] for g in grads], 0.1), 1e-12)


def test_a_kernel_of_a_convolution_is_a_matrix_there():
    params = {"kernel": torch.randn(3, 2, 2, 2, dtype=torch.float64)}
    grads = [{"kernel": torch.randn_like(params["kernel"])} for _ in range(4)]
    moved, _ = WAYS["update"](NAMES["left_inverse"](lr=0.1), clone(params), grads)
    expected = left_inverse([g["kernel"].flatten(1) for g in grads], 0.1)
    assert_close(moved["kernel"], params["kernel"] + expected.reshape(3, 2, 2, 2), 1e-12)


def test_the_page_explains_as_many_concepts_as_it_says():
    tables = re.findall(r"^\| concept \|.*\n\| --- .*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert [len(rows.splitlines()) for rows in tables] == [6, 4]
    assert "An element-wise algorithm: six concepts" in PAGE
    assert "A matrix algorithm: four more" in PAGE


def test_leafwise_asks_for_no_more_than_the_page_says():
    """Ten arguments, and those of before; none of the three records has more than twelve fields."""
    from functional_optim.core.rule import Reads, Rule

    known = inspect.signature(fo.leafwise).parameters
    assert len(known) <= 12
    assert len([x for x in known.values() if x.kind is not x.VAR_KEYWORD]) <= 10
    for record in (Rule, Reads, fo.Runs, fo.Storage):
        assert len(record._fields) <= 12
