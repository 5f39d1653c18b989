"""Trees to step, and what it means for two of them to be the same."""

import io
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters

SHAPES = {"cube": (2, 3, 2), "empty": (0, 3), "matrix": (3, 4), "scalar": (), "transposed": (4, 2)}
SHAPES |= {"vector": (5,)}
"""In the order of a sorted dict; "transposed" is stored column by column."""


def make_params(dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    """One leaf per shape, entries of size 1."""
    torch.manual_seed(seed)
    params = {name: torch.randn(shape, dtype=dtype) for name, shape in SHAPES.items()}
    params["transposed"] = params["transposed"].t().contiguous().t()
    return params


def make_grads(
    params: dict[str, Tensor], steps: int = 3, seed: int = 1, dtype: torch.dtype | None = None
) -> list[dict[str, Tensor]]:
    """Gradients for some steps, contiguous whatever the parameters' strides."""
    torch.manual_seed(seed)
    return [
        {name: torch.randn(p.shape, dtype=dtype or p.dtype) for name, p in params.items()}
        for _ in range(steps)
    ]


def run(
    tx: fo.GradientTransformation, params: Any, grads: list[Any], state: Any = None, **extra: Any
) -> tuple[Any, Any]:
    """The functional loop; gradients may be functions of the parameters."""
    state = tx.init(params) if state is None else state
    for g in grads:
        updates, state = tx.update(g(params) if callable(g) else g, state, params, **extra)
        params = fo.apply_updates(params, updates)
    return params, state


def as_parameters(params: dict[str, Tensor]) -> list[torch.nn.Parameter]:
    """Copies as the parameters of an optimizer object, strides kept."""
    return [torch.nn.Parameter(p.detach().clone()) for p in params.values()]


def step_object(opt: torch.optim.Optimizer, grads: list[Any]) -> None:
    """Step an optimizer object through gradients: trees, or lists with None for a missing one."""
    params = [p for group in opt.param_groups for p in group["params"]]
    for g in grads:
        values = g.values() if isinstance(g, dict) else g
        for p, x in zip(params, values, strict=True):
            p.grad = None if x is None else x.clone()
        opt.step()


def clone(tree: Any) -> Any:
    return optree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, tree)


def assert_same(a: Any, b: Any) -> None:
    """Equal structure, dtypes and bits."""
    assert_close(a, b, 0.0)


def assert_close(a: Any, b: Any, tolerance: float, *, check_dtype: bool = True) -> None:
    """Equal structure, and entries equal within a tolerance, absolute and relative."""
    assert optree.tree_structure(a) == optree.tree_structure(b)
    for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True):
        if isinstance(x, (str, torch.dtype)):
            assert x == y
            continue
        how = {"rtol": tolerance, "atol": tolerance, "check_dtype": check_dtype}
        torch.testing.assert_close(x, y, **how, equal_nan=False)


def assert_finite(tree: Any) -> None:
    for x in optree.tree_leaves(tree):
        assert torch.isfinite(x).all()


def copy_of(params: list[torch.nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def through_file(saved: Any) -> Any:
    """What torch.save writes, as torch.load reads it."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def forgetting(state: Any) -> Any:
    """A state without what is only there to be read, which is not saved."""
    if isinstance(state, fo.State):
        return state._replace(hyper={})
    if isinstance(state, dict):
        return {name: forgetting(x) for name, x in state.items()}
    if isinstance(state, tuple):
        inner = [forgetting(x) for x in state]
        fields = getattr(state, "_fields", None)
        if fields and "hyper" in fields:
            inner[fields.index("hyper")] = {}
        return type(state)(*inner) if fields else tuple(inner)
    return state


def pairs(rows: dict[str, dict[str, Any]]) -> Callable[[str], tuple[Any, Any]]:
    """By the name of a class: torch's optimizer of some parameters, and ours, as a row says."""

    def pair(name: str) -> tuple[Any, Any]:
        return (
            lambda params: getattr(torch.optim, name)(params, **rows[name]),
            lambda params: getattr(adapters, name)(params, compile=False, **rows[name]),
        )

    return pair


def recorded_graphs(monkeypatch: Any) -> list[Any]:
    """The graphs that torch.compile makes from now on; they run as they were traced."""
    graphs: list[Any] = []
    compile = torch.compile

    def recording(fn: Any, **how: Any) -> Any:
        how.pop("options", None)

        def record(graph: Any, example: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        return compile(fn, **how, backend=record)

    monkeypatch.setattr(torch, "compile", recording)
    return graphs
