"""Parameters seen as matrices: each view and its way back, rules with slots, and three ways."""

from typing import Any, NamedTuple

import pytest
import torch
from helpers import as_parameters, assert_close, clone, copy_of, step_object
from torch import Tensor
from ways import by_function, by_update, random_tree

import functional_optim as fo
from functional_optim.adapters import Optimizer
from functional_optim.core.views import MatrixView
from functional_optim.linalg import newton_schulz

VIEWS = {
    "equal parts": ({"split": 3}, (12, 4), [(3, 4, 4)]),
    "query, key, value": ({"split": (8, 2, 2)}, (12, 4), [(1, 8, 4), (2, 2, 4)]),
    "heads of some": ({"split": (8, 2, 2), "heads": (4, 1, 1)}, (12, 4), [(6, 2, 4)]),
    "heads": ({"heads": 2}, (12, 4), [(2, 6, 4)]),
    "kernels": ({}, (8, 4, 3, 3), [(1, 8, 36)]),
    "a matrix for each place": ({"kernel": "batch"}, (8, 4, 3, 3), [(9, 8, 4)]),
    "places and heads": ({"kernel": "batch", "heads": 2}, (8, 4, 3), [(6, 4, 4)]),
    "transposed": ({"orientation": "in_out"}, (4, 8), [(1, 8, 4)]),
    "transposed kernels": ({"orientation": "in_out"}, (4, 8, 2, 3), [(1, 8, 24)]),
    "transposed parts": (
        {"orientation": "in_out", "split": (6, 2)},
        (4, 8),
        [(1, 6, 4), (1, 2, 4)],
    ),
}


BLOCKS = {
    "a matrix": ({}, (5, 7), [(2, 3, 3), (1, 3, 1), (2, 2, 3), (1, 2, 1)]),
    "one that fits on one side": ({}, (3, 7), [(2, 3, 3), (1, 3, 1)]),
    "a vector": ({}, (7,), [(2, 3, 1), (1, 1, 1)]),
    "a number": ({}, (), [(1, 1, 1)]),
    "nothing": ({}, (4, 0, 2), [(1, 3, 0), (1, 1, 0)]),
    "heads": ({"heads": 2}, (8, 3), [(2, 3, 3), (2, 1, 3)]),
    "kernels": ({}, (4, 2, 3), [(2, 3, 3), (2, 1, 3)]),
    "places": ({"kernel": "batch"}, (4, 3, 2), [(2, 3, 3), (2, 1, 3)]),
    "transposed": ({"transposed": True}, (3, 4), [(1, 3, 3), (1, 1, 3)]),
}


@pytest.mark.parametrize(("arguments", "shape", "seen"), BLOCKS.values(), ids=BLOCKS)
def test_blocks_there_and_back(arguments, shape, seen):
    view = MatrixView(**arguments, block=3)
    assert not view.keeps(shape)
    x = torch.randn((2, *shape))
    parts = view.parts(x[0], shape)
    assert [tuple(part.shape) for part in parts] == seen
    assert torch.equal(view.joined(parts, shape, x[0]), x[0])
    assert torch.equal(view.joined(view.parts(x, shape), shape, x), x)


class SquareSlots(NamedTuple):
    left: Tensor
    kept: Tensor
    missing: Any


def accumulating() -> Any:
    """A rule with a square slot, one like its matrix, and one that it does without."""

    def init(p: Tensor) -> SquareSlots:
        return SquareSlots(p.new_zeros(p.shape[0], p.shape[0]), torch.zeros_like(p), None)

    def update(u: Tensor, x: SquareSlots, p: Any) -> tuple[Tensor, SquareSlots]:
        left = x.left + u @ u.mT
        return left @ u, SquareSlots(left, x.kept + u, None)

    return fo.leafwise(init, update, runs=fo.Runs(batched=True), name="accumulating")


def matrices(x: Tensor, arguments: dict[str, Any]) -> tuple[MatrixView, list[Tensor]]:
    given = dict(arguments)
    transposed = given.pop("orientation", "out_in") == "in_out"
    view = MatrixView(**given, transposed=transposed)
    return view, view.parts(x, x.shape)


@pytest.mark.parametrize(("arguments", "shape", "seen"), VIEWS.values(), ids=VIEWS)
class TestViews:
    def test_there_and_back(self, arguments, shape, seen):
        x = torch.randn(3, *shape)
        view, parts = matrices(x[0], arguments)
        assert [tuple(part.shape) for part in parts] == seen
        assert torch.equal(view.joined(parts, shape, x[0]), x[0])
        assert torch.equal(view.joined(view.parts(x, shape), shape, x), x)

    def test_each_matrix_for_itself(self, arguments, shape, seen):
        torch.manual_seed(0)
        tx = fo.as_matrix(fo.orthogonalize(scale="spectral", ns_dtype=torch.float64), **arguments)
        p = {name: torch.zeros(shape, dtype=torch.float64) for name in "ab"}
        g = {name: torch.randn(shape, dtype=torch.float64) for name in "ab"}
        u, _ = tx.update(g, tx.init(p), p)
        for name, x in g.items():
            view, parts = matrices(x, arguments)
            each = [
                torch.stack([newton_schulz(m, dtype=torch.float64) for m in part])
                * (part.shape[1] / part.shape[2]) ** 0.5
                for part in parts
            ]
            torch.testing.assert_close(u[name], view.joined(each, shape, x), rtol=0, atol=1e-10)

    def test_slots(self, arguments, shape, seen):
        """Two parameters of one shape, so as a batch, equal one; and both equal their matrices."""
        torch.manual_seed(0)
        tx = fo.as_matrix(accumulating(), **arguments)
        p = {name: torch.zeros(shape, dtype=torch.float64) for name in "ab"}
        state, own = tx.init(p), tx.init(p["a"])
        inner = accumulating()
        lone = None
        for _ in range(3):
            g = {name: torch.randn(shape, dtype=torch.float64) for name in "ab"}
            u, state = tx.update(g, state, p)
            v, own = tx.update(g["a"], own, p["a"])
            view, parts = matrices(g["a"], arguments)
            each = [m for part in parts for m in part]
            lone = inner.init(each) if lone is None else lone
            w, lone = inner.update(each, lone, each)
            supply = iter(w)
            expected = [torch.stack([next(supply) for _ in part]) for part in parts]
            torch.testing.assert_close(v, view.joined(expected, shape, v))
            torch.testing.assert_close(u["a"], v)
        assert state.slots["missing"] == {"a": None, "b": None}
        assert own.slots["kept"].numel() == g["a"].numel()


def test_the_ways_of_running_agree():
    shapes = {"qkv": (12, 4), "conv": (4, 2, 3, 3), "w": (12, 4), "bias": (5,)}
    views = {"qkv": {"split": (8, 2, 2)}, "conv": {}, "w": {"heads": 2}}

    def recipe(lr=0.1):
        parts = {
            name: fo.chain(fo.as_matrix(accumulating(), **view), fo.scale_by_lr(lr))
            for name, view in views.items()
        }
        return fo.partition({**parts, "rest": fo.sgd(lr)}, {**{x: x for x in views}, "*": "rest"})

    params, *grads = (random_tree(k, torch.float64, shapes) for k in range(5))
    expected = by_update(recipe(), params, grads)
    assert_close(by_function(recipe(), clone(params), grads, strict=True), expected, 1e-12)
    held = as_parameters(params)
    opt = Optimizer(zip(shapes, held, strict=True), recipe, compile="strict")
    step_object(opt, grads[:2])
    saved = opt.state_dict()
    opt = Optimizer(zip(shapes, held, strict=True), recipe, compile="strict")
    opt.load_state_dict(saved)
    step_object(opt, grads[2:])
    assert_close(copy_of(held), list(expected[0].values()), 1e-12)
