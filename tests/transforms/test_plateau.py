"""`reduce_on_plateau`: against torch's scheduler, and below zero. As a link: `test_links`."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ReduceLROnPlateau

import functional_optim as fo

NAN, INF = float("nan"), float("inf")
G = torch.ones((), dtype=torch.float64)


def scales(values, tx=None, **options):
    """What the link multiplies by, value after value; factor 0.5 is exact in float32."""
    tx = fo.reduce_on_plateau(**{"factor": 0.5, **options}) if tx is None else tx
    state, seen = tx.init(G), []
    for value in values:
        u, state = tx.update(G, state, G, value=value)
        seen.append(u.item())
    return seen


def torchs(values, patience=10, **options):
    """torch's learning rates, from 1; its patience is one less than ours."""
    opt = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = ReduceLROnPlateau(opt, patience=patience - 1, eps=0.0, **options)
    seen = []
    for value in values:
        scheduler.step(value)
        seen.append(opt.param_groups[0]["lr"])
    return seen


def losses(steps, seed=0, noise=0.2):
    """Falling to a level, with noise."""
    g = torch.Generator().manual_seed(seed)
    time = torch.arange(steps, dtype=torch.float64)
    return ((-time / 10).exp() + 1 + noise * torch.rand(steps, generator=g)).tolist()


# ---------------------------------------------------------------- when it reduces
OPTIONS = [{}, {"patience": 1}, {"patience": 3, "cooldown": 4}, {"patience": 5, "threshold": 0.1}]
OPTIONS += [{"patience": 2, "cooldown": 1, "min": 0.015625}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", [0, 1])
def test_positive_values_give_torchs_rates(options, seed):
    given = dict(options)
    threshold, least = given.pop("threshold", 1e-4), given.pop("min", 0.0)
    values = losses(100, seed)
    found = scales(values, rtol=threshold, min_scale=least, **given)
    assert found == torchs(values, factor=0.5, threshold=threshold, min_lr=least, **given)
    assert found[-1] < 0.3


FILE = Path(__file__).parents[1] / "support" / "reference" / "optax_schedules.json"
OPTAX = json.loads(FILE.read_text())


@pytest.mark.parametrize("run", OPTAX["plateaus"])
def test_positive_values_give_optax_scales(run):
    assert scales(losses(len(run["scales"])), **run["settings"]) == run["scales"]
    assert run["scales"][-1] < 0.3


@pytest.mark.parametrize("level", [-1.0, -1e6, -1e-6, 0.0, 1.0])
def test_a_value_that_stays_is_reduced_whatever_its_sign(level):
    """torch and optax compare with a share of a negative best value, and never reduce."""
    wanted = [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25]
    assert scales([level] * 7, patience=3) == wanted
    assert (torchs([level] * 7, factor=0.5, patience=3) == wanted) == (level >= 0)


def test_a_value_that_falls_below_zero_is_not_reduced():
    assert scales([-1.0 - 0.1 * k for k in range(50)], patience=1) == [1.0] * 50


def test_a_negative_value_must_fall_by_its_share():
    """From −10, a share of 0.1 asks for less than −11."""
    assert scales([-10.0, -10.9], patience=1, rtol=0.1) == [1.0, 0.5]
    assert scales([-10.0, -11.1], patience=1, rtol=0.1) == [1.0, 1.0]
    assert scales([-10.0, -11.1], patience=1, rtol=0.1, atol=0.2) == [1.0, 0.5]


@settings(max_examples=30)
@given(st.lists(st.integers(-8, 8), min_size=1, max_size=30), st.integers(-1000, 1000))
def test_only_differences_count_for_an_absolute_tolerance(values, shift):
    options = {"rtol": 0.0, "atol": 0.5, "patience": 2, "cooldown": 1}
    assert scales([v + shift for v in values], **options) == scales(values, **options)


@settings(max_examples=30)
@given(st.lists(st.integers(-8, 8), min_size=1, max_size=30), st.integers(-3, 3))
def test_only_ratios_count_for_a_relative_tolerance(values, power):
    options = {"rtol": 0.25, "patience": 2}
    assert scales([v * 2.0**power for v in values], **options) == scales(values, **options)


@pytest.mark.parametrize("strange", [NAN, INF])
def test_a_strange_value_is_no_improvement_and_leaves_nothing_behind(strange):
    assert scales([strange, strange, 1.0, 0.5, 0.25], patience=2) == [1.0, 0.5, 0.5, 0.5, 0.5]
    means = scales([strange, 1.0, 3.0, 1.0, 3.0, 1.0], patience=2, accumulation_size=2)
    assert means == [1.0] * 5 + [1.0]


def test_equal_values_are_equal_after_rounding_to_the_state():
    """0.1 is less than itself in float32, in which the best value is kept."""
    assert scales([0.1] * 3, patience=2, rtol=1e-12) == [1.0, 1.0, 0.5]


# ---------------------------------------------------------------- a link like any other
def test_behind_a_gate_only_open_steps_have_a_value():
    tx = fo.accumulate(fo.reduce_on_plateau(0.5, patience=2), every=2)
    state, seen = tx.init(G), []
    for value in (9.0, 1.0, 9.0, 1.0, 9.0, 1.0):
        u, state = tx.update(G, state, G, value=value)
        seen.append(u.item())
    assert seen == [0.0, 1.0, 0.0, 1.0, 0.0, 0.5]
