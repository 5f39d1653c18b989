"""A measurement spans all parameter groups, also of parts that are stepped as whole trees."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import assert_close, run

import functional_optim as fo
from functional_optim.adapters import Optimizer

NAMES = ("a1", "b1", "a2", "b2")
CLIP = fo.clip_by_global_norm(1.0)


def silent(*parts):
    """A chain with a part that takes whole trees and changes nothing."""
    first, *others = parts
    return fo.chain(first, fo.add_noise(0.0, 0.55, seed=0), *others)


RECIPES = {
    "sequence": lambda: silent(CLIP, fo.adam(0.1)),
    "twice": lambda: silent(CLIP, fo.trace(0.9), fo.clip_by_global_norm(0.3), fo.scale(-1.0)),
    "flatten": lambda: fo.flatten(fo.chain(CLIP, fo.sgd(0.1))),
    "accumulate": lambda: fo.accumulate(silent(CLIP, fo.sgd(0.1)), 2),
    "finite": lambda: fo.apply_if_finite(silent(CLIP, fo.adam(0.1)), 3),
    "small": lambda: fo.skip_large_updates(silent(CLIP, fo.adam(0.1)), 9.0),
    "gates": lambda: fo.apply_if_finite(fo.apply_if_finite(silent(CLIP, fo.adam(0.1)), 1), 2),
    "cautious": lambda: fo.chain(
        fo.cautious(silent(CLIP, fo.scale_by_adam())), fo.scale_by_lr(0.1)
    ),
    "lookahead": lambda: fo.lookahead(silent(CLIP, fo.sgd(0.1)), 2),
    "schedule": lambda: fo.with_schedule(
        lambda lr: silent(CLIP, fo.sgd(lr)), lr=fo.schedules.linear(1.0, 0.5, 4)
    ),
    "masked": lambda: fo.chain(
        fo.masked(fo.flatten(CLIP), "a*"), fo.clip_by_global_norm(3.0), fo.sgd(0.1)
    ),
    "monitored": lambda: silent(fo.monitor({"norm": fo.measures.global_norm}), CLIP, fo.sgd(0.1)),
}


def trained(recipe, steps, groups):
    """Parameters after some steps of the object."""
    torch.manual_seed(0)
    params = {name: torch.nn.Parameter(torch.randn(3)) for name in NAMES}
    named = all(groups)  # torch takes no names for a group without parameters
    opt = Optimizer(
        [{"params": [(x, params[x]) if named else params[x] for x in group]} for group in groups],
        lambda: recipe(),
    )
    for grads in steps:
        for name, p in params.items():
            p.grad = None if grads[name] is None else grads[name].clone()
        opt.step()
    return {name: p.detach() for name, p in params.items()}


def pure(recipe, steps):
    torch.manual_seed(0)
    return run(recipe(), {name: torch.randn(3) for name in NAMES}, steps)[0]


def random_steps(absent=((),) * 6):
    """absent: whose gradient is None, in each step."""
    torch.manual_seed(1)
    steps = [{x: torch.randn(3) for x in NAMES} for _ in absent]
    return [
        {name: None if name in gone else g for name, g in grads.items()}
        for grads, gone in zip(steps, absent, strict=True)
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_two_groups_step_as_one_tree(name):
    steps = random_steps()
    if name in ("finite", "small", "gates"):
        steps[2]["b2"][1] = math.nan
    want = pure(RECIPES[name], steps)
    assert_close(trained(RECIPES[name], steps, [["a1", "b1"], ["a2", "b2"]]), want, 1e-6)


@pytest.mark.parametrize(
    "name", ["sequence", "accumulate", "finite", "small", "gates", "lookahead"]
)
def test_a_group_without_gradients_keeps_step(name):
    whole_group = () if name in ("sequence", "lookahead") else ("a2", "b2")
    steps = random_steps([("a2",), (), ("b1",), whole_group, (), ("a1",)])
    want = pure(RECIPES[name], steps)
    assert_close(trained(RECIPES[name], steps, [["a1", "b1"], ["a2", "b2"], []]), want, 1e-6)


# ---------------------------------------------------------------- groups of one number each


def numbers(recipe, *groups, start=0.0, **options):
    """An optimizer of a 1-element parameter for each group, and a function that steps it."""
    params = [torch.full((1,), start, requires_grad=True) for _ in groups]
    opt = Optimizer(
        [{"params": [p], **group} for p, group in zip(params, groups, strict=True)],
        recipe,
        **options,
    )

    def step(*grads):
        for p, g in zip(params, grads, strict=True):
            p.grad = torch.tensor([g])
        opt.step()
        return [p.item() for p in params]

    return opt, params, step


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("around", ["sequence", "flatten", "masked"])
def test_trees_and_rules_measure_together(compile, around):
    def recipe(lr, whole=False):
        if not whole:
            return fo.chain(CLIP, fo.sgd(lr))
        if around == "flatten":
            return fo.flatten(fo.chain(CLIP, fo.sgd(lr)))
        if around == "masked":
            return fo.chain(fo.masked(fo.flatten(CLIP), "*"), fo.sgd(lr))
        return silent(CLIP, fo.sgd(lr))

    *_, step = numbers(recipe, {}, {"whole": True}, {"whole": True}, compile=compile, lr=1.0)
    before = [0.0] * 3
    for g in (1.0, 0.5, 1.0):
        after = step(2.0 * g, g, 2.0 * g)
        moved = [x - y for x, y in zip(before, after, strict=True)]
        norm = max(1.0, 3.0 * g)
        assert moved == pytest.approx([2 * g / norm, g / norm, 2 * g / norm], rel=1e-5)
        before = after


def test_gates_of_trees_and_rules_decide_alike():
    def recipe(whole=False):
        return fo.apply_if_finite((silent if whole else fo.chain)(CLIP, fo.sgd(1.0)), 2)

    *_, step = numbers(recipe, {}, {"whole": True})
    for grads in ((3.0, 4.0), (math.nan, 4.0), (3.0, math.inf)):  # the first of them moves
        assert step(*grads) == pytest.approx([-0.6, -0.8])


def test_a_gate_that_is_shut_in_one_group_keeps_it_out_of_the_sum():
    def recipe(first=0):
        return fo.conditionally_mask(silent(CLIP, fo.sgd(1.0)), lambda step: step >= first)

    *_, step = numbers(recipe, {}, {"first": 1})
    assert step(3.0, 4.0) == pytest.approx([-1.0, 0.0])
    assert step(3.0, 4.0) == pytest.approx([-1.6, -0.8])


def test_another_order_in_another_group_is_an_error():
    def recipe(swap=False):
        parts = [CLIP, fo.normalize()]
        return silent(*(parts[::-1] if swap else parts), fo.sgd(1.0))

    _, params, step = numbers(recipe, {}, {"swap": True}, start=1.0)
    with pytest.raises(ValueError, match="in different orders"):
        step(1.0, 1.0)
    assert [p.item() for p in params] == [1.0, 1.0]


def test_nothing_is_written_before_all_totals_are_known():
    def fails(grads, state, params=None):
        raise RuntimeError("no")

    def recipe(bad=False):
        end = fo.GradientTransformation(lambda params: fo.EmptyState(), fails)
        return silent(CLIP, fo.sgd(1.0), end if bad else fo.identity())

    opt, params, step = numbers(recipe, {}, {"bad": True}, start=1.0)
    with pytest.raises(RuntimeError, match="no"):
        step(1.0, 1.0)
    assert params[0].item() == 1.0
    assert not opt.state[params[0]]


@pytest.mark.parametrize(("groups", "runs"), [(1, 1), (2, 2)])
def test_one_group_alone_runs_once(groups, runs):
    calls = []

    def update(grads, state, params=None):
        calls.append(1)
        return grads, state

    counted = fo.GradientTransformation(lambda params: fo.EmptyState(), update)
    *_, step = numbers(lambda: fo.chain(counted, CLIP, fo.sgd(1.0)), *[{}] * groups)
    step(*[1.0] * groups)
    assert len(calls) == runs * groups


def test_a_closure_of_the_user_hides_nothing():
    """Rules inside a transformation that cannot be looked into measure over all groups, too."""
    inside = fo.chain(CLIP, fo.sgd(1.0))

    def update(grads, state, params=None):
        return inside.update(grads, state, params)

    *_, step = numbers(lambda: fo.GradientTransformation(inside.init, update), {}, {})
    assert step(3.0, 4.0) == pytest.approx([-0.6, -0.8])
