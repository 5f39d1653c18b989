"""Every schedule through every property."""

from __future__ import annotations

import optree
import pytest
import torch
from helpers import assert_close, assert_same, make_grads, make_params, run
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from schedule_cases import ALL, COUNTS, EVERY, TWO_WAYS, made, values
from torch import Tensor

import functional_optim as fo
from functional_optim import schedules

# ---------------------------------------------------------------- numbers in, numbers out


def test_every_schedule_is_in_the_table():
    public = {thing for name, thing in vars(schedules).items() if callable(thing)}
    built = {schedules.join, schedules.warmup, schedules.from_torch}
    assert {make for make, _ in EVERY.values()} == public - built


@ALL
@hypothesis_settings(max_examples=25)
@given(count=st.integers(0, 10**6) | st.integers(0, 40))
def test_int_float_and_tensor_agree(name, count):
    schedule = made(name)
    value = schedule(count)
    assert type(value) is float
    assert schedule(float(count)) == value
    for dtype in (torch.int64, torch.int32, torch.float32, torch.float64):
        found = schedule(torch.tensor(count, dtype=dtype))
        assert found.dtype is torch.float64
        assert found.shape == ()
        assert found.item() == pytest.approx(value, rel=1e-14, abs=1e-15)


@ALL
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
def test_a_batch_of_counts_under_vmap(name, dtype):
    schedule = made(name)
    wanted = torch.tensor(values(schedule), dtype=torch.float64)
    found = torch.vmap(schedule)(torch.tensor(COUNTS, dtype=dtype))
    torch.testing.assert_close(found, wanted, **TWO_WAYS)


@ALL
def test_many_counts_without_vmap_are_refused(name):
    with pytest.raises(ValueError, match=r"of shape \(3,\); use torch.vmap"):
        made(name)(torch.arange(3))


def with_tensors(settings):
    """The settings with every number as a tensor, but for the keys of dicts and bools."""
    return optree.tree_map(
        lambda x: torch.tensor(float(x), dtype=torch.float64) if isinstance(x, float | int) else x,
        {name: value for name, value in settings.items() if not isinstance(value, bool)},
    ) | {name: value for name, value in settings.items() if isinstance(value, bool)}


@ALL
def test_numbers_may_be_tensors(name):
    make, settings = EVERY[name]
    schedule, wanted = make(**with_tensors(settings)), made(name)
    for count in COUNTS:
        found = schedule(count)
        assert isinstance(found, Tensor)
        assert found.dtype is torch.float64
        assert found.item() == pytest.approx(wanted(count), rel=1e-13, abs=1e-15)


def value_names(settings):
    """The arguments that are floats: values, not lengths."""
    return [name for name, x in settings.items() if isinstance(x, float)]


GRADIENTS = [
    pytest.param(name, argument, id=f"{name}-{argument}")
    for name, (_, settings) in EVERY.items()
    for argument in value_names(settings)
]


@pytest.mark.parametrize(("name", "argument"), GRADIENTS)
def test_the_gradient_with_respect_to_a_value(name, argument):
    """Against a central difference, at every step of a run."""
    make, settings = EVERY[name]

    def total(x):
        schedule = make(**{**settings, argument: x})
        return sum(schedule(k) for k in COUNTS)

    x, h = torch.tensor(settings[argument], dtype=torch.float64), 1e-6
    slope = torch.func.grad(total)(x).item()
    wanted = (total(x.item() + h) - total(x.item() - h)) / (2 * h)
    assert slope == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    assert abs(slope) > 1e-4


def test_the_gradient_of_a_run_with_respect_to_the_peak():
    """A meta-gradient through the optimizer, against a difference of two runs."""
    g = torch.tensor(1.0, dtype=torch.float64)

    def end(peak):
        tx = fo.sgd(schedules.warmup_cosine_decay(0.0, peak, 3, 10))
        return run(tx, g, [g] * 8)[0]

    peak = torch.tensor(0.1, dtype=torch.float64)
    wanted = (end(peak + 1e-6) - end(peak - 1e-6)).item() / 2e-6
    assert torch.func.grad(end)(peak).item() == pytest.approx(wanted, rel=1e-6)
    assert wanted < -1


def test_a_schedule_outside_of_a_gradient_serves_several():
    """What was recorded for one gradient is not kept for the next."""
    x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    schedule = schedules.warmup(schedules.cosine_decay(x, 10), 3)
    for _ in range(2):
        (slope,) = torch.autograd.grad(schedule(8), x)
        assert slope == 0.5


def test_vmap_over_the_lengths():
    steps = torch.tensor([5, 10, 20])

    def value(steps, count):
        return schedules.warmup_stable_decay(0.0, 1.0, steps, steps, steps)(count)

    found = torch.vmap(value, (0, None))(steps, 12)
    assert found.tolist() == pytest.approx([0.6, 1.0, 0.6], abs=1e-15)


# ---------------------------------------------------------------- as hyperparameters


@hypothesis_settings(max_examples=10)
@given(
    lr=st.floats(1e-4, 0.5),
    beta=st.floats(0.0, 0.99),
    decay=st.floats(1e-4, 0.5),
)
def test_a_run_with_constants_is_the_run_with_numbers(lr, beta, decay):
    params = make_params()
    grads = make_grads(params)
    c = schedules.constant
    found = run(fo.adamw(c(lr), (c(beta), c(0.999)), weight_decay=c(decay)), params, grads)
    wanted = run(fo.adamw(lr, (beta, 0.999), weight_decay=decay), params, grads)
    assert_same(found, wanted)


@ALL
def test_a_chain_sees_the_numbers_of_the_schedule(name):
    """The first step has count 0."""
    tx, w = fo.scale_by_schedule(made(name)), torch.zeros((), dtype=torch.float64)
    state, seen = tx.init(w), []
    for _ in COUNTS:
        u, state = tx.update(torch.ones_like(w), state, w)
        seen.append(u.item())
    assert seen == pytest.approx(values(made(name)), rel=1e-14, abs=1e-15)


@pytest.mark.usefixtures("fresh_dynamo")
def test_schedules_are_one_graph():
    """All of them in one function, traced once for all counts."""
    every = [made(name) for name in EVERY]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def together(count):
        return torch.stack([schedule(count) for schedule in every])

    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (0, 5, 20, 40):
            wanted = torch.tensor([schedule(count) for schedule in every], dtype=torch.float64)
            torch.testing.assert_close(together(torch.tensor(count)), wanted, **TWO_WAYS)


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_graph_serves_all_peaks():
    """The number in a schedule is an argument of the step, not a constant of the graph."""
    g = torch.tensor(1.0, dtype=torch.float64)

    def step(w, state, peak):
        tx = fo.sgd(schedules.warmup_cosine_decay(0.0, peak, 3, 10))
        updates, state = tx.update(g, state, w)
        return fo.apply_updates(w, updates), state

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    eager = traced = (g.clone(), fo.sgd(schedules.constant(0.0)).init(g))
    for i in range(4):
        peak = torch.tensor(0.1 * (1 + i), dtype=torch.float64)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            traced = compiled(*traced, peak)
        eager = step(*eager, peak)
        assert_close(traced, eager, 1e-14)
    assert eager[0] < 0.8
