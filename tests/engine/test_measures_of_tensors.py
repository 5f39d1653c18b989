"""Rules that measure each tensor for itself, with one library for all shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import pytest
import torch
from helpers import assert_close, assert_same
from sampling import some
from three_ways import check_compiled, check_no_new_kernel, purely, random_tree
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters
from functional_optim.engine.executor import BoundScalars
from functional_optim.engine.staged import can_be_cut

SHAPES = {"a": (70, 80), "b": (80,), "c": (3, 5, 7), "d": (), "e": (0, 4)}
OTHER_SHAPES = {"a": (9, 11), "b": (6000,), "c": (2, 2, 2, 2)}


def make_tree(seed: int, dtype: torch.dtype = torch.float64, shapes: Any = SHAPES) -> Any:
    return random_tree(seed, dtype, shapes)


class Sums(NamedTuple):
    squares: Any
    size: Any


@fo.factory
def unit_rms(scale: Any = 1.0) -> Any:
    """Give each tensor's update a root mean square."""

    def measure(u: Tensor, slots: Any, p: Tensor, scale: Any) -> Sums:
        return Sums((u * u).sum(), torch.ones_like(u).sum())

    def update(u: Tensor, slots: Any, p: Tensor, scale: Any, m: Sums) -> Any:
        return scale * u / (m.squares / m.size + 1e-12).sqrt(), slots

    return fo.leafwise(
        None,
        update,
        lambda t, *, scale: (scale,),
        hyper={"scale": scale},
        measure=measure,
        name="unit_rms",
    )


RECIPES = {
    "lamb": lambda lr=1e-2: fo.chain(
        fo.scale_by_adam(),
        fo.add_decayed_weights(0.1),
        fo.scale_by_trust_ratio(),
        fo.scale_by_lr(lr),
    ),
    "cautious": lambda lr=1e-2: fo.chain(fo.cautious(fo.scale_by_adam()), fo.scale_by_lr(lr)),
    "two measures, and one of the tree": lambda lr=1e-2: fo.chain(
        fo.clip_by_block_rms(0.5),
        fo.clip_by_global_norm(0.5),
        fo.scale_by_adam(),
        unit_rms(0.3),
        fo.scale_by_lr(lr),
        fo.params_ema(0.9),
    ),
    "a look back past what has changed": lambda lr=1e-2: fo.chain(
        fo.trace(0.9), fo.cautious(fo.scale_by_adam()), fo.scale_by_lr(lr)
    ),
    "behind a gate": lambda lr=1e-2: fo.accumulate(
        fo.chain(fo.trace(0.9), unit_rms(), fo.scale_by_lr(lr)), 2
    ),
    "on some leaves": lambda lr=1e-2: fo.partition(
        {"rms": fo.chain(unit_rms(), fo.scale_by_lr(lr)), "plain": fo.sgd(lr)},
        {"a": "rms", "c": "rms", "*": "plain"},
    ),
}
each_recipe = pytest.mark.parametrize("name", some(RECIPES, 3, ["behind a gate"]))


@each_recipe
@pytest.mark.parametrize("dtype", some([torch.float64, torch.bfloat16]))
def test_compiled_steps_and_objects_do_what_the_rule_does(name, dtype):
    tolerance = 1e-12 if dtype is torch.float64 else 2e-2
    recipe = RECIPES[name]
    expected, state = purely(recipe(), 4, dtype, SHAPES)
    check_compiled(recipe(), 4, dtype, SHAPES, (expected, state), tolerance)
    for compile in ("strict", False):
        named = [(k, torch.nn.Parameter(p)) for k, p in make_tree(0, dtype).items()]
        opt = adapters.Optimizer(named, recipe, compile=compile)
        for k in range(4):
            for (_, p), g in zip(named, make_tree(k + 1, dtype).values(), strict=True):
                p.grad = g
            opt.step()
        assert_close([p.detach() for _, p in named], list(expected.values()), tolerance)


@each_recipe
def test_other_shapes_and_numbers_build_no_kernel(name):
    check_no_new_kernel(RECIPES[name], SHAPES, OTHER_SHAPES)


def test_a_tensor_is_measured_as_a_whole_and_alone():
    """Large tensors are measured in blocks by several threads, small ones share a call."""
    tx = fo.chain(unit_rms(), fo.scale_by_lr(1.0))
    params = {"large": torch.zeros(300, 301), "small": torch.zeros(3)}
    grads = {"large": torch.full((300, 301), 7.0), "small": torch.tensor([3.0, 0.0, 0.0])}
    params, _ = fo.compile(tx, strict=True)(grads, tx.init(params), params)
    assert_close(params["large"], torch.full((300, 301), -1.0), 1e-5)
    assert_close(params["small"], torch.tensor([-(3.0**0.5), 0.0, 0.0]), 1e-5)


def test_complex_tensors_are_measured_as_pairs():
    tx = fo.chain(unit_rms(), fo.scale_by_lr(1.0))
    params = torch.zeros(5, dtype=torch.complex64)
    grads = torch.full((5,), 3 + 4j, dtype=torch.complex64)
    pure, _ = tx.update(grads, tx.init(params), params)
    assert_close(pure, -grads / 12.5**0.5, 1e-5)
    moved, _ = fo.compile(tx, strict=True)(grads, tx.init(params), params)
    assert_close(moved, pure, 1e-5)


@each_recipe
def test_ensembles_and_traces_measure_each_member(name):
    recipe, params, grads = RECIPES[name], make_tree(0), make_tree(1)
    lrs = torch.tensor([0.1, 0.2], dtype=torch.float64)

    def one(lr: Any) -> Any:
        tx = recipe(lr)
        return tx.update(grads, tx.init(params), params)[0]

    together = torch.vmap(one)(lrs)
    assert_close(together, optree.tree_map(lambda *x: torch.stack(x), *map(one, lrs)), 1e-12)
    traced = torch.compile(one, backend="eager", fullgraph=True)
    assert_same(traced(lrs[1]), one(lrs[1]))


def test_gradients_go_through_a_measurement():
    def loss(scale: Tensor, g: Tensor) -> Tensor:
        tx = unit_rms(scale)
        return tx.update(g, tx.init(g), g)[0].square().sum()

    scale, g = torch.tensor(0.5, dtype=torch.float64), make_tree(1)["c"]
    slope, through = torch.func.grad(loss, argnums=(0, 1))(scale, g)
    assert_close(slope, torch.tensor(105.0, dtype=torch.float64), 1e-8)
    assert_close(through, torch.zeros_like(g), 1e-8)


def test_rows_of_a_sparse_gradient_are_measured_alone():
    tx = unit_rms()
    p = torch.zeros(4, 2)
    g = torch.zeros(4, 2).index_put((torch.tensor([1]),), torch.tensor([3.0, 4.0])).to_sparse(1)
    updates, _ = tx.update(g, tx.init(p), p)
    assert_close(updates.to_dense()[1], torch.tensor([3.0, 4.0]) / 12.5**0.5, 1e-6)


@pytest.mark.parametrize("what", ["measure", "reduce"])
def test_a_measurement_that_is_no_single_number_is_refused(what):
    """A kernel would write all of its entries to where there is memory for one."""

    def update(u: Tensor, slots: Any, p: Tensor, x: Any) -> Any:
        return u * x, slots

    p = torch.ones(3)
    parameter = torch.nn.Parameter(p.clone())
    parameter.grad = p
    for wrong in (lambda u, slots, p: (u * u,), lambda u, slots, p: (u * u).sum()):
        tx = fo.leafwise(None, update, **{what: wrong})
        opt = adapters.Optimizer([parameter], lambda tx=tx: tx)
        trees = (p, tx.init(p), p)
        for step, *given in ((tx.update, *trees), (fo.compile(tx), *trees), (opt.step,)):
            with pytest.raises(TypeError, match=f"{what} of a rule returned .* of 0-dim tensors"):
                step(*given)
    assert_same(parameter.detach(), p)


@pytest.mark.parametrize("what", ["measure", "reduce"])
def test_what_is_no_sum_over_entries_is_measured_on_whole_tensors(what):
    def largest(u: Tensor, slots: Any, p: Tensor) -> Any:
        return (u.abs().max(),)

    def update(u: Tensor, slots: Any, p: Tensor, x: Any) -> Any:
        return -u / x, slots

    tx = fo.leafwise(None, update, **{what: largest})
    params, grads = torch.zeros(9000), torch.full((9000,), 4.0)
    params, _ = fo.compile(tx)(grads, tx.init(params), params)
    assert_close(params, torch.full((9000,), -1.0), 1e-6)


@pytest.mark.parametrize(
    ("tx", "cut"),
    [
        (RECIPES["lamb"](), True),
        (RECIPES["cautious"](), True),
        (fo.chain(fo.scale(2.0), fo.cautious(fo.scale_by_adam())), True),
        (RECIPES["a look back past what has changed"](), False),
        (fo.cautious(fo.chain(fo.cautious(fo.trace(0.9)), fo.scale_by_adam())), True),
        (fo.chain(fo.trace(0.9), fo.cautious(fo.chain(unit_rms(), fo.sign()))), False),
    ],
)
def test_kernels_hand_the_update_on_unless_a_rule_looks_back_past_it(tx, cut):
    none = [() for _ in tx.placements]
    assert can_be_cut(BoundScalars(tx.placements, none, None, "step")) is cut
    assert not can_be_cut(BoundScalars(tx.placements, none, None, "stage"))
