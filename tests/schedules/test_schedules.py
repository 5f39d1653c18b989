"""Every schedule against optax and through every property, and what joins them."""

import json
import math
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path

import optree
import pytest
import torch
from helpers import run
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from schedule_cases import ALL, COUNTS, EVERY, TWO_WAYS, made, values
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, SequentialLR

import functional_optim as fo
from functional_optim import schedules


# ---------------------------------------------------------------- numbers in, numbers out
def test_every_schedule_is_in_the_table():
    named = {name: x for name, x in vars(schedules).items() if not name.startswith("_")}
    public = {thing for thing in named.values() if callable(thing)}
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


GRADIENTS = [
    pytest.param(name, argument, id=f"{name}-{argument}")
    for name, (_, settings) in EVERY.items()
    for argument, x in settings.items()
    if isinstance(x, float)  # a value, no length
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
@pytest.mark.parametrize(
    "make",
    [
        lambda steps: schedules.cosine_onecycle(steps, 1.0),
        lambda steps: schedules.warmup_cosine(0.0, 1.0, steps // 2, steps),
    ],
    ids=["floor", "cosine"],
)
def test_the_next_schedule_is_one_graph_too(make):
    """A second compilation gets the numbers of a schedule as symbols."""

    def compiled(schedule):
        return torch.compile(lambda k: schedule(k), backend="aot_eager", fullgraph=True)

    for steps in (5, 8, 13):
        schedule = make(steps)
        found = compiled(schedule)(torch.tensor(4))
        assert found.item() == pytest.approx(schedule(4), rel=1e-14)


# ---------------------------------------------------------------- formulas
OPTAX = json.loads(
    (Path(__file__).parents[1] / "support" / "reference" / "optax_schedules.json").read_text()
)
"""Made by the script beside it."""


@pytest.mark.parametrize("name", OPTAX["schedules"])
def test_a_schedule_equals_optax(name):
    wanted = OPTAX["schedules"][name]
    assert values(made(name), range(len(wanted))) == pytest.approx(wanted, rel=1e-13, abs=1e-15)


def test_all_but_two_are_compared_with_optax():
    """Those have their formulas below."""
    assert EVERY.keys() - OPTAX["schedules"] == {"warmup_stable_decay", "inverse_square_root"}


def test_the_transformer_schedule_is_the_papers():
    """Equation 3 of "Attention Is All You Need", whose steps begin at 1."""
    width, warm = 512, 40
    schedule = schedules.inverse_square_root((width * warm) ** -0.5, warm)
    for step in range(1, 200):
        paper = width**-0.5 * min(step**-0.5, step * warm**-1.5)
        assert schedule(step) == pytest.approx(paper, rel=1e-14)


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("linear", lambda x: 1 - x),
        ("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2),
        ("1-sqrt", lambda x: 1 - math.sqrt(x)),
    ],
)
def test_the_ways_down_of_warmup_stable_decay(kind, left):
    schedule = schedules.warmup_stable_decay(0.0, 2.0, 5, 10, 8, 0.5, kind=kind)
    assert values(schedule, range(5, 16)) == [2.0] * 11
    wanted = [0.5 + 1.5 * left(k / 8) for k in range(9)]
    assert values(schedule, range(15, 24)) == pytest.approx(wanted, abs=1e-15)
    assert schedule(24) == 0.5


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("linear", [0.25, 0.5, 0.75]),
        ("constant", [0.25, 0.25, 0.25]),
        ("exponential", [0.25, 0.25 * 4 ** (1 / 3), 0.25 * 4 ** (2 / 3)]),
    ],
)
def test_warm_ups(kind, wanted):
    after = schedules.polynomial(1.0, 0.0, 2, 10)
    schedule = schedules.warmup(after, 3, 0.25, kind)
    assert values(schedule, range(3)) == pytest.approx(wanted, abs=1e-15)
    assert values(schedule, range(3, 20)) == values(after, range(17))
    assert values(schedules.warmup(after, 0, 0.25, kind)) == values(after)


def test_the_bound_of_an_exponential_decay_depends_on_its_direction():
    down = schedules.exponential_decay(1.0, 1, 0.5, end_value=0.2)
    up = schedules.exponential_decay(1.0, 1, 2.0, end_value=5.0)
    assert values(down, range(4)) == [1.0, 0.5, 0.25, 0.2]
    assert values(up, range(4)) == [1.0, 2.0, 4.0, 5.0]
    assert up(10**6) == up(torch.tensor(10**6)) == 5.0  # 2 ** 10⁶ is no float


@ALL
def test_a_schedule_ends_well(name):
    """After a million steps it is finite, not negative, and still a formula of the step."""
    late = values(made(name), (10**6, 10**6 + 1))
    assert all(math.isfinite(x) and x >= 0 for x in late)
    assert late[0] == pytest.approx(late[1], rel=1e-5)


def test_other_names():
    assert schedules.cosine is schedules.cosine_decay
    assert schedules.warmup_cosine is schedules.warmup_cosine_decay


def test_a_cycle_without_a_rise_starts_at_its_peak():
    assert schedules.cosine_onecycle(10, 1.0, pct_start=0.0)(0) == 1.0
    assert schedules.linear_onecycle(10, 1.0, pct_start=0.0, pct_final=0.0)(0) == 1 / 25


# ---------------------------------------------------------------- joins
@hypothesis_settings(max_examples=50)
@given(
    levels=st.lists(st.floats(0.0, 10.0), min_size=2, max_size=6),
    lengths=st.lists(st.integers(1, 50), min_size=6, max_size=6),
)
def test_lines_from_level_to_level_join_without_a_jump(levels, lengths):
    pieces = list(zip(pairwise(levels), lengths, strict=False))
    ends = list(accumulate(steps for _, steps in pieces))
    lines = [schedules.linear(a, b, steps) for (a, b), steps in pieces]
    schedule = schedules.join(lines, ends[:-1])
    assert [schedule(k) for k in (0, *ends)] == levels
    steepest = max(abs(b - a) / steps for (a, b), steps in pieces)
    jumps = [abs(schedule(k + 1) - schedule(k)) for k in range(ends[-1])]
    assert max(jumps) <= steepest * (1 + 1e-12) + 1e-12


@hypothesis_settings(max_examples=50)
@given(
    scales=st.dictionaries(st.integers(1, 60), st.floats(0.0, 2.0), max_size=5),
    kind=st.sampled_from(["linear", "cosine"]),
)
def test_interpolation_meets_the_steps_at_every_boundary(scales, kind):
    smooth = schedules.piecewise_interpolate(kind, 0.7, scales)
    steps = schedules.piecewise_constant(0.7, scales)
    order = sorted(scales)
    levels = list(accumulate([scales[k] for k in order], mul, initial=0.7))
    assert [smooth(k) for k in (0, *order)] == levels
    assert [steps(k) for k in (0, *order)] == levels
    for (start, end), ends in zip(pairwise((0, *order)), pairwise(levels), strict=True):
        way = values(smooth, range(start, end + 1))
        assert way == pytest.approx(sorted(way, reverse=ends[0] > ends[1]), rel=1e-14)


@hypothesis_settings(max_examples=30)
@given(name=st.sampled_from(sorted(EVERY)), warm=st.integers(1, 20))
def test_a_warm_up_leads_up_to_any_schedule(name, warm):
    after = made(name)
    for kind in ("linear", "exponential"):
        schedule = schedules.warmup(after, warm, 0.01, kind)
        assert schedule(0) == pytest.approx(0.01, rel=1e-15)
        assert values(schedule, range(warm, warm + 30)) == values(after, range(30))
        step = schedule(1) - schedule(0) if kind == "linear" else schedule(1) / schedule(0)
        last = (schedule(warm - 1), schedule(warm))
        found = last[1] - last[0] if kind == "linear" else last[1] / last[0]
        assert found == pytest.approx(step, rel=1e-9)


@hypothesis_settings(max_examples=30)
@given(
    names=st.lists(st.sampled_from(sorted(EVERY)), min_size=1, max_size=4),
    lengths=st.lists(st.integers(0, 15), min_size=3, max_size=3),
)
def test_a_join_is_its_parts(names, lengths):
    parts = [made(name) for name in names]
    starts = list(accumulate(lengths[: len(parts) - 1]))
    schedule = schedules.join(parts, starts)
    for count in range(50):
        i = sum(start <= count for start in starts)
        assert schedule(count) == parts[i](count - (0, *starts)[i])


def test_a_part_of_a_join_never_sees_a_step_before_its_own():
    seen = []

    def part(count):
        seen.append(count)
        return math.sqrt(count)

    assert schedules.join([schedules.constant(1.0), part], [10])(4) == 1.0
    assert schedules.join([lambda k: -1.0, part], [10])(26) == 4.0
    assert min(seen) >= 0


def test_a_part_of_a_join_never_sees_a_step_after_its_own():
    """A scheduler with a table failed once the next part had begun."""
    rates = [0.1, 0.2, 0.3]
    schedule = schedules.join([lambda k: rates[int(k)], schedules.constant(1.0)], [3])
    assert values(schedule, range(6)) == [*rates, 1.0, 1.0, 1.0]

    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    parts = [LambdaLR(opt, rates.__getitem__), ExponentialLR(opt, 0.5)]
    converted = schedules.from_torch(SequentialLR(opt, parts, [3]))
    assert values(converted, range(6)) == [*rates, 1.0, 0.5, 0.25]
