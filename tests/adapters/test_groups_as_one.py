"""A measurement spans all parameter groups, also of parts that are stepped as whole trees."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import assert_close

import functional_optim as fo
from functional_optim.adapters import Optimizer

CLIP = 1.0


def silent(*parts):
    """A chain with a part that takes whole trees and changes nothing."""
    first, *others = parts
    return fo.chain(first, fo.add_noise(0.0, 0.55, seed=0), *others)


RECIPES = {
    "sequence": lambda: silent(fo.clip_by_global_norm(CLIP), fo.adam(0.1)),
    "twice": lambda: silent(
        fo.clip_by_global_norm(CLIP), fo.trace(0.9), fo.clip_by_global_norm(0.3), fo.scale(-1.0)
    ),
    "flatten": lambda: fo.flatten(fo.chain(fo.clip_by_global_norm(CLIP), fo.sgd(0.1))),
    "accumulate": lambda: fo.accumulate(silent(fo.clip_by_global_norm(CLIP), fo.sgd(0.1)), 2),
    "finite": lambda: fo.apply_if_finite(silent(fo.clip_by_global_norm(CLIP), fo.adam(0.1)), 3),
    "small": lambda: fo.skip_large_updates(silent(fo.clip_by_global_norm(CLIP), fo.adam(0.1)), 9.0),
    "gates": lambda: fo.apply_if_finite(
        fo.apply_if_finite(silent(fo.clip_by_global_norm(CLIP), fo.adam(0.1)), 1), 2
    ),
    "cautious": lambda: fo.chain(
        fo.cautious(silent(fo.clip_by_global_norm(CLIP), fo.scale_by_adam())), fo.scale_by_lr(0.1)
    ),
    "lookahead": lambda: fo.lookahead(silent(fo.clip_by_global_norm(CLIP), fo.sgd(0.1)), 2),
    "schedule": lambda: fo.with_schedule(
        lambda lr: silent(fo.clip_by_global_norm(CLIP), fo.sgd(lr)),
        lr=fo.schedules.linear(1.0, 0.5, 4),
    ),
    "masked": lambda: fo.chain(
        fo.masked(fo.flatten(fo.clip_by_global_norm(CLIP)), "a*"),
        fo.clip_by_global_norm(3.0),
        fo.sgd(0.1),
    ),
    "monitored": lambda: silent(
        fo.monitor({"norm": fo.measures.global_norm}), fo.clip_by_global_norm(CLIP), fo.sgd(0.1)
    ),
}


def trained(recipe, steps, patterns, groups):
    """Parameters after some steps of the object; patterns: whose gradient is None, in each."""
    torch.manual_seed(0)
    params = {name: torch.nn.Parameter(torch.randn(3)) for name in ("a1", "b1", "a2", "b2")}
    named = all(groups)  # torch takes no names for a group without parameters
    opt = Optimizer(
        [{"params": [(x, params[x]) if named else params[x] for x in group]} for group in groups],
        lambda: recipe(),
    )
    for grads, absent in zip(steps, patterns, strict=True):
        for name, p in params.items():
            p.grad = None if name in absent else grads[name].clone()
        opt.step()
    return {name: p.detach() for name, p in params.items()}


def pure(recipe, steps, patterns):
    torch.manual_seed(0)
    params = {name: torch.randn(3) for name in ("a1", "b1", "a2", "b2")}
    tx = recipe()
    state = tx.init(params)
    for grads, absent in zip(steps, patterns, strict=True):
        given = {name: None if name in absent else g for name, g in grads.items()}
        updates, state = tx.update(given, state, params)
        params = fo.apply_updates(params, updates)
    return params


def random_steps(count, bad=()):
    torch.manual_seed(1)
    steps = [{x: torch.randn(3) for x in ("a1", "b1", "a2", "b2")} for _ in range(count)]
    for i in bad:
        steps[i]["b2"][1] = math.nan
    return steps


@pytest.mark.parametrize("name", RECIPES)
def test_two_groups_step_as_one_tree(name):
    bad = (2,) if name in ("finite", "small", "gates") else ()
    steps, patterns = random_steps(6, bad), [()] * 6
    want = pure(RECIPES[name], steps, patterns)
    assert_close(trained(RECIPES[name], steps, patterns, [["a1", "b1"], ["a2", "b2"]]), want, 1e-6)


@pytest.mark.parametrize(
    "name", ["sequence", "accumulate", "finite", "small", "gates", "lookahead"]
)
def test_a_group_without_gradients_keeps_step(name):
    steps = random_steps(6)
    patterns = [("a2",), (), ("b1",), ("a2", "b2") if name != "lookahead" else (), (), ("a1",)]
    if name == "sequence":
        patterns[3] = ()
    want = pure(RECIPES[name], steps, patterns)
    got = trained(RECIPES[name], steps, patterns, [["a1", "b1"], ["a2", "b2"], []])
    assert_close(got, want, 1e-6)


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("around", ["sequence", "flatten", "masked"])
def test_trees_and_rules_measure_together(compile, around):
    def recipe(lr, whole=False):
        clip = fo.clip_by_global_norm(1.0)
        if not whole:
            return fo.chain(clip, fo.sgd(lr))
        if around == "flatten":
            return fo.flatten(fo.chain(clip, fo.sgd(lr)))
        if around == "masked":
            return fo.chain(fo.masked(fo.flatten(clip), "*"), fo.sgd(lr))
        return silent(clip, fo.sgd(lr))

    a, b, c = [torch.zeros(1, requires_grad=True) for _ in range(3)]
    groups = [{"params": [a]}, {"params": [b], "whole": True}, {"params": [c], "whole": True}]
    opt = Optimizer(groups, recipe, compile=compile, lr=1.0)
    for g in (1.0, 0.5, 1.0):
        a.grad, b.grad, c.grad = torch.tensor([2.0 * g]), torch.tensor([g]), torch.tensor([2.0 * g])
        before = [p.item() for p in (a, b, c)]
        opt.step()
        moved = [x - p.item() for x, p in zip(before, (a, b, c), strict=True)]
        norm = max(1.0, 3.0 * g)
        assert moved == pytest.approx([2 * g / norm, g / norm, 2 * g / norm], rel=1e-5)


def test_gates_of_trees_and_rules_decide_alike():
    def recipe(whole=False):
        tx = fo.chain(fo.clip_by_global_norm(1.0), fo.sgd(1.0))
        return fo.apply_if_finite(
            silent(fo.clip_by_global_norm(1.0), fo.sgd(1.0)) if whole else tx, 2
        )

    a, b = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    opt = Optimizer([{"params": [a]}, {"params": [b], "whole": True}], recipe)
    for first, second, moves in [(3.0, 4.0, True), (math.nan, 4.0, False), (3.0, math.inf, False)]:
        a.grad, b.grad = torch.tensor([first]), torch.tensor([second])
        before = a.item(), b.item()
        opt.step()
        assert ((a.item(), b.item()) != before) == moves
    assert (a.item(), b.item()) == pytest.approx((-0.6, -0.8))


def test_a_gate_that_is_shut_in_one_group_keeps_it_out_of_the_sum():
    def recipe(first=0):
        part = silent(fo.clip_by_global_norm(1.0), fo.sgd(1.0))
        return fo.conditionally_mask(part, lambda step: step >= first)

    a, b = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    opt = Optimizer([{"params": [a]}, {"params": [b], "first": 1}], recipe)
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    opt.step()
    assert (a.item(), b.item()) == pytest.approx((-1.0, 0.0))
    opt.step()
    assert (a.item(), b.item()) == pytest.approx((-1.6, -0.8))


def test_another_order_in_another_group_is_an_error():
    def recipe(swap=False):
        parts = [fo.clip_by_global_norm(1.0), fo.normalize()]
        return silent(*(parts[::-1] if swap else parts), fo.sgd(1.0))

    a, b = [torch.ones(1, requires_grad=True) for _ in range(2)]
    opt = Optimizer([{"params": [a]}, {"params": [b], "swap": True}], recipe)
    a.grad, b.grad = torch.ones(1), torch.ones(1)
    with pytest.raises(ValueError, match="in different orders"):
        opt.step()
    assert (a.item(), b.item()) == (1.0, 1.0)


def test_nothing_is_written_before_all_totals_are_known():
    def fails(params):
        return fo.EmptyState()

    def update(grads, state, params=None):
        raise RuntimeError("no")

    def recipe(bad=False):
        end = fo.GradientTransformation(fails, update) if bad else fo.identity()
        return silent(fo.clip_by_global_norm(1.0), fo.sgd(1.0), end)

    a, b = [torch.ones(1, requires_grad=True) for _ in range(2)]
    opt = Optimizer([{"params": [a]}, {"params": [b], "bad": True}], recipe)
    a.grad, b.grad = torch.ones(1), torch.ones(1)
    with pytest.raises(RuntimeError, match="no"):
        opt.step()
    assert a.item() == 1.0
    assert not opt.state[a]


@pytest.mark.parametrize(("groups", "runs"), [(1, 1), (2, 2)])
def test_one_group_alone_runs_once(groups, runs):
    calls = []

    def update(grads, state, params=None):
        calls.append(1)
        return grads, state

    def recipe():
        counted = fo.GradientTransformation(lambda params: fo.EmptyState(), update)
        return fo.chain(counted, fo.clip_by_global_norm(1.0), fo.sgd(1.0))

    params = [torch.ones(1, requires_grad=True) for _ in range(groups)]
    opt = Optimizer([{"params": [p]} for p in params], recipe)
    for p in params:
        p.grad = torch.ones(1)
    opt.step()
    assert len(calls) == runs * groups


def test_a_closure_of_the_user_hides_nothing():
    """Rules inside a transformation that cannot be looked into measure over all groups, too."""

    def recipe():
        inside = fo.chain(fo.clip_by_global_norm(1.0), fo.sgd(1.0))

        def update(grads, state, params=None):
            return inside.update(grads, state, params)

        return fo.GradientTransformation(inside.init, update)

    a, b = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    opt = Optimizer([{"params": [a]}, {"params": [b]}], recipe)
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    opt.step()
    assert (a.item(), b.item()) == pytest.approx((-0.6, -0.8))
