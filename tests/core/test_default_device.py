"""`torch.set_default_device` is for a user's own tensors: what belongs to parameters is on their
device, and rules are recorded on the CPU. Here the default is "meta", where nothing can be read."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from helpers import as_parameters, assert_same, make_grads, step_object

import functional_optim as fo
from functional_optim import adapters

pytestmark = pytest.mark.own_process

ROOT = Path(__file__).parents[2]
MAKERS = {
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "logspace", "ones", "rand"),
    *("randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}
AT_DEFAULT = {"functional_optim/tree.py": "zeros", "adapters/stub.py": "empty"}
"""The norm of an empty tree, and the loss of no tensors: nothing says on which device they are."""


def elsewhere(fn: Callable[..., Any], *args: Any) -> Any:
    """A call whose default device is "meta"."""
    with torch.device("meta"):
        return fn(*args)


def by_object(case: cases.Case, params: dict[str, Any], grads: list[Any]) -> list[Any]:
    mine = as_parameters(params)
    opt = adapters.Optimizer(list(zip(params, mine, strict=True)), case.recipe, **case.hyper)
    step_object(opt, grads)
    return [p.detach() for p in mine]


@pytest.mark.parametrize("case", cases.able("object", costly=True))
def test_a_recipe_steps_where_its_parameters_are(case: cases.Case) -> None:
    params = case.filled(torch.float32)
    grads = make_grads(params, 2)
    found = elsewhere(by_object, case, params, grads)  # first: what it records is kept
    assert_same(found, by_object(case, params, grads))


def halved(g: torch.Tensor, slots: Any, p: torch.Tensor) -> Any:
    return g * torch.tensor(0.5), slots


def test_a_rule_may_make_tensors_at_the_default_device() -> None:
    """Recording takes it to the CPU, whatever the default is when a step compiles."""
    tx = fo.leafwise(None, halved, name="halved")
    g = {"w": torch.ones(3)}
    new, _ = elsewhere(fo.compile(tx), g, tx.init(g), g)
    assert new["w"].tolist() == [1.5] * 3


def line(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[0] + x[1] - y, x[0] * x[1] - 1, x[0] - 2])


SOLVERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    **{x: (fo.least_squares, line, {"method": x}) for x in ("lm", "trf", "dogleg")},
    **{
        x: (fo.minimize, lambda x, y: line(x, y).square().sum(), {"method": x})
        for x in ("l-bfgs-b", "bfgs")
    },
}


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_run_where_the_problems_are(name: str, compile: bool) -> None:
    solve, fn, how = SOLVERS[name]
    x0 = torch.ones(5, 2, dtype=torch.float64)
    y = torch.linspace(1, 3, 5, dtype=torch.float64)

    def run() -> torch.Tensor:
        how["callback"] = lambda seen: False  # it goes on
        return solve(fn, x0, (y,), batched=True, compile=compile, **how).x

    found = elsewhere(run)
    assert torch.equal(found, run())


def tensors_without_a_device(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        home, name = node.func.value, node.func.attr
        known = any(x.arg in ("device", None) for x in node.keywords)
        if isinstance(home, ast.Name) and home.id == "torch" and name in MAKERS and not known:
            yield node.lineno, name


def test_every_tensor_that_the_package_makes_has_a_device() -> None:
    for folder in ("functional_optim", "adapters"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            own = path.relative_to(ROOT).as_posix()
            found = [x for x in tensors_without_a_device(path) if x[1] != AT_DEFAULT.get(own)]
            assert found == [], own
