"""Rules that look at rows, columns or whole tensors, with one library for every shape."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_close, assert_same, run
from sampling import some
from three_ways import random_tree
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters, kernels
from functional_optim.engine import dynamic_shapes
from functional_optim.engine.dynamic_shapes import DynamicShapeExecutor
from functional_optim.engine.inductor import InductorExecutor
from functional_optim.engine.products import ProductExecutor
from functional_optim.kernels.dynamic_shapes import CHUNK

SHAPES = {"tall": (501, 33), "wide": (3, CHUNK + 11), "vector": (70,), "kernel": (6, 5, 3, 2)}
MATRICES = {"tall": (501, 33), "wide": (3, CHUNK + 11)}
OTHER_SHAPES = {"a": (9, 11), "b": (3 * CHUNK,), "c": (2, 2, 2, 2), "d": (700, 2)}
EDGES = {"row": (1, 9), "column": (9, 1), "one": (1, 1), "scalar": (), "empty": (0, 4)}


def make_tree(seed: int, dtype: torch.dtype = torch.float64, shapes: Any = SHAPES) -> Any:
    return random_tree(seed, dtype, shapes)


class Averages(NamedTuple):
    rows: Tensor
    columns: Tensor
    largest: Tensor


def sides() -> Any:
    """A rule with slots like the rows, the columns and the whole of a tensor, each a sum of it."""

    def init(p: Tensor) -> Averages:
        whole = p.shape if p.dim() else (1,)
        rows, columns = (*whole[:-1], 1), (1, *whole[1:])
        shapes = [shape[: p.dim()] for shape in (rows, columns, ())]
        return Averages(*[p.new_zeros(shape) for shape in shapes])

    def update(u: Tensor, slots: Averages, p: Tensor, weight: Any) -> tuple[Tensor, Averages]:
        if u.dim() == 0 or u.numel() == 0:
            return u, slots
        rows = slots.rows.lerp(u.mean(-1, keepdim=True), weight)
        columns = slots.columns.lerp((u - rows).square().sum(0, keepdim=True), weight)
        largest = torch.maximum(slots.largest, (columns * p).abs().amax())
        u = (u - rows) / (1 + columns) * (largest / (1 + rows.square().sum())) / u.shape[0]
        return -u, Averages(rows, columns, largest)

    return fo.leafwise(init, update, lambda t: (1 / t,), elementwise=False, name="sides")


RECIPES = {
    "adaptive clip": lambda: fo.chain(fo.adaptive_grad_clip(0.1), fo.adamw(1e-2)),
    "centralize": lambda: fo.chain(
        fo.clip_by_global_norm(0.5), fo.centralize(), fo.clip_by_global_norm(0.3), fo.sgd(0.1)
    ),
    "adafactor": lambda: fo.adafactor(1e-2),
    "sides": sides,
}
each_recipe = pytest.mark.parametrize("name", some(RECIPES, 3))
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def purely(tx: Any, steps: int, dtype: torch.dtype, shapes: Any) -> Any:
    grads = [make_tree(k + 1, dtype, shapes) for k in range(steps)]
    return run(tx, make_tree(0, dtype, shapes), grads)


def executors(opt: Any) -> set[type]:
    return {type(x) for entry in opt._plan.entries for x in entry.tensors.executors}


def stepped(recipe: Any, trees: Any, compile: Any = "strict") -> tuple[Any, Any]:
    """An optimizer object after a step for each tree but the first, which has the parameters."""
    first, *grads = trees
    named = [(key, torch.nn.Parameter(p.clone())) for key, p in first.items()]
    opt = adapters.Optimizer(named, recipe, compile=compile)
    for tree in grads:
        for key, p in named:
            p.grad = tree[key]
        opt.step()
    return opt, {key: p.detach() for key, p in named}


@each_recipe
@pytest.mark.parametrize("dtype", some(TOLERANCES))
def test_compiled_steps_and_objects_do_what_the_rule_does(name, dtype):
    shapes = SHAPES if dtype is torch.float64 else MATRICES
    expected, state = purely(RECIPES[name](), 3, dtype, shapes)
    tx = RECIPES[name]()
    step, params = fo.compile(tx, strict=True), make_tree(0, dtype, shapes)
    own = tx.init(params)
    for k in range(3):
        params, own = step(make_tree(k + 1, dtype, shapes), own, params)
    assert_close((params, own.slots), (expected, state.slots), TOLERANCES[dtype])
    opt, moved = stepped(RECIPES[name], [make_tree(k, dtype, shapes) for k in range(4)])
    assert executors(opt) == {DynamicShapeExecutor}
    assert_close(moved, expected, TOLERANCES[dtype])


@each_recipe
def test_sizes_of_one_and_none(name):
    expected, _ = purely(RECIPES[name](), 2, torch.float64, EDGES)
    trees = [make_tree(k, torch.float64, EDGES) for k in range(3)]
    opt, moved = stepped(RECIPES[name], trees)
    assert DynamicShapeExecutor in executors(opt)
    assert_close(moved, expected, 1e-12)


@each_recipe
def test_other_shapes_build_no_kernel(name):
    stepped(RECIPES[name], [make_tree(k, torch.float64) for k in range(2)])
    before = kernels.count()
    trees = [make_tree(k, torch.float64, OTHER_SHAPES) for k in range(2)]
    _, moved = stepped(RECIPES[name], trees)
    assert kernels.count() == before
    expected, _ = purely(RECIPES[name](), 1, torch.float64, OTHER_SHAPES)
    assert_close(moved, expected, 1e-12)


def test_results_do_not_depend_on_the_threads(monkeypatch):
    monkeypatch.setattr(dynamic_shapes, "SHARED", 1)
    trees = [make_tree(k, torch.float64) for k in range(3)]
    _, several = stepped(RECIPES["adafactor"], trees)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _, alone = stepped(RECIPES["adafactor"], trees)
    finally:
        torch.set_num_threads(threads)
    assert_same(several, alone)


def test_gradients_of_another_layout_are_copied():
    trees = [make_tree(k) for k in range(2)]
    turned = {**trees[1], "tall": trees[1]["tall"].t().contiguous().t()}
    _, moved = stepped(RECIPES["adafactor"], [trees[0], turned])
    _, expected = stepped(RECIPES["adafactor"], trees)
    assert_same(moved, expected)


def product(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor, Any]:
    return -u @ (u.t() @ u), slots


def by_shape(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor, Any]:
    return (-u if u.shape[0] > u.shape[1] else 2 * u), slots


def by_size(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor, Any]:
    return (-u if u.shape[0] == 7 else 2 * u), slots


def cumulative(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor, Any]:
    return -u.cumsum(0), slots


@pytest.mark.parametrize(
    ("update", "executor"),
    [
        (product, ProductExecutor),
        (by_shape, InductorExecutor),
        (by_size, InductorExecutor),
        (cumulative, InductorExecutor),
    ],
)
def test_what_cannot_be_cut_goes_to_the_next_executor(update, executor):
    recipe = lambda: fo.leafwise(None, update, elementwise=False)  # noqa: E731
    shapes = {"a": (7, 3), "b": (3, 7)}
    trees = [make_tree(k, torch.float64, shapes) for k in range(2)]
    opt, moved = stepped(recipe, trees)
    assert executors(opt) == {executor}
    expected, _ = purely(recipe(), 1, torch.float64, shapes)
    assert_close(moved, expected, 1e-12)


def test_other_layouts_and_slots_of_other_shapes_are_left_to_others():
    def init(p: Tensor) -> Averages:
        return Averages(*[p.new_zeros(p.shape[0]) for _ in range(3)])

    def update(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor, Any]:
        return u, Averages(*[u.sum(1) for _ in range(3)])

    recipe = lambda: fo.leafwise(init, update, elementwise=False)  # noqa: E731
    opt, _ = stepped(recipe, [make_tree(k, torch.float64, {"a": (3, 2)}) for k in range(2)])
    assert executors(opt) == {InductorExecutor}
    last = [
        {"a": x["kernel"].to(memory_format=torch.channels_last)} for x in map(make_tree, range(2))
    ]
    opt, moved = stepped(RECIPES["centralize"], last)
    assert executors(opt) == {InductorExecutor}
    _, expected = stepped(RECIPES["centralize"], last, False)
    assert_close(moved, expected, 1e-12)


def test_a_library_that_does_something_else_is_not_used(monkeypatch):
    """What the chunks leave is put together wrongly, which only tensors of several chunks show."""
    own = kernels.dynamic_shapes
    monkeypatch.setattr(own, "HEAD", own.HEAD.replace("return a + b", "return a"))
    monkeypatch.setenv("FUNCTIONAL_OPTIM_CACHE", "off")

    def update(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor, Any]:
        return -u / u.sum(0, keepdim=True), slots

    recipe = lambda: fo.leafwise(None, update, elementwise=False)  # noqa: E731
    trees = [make_tree(k, torch.float64, {"a": (5, 4)}) for k in range(2)]
    opt, moved = stepped(recipe, trees)
    assert executors(opt) == {InductorExecutor}
    assert_close(moved, purely(recipe(), 1, torch.float64, {"a": (5, 4)})[0], 1e-12)
