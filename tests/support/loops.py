"""A small model with its data, and the optimizers of a row, for loops that others have written."""

from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch

from functional_optim import adapters

EXACT = 1e-10

every_row = pytest.mark.parametrize("case", cases.with_torch(costly=True))


def drop_in(case: cases.Case, params: Any, **more: Any) -> Any:
    """A row's class that stands for torch's, run eagerly."""
    return case.drop_in(params, compile=False, **{**case.hyper, **more})


def general(case: cases.Case, params: Any, **more: Any) -> Any:
    """A row's recipe in an optimizer object, run eagerly."""
    return adapters.Optimizer(params, case.recipe, compile=False, **{**case.hyper, **more})


def stock(case: cases.Case, params: Any, **more: Any) -> Any:
    """torch's own optimizer."""
    return case.stock(params, **{**case.hyper, **more})


every_kind = pytest.mark.parametrize("kind", [drop_in, general])
"""Both ways of having a row as an object."""

Kind = Callable[..., Any]


def row(name: str) -> cases.Case:
    """A row of the table."""
    return next(case for case in cases.CASES if case.name == name)


def rows(*names: str) -> Any:
    """Some rows of the table, as a parameter of a test."""
    return pytest.mark.parametrize("case", [pytest.param(row(n), id=n) for n in names])


KEPT = rows("sgd", "sgd-momentum", "adamw", "adafactor", "nadam", "muon")
"""All kinds of state: none, no count, like the parameter, factors, carried numbers, stacked."""


def make_model(case: cases.Case, dtype: torch.dtype = torch.float64) -> torch.nn.Sequential:
    """Two layers; of matrices only for a row that takes no other."""
    torch.manual_seed(0)
    bias = case.dim is None
    layers = [torch.nn.Linear(4, 5, bias), torch.nn.Tanh(), torch.nn.Linear(5, 3, bias)]
    return torch.nn.Sequential(*layers).to(dtype)


def batches(count: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(6, 4, dtype=dtype) for _ in range(count)]


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def backward(model: Any, opt: Any, x: torch.Tensor) -> torch.Tensor:
    opt.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    return loss


def values(model: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]
