"""Every schedule against its formula and optax, what joins them, and what they refuse."""

from __future__ import annotations

import json
import math
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from schedule_cases import ALL, COUNTS, EVERY, made, values

from functional_optim import schedules

# ---------------------------------------------------------------- formulas


def clipped(x):
    return min(max(x, 0.0), 1.0)


def half(x):
    return (1 + math.cos(math.pi * clipped(x))) / 2


def interpolated(points, shape):
    """Between (step, value) pairs."""

    def value(k):
        for (a, x), (b, y) in pairwise(points):
            if a <= k < b:
                return x + (y - x) * shape((k - a) / (b - a))
        return points[-1][1]

    return value


def by_cosine(x):
    return 1 - half(x)


def sgdr_by_hand(k):
    if k < 20:
        return 0.1 + 0.9 * k / 3 if k < 3 else half((k - 3) / 17)
    return 0.2 + 0.3 * half((k - 20) / 15)


def after(warm, rise, then):
    return lambda k: rise(k / warm) if k < warm else then(k - warm)


FORMULAS = {
    "constant": lambda k: 0.3,
    "linear": lambda k: 0.2 + 0.7 * clipped((k - 4) / 20),
    "polynomial": lambda k: 0.1 + 0.8 * (1 - clipped(k / 20)) ** 2.5,
    "cosine_decay": lambda k: 0.9 * (0.1 + 0.9 * half(k / 20) ** 1.5),
    "exponential_decay": lambda k: 0.9 * 0.6 ** (max(k - 3, 0) / 7),
    "exponential_decay-staircase": lambda k: min(0.1 * 1.6 ** (k // 5), 0.7),
    "piecewise_constant": lambda k: 0.9 if k < 8 else 0.45 if k < 20 else 0.045,
    "piecewise_interpolate": interpolated([(0, 0.9), (8, 0.45), (20, 1.125)], by_cosine),
    "linear_onecycle": interpolated(
        [(0, 0.032), (9, 0.8), (28, 0.032), (33, 0.032e-4)], lambda x: x
    ),
    "cosine_onecycle": interpolated([(0, 0.032), (9, 0.8), (33, 0.032e-4)], by_cosine),
    "sgdr": sgdr_by_hand,
    "warmup_constant": lambda k: 0.1 + 0.7 * clipped(k / 6),
    "warmup_cosine_decay": after(
        6, lambda x: 0.1 + 0.7 * x, lambda k: 0.05 + 0.75 * half(k / 24) ** 1.5
    ),
    "warmup_exponential_decay": after(
        6, lambda x: 0.1 + 0.7 * x, lambda k: max(0.8 * 0.3 ** (k / 10), 0.05)
    ),
    "warmup_stable_decay": after(
        6,
        lambda x: 0.1 + 0.7 * x,
        lambda k: 0.05 + 0.75 * (1 - math.sqrt(clipped((k - 10) / 16))),
    ),
    "inverse_square_root": after(
        6, lambda x: 0.1 + 0.7 * x, lambda k: 0.8 * math.sqrt(6 / (6 + k))
    ),
}


@ALL
def test_a_schedule_equals_its_formula(name):
    assert values(made(name)) == pytest.approx([FORMULAS[name](k) for k in COUNTS], abs=1e-13)


OPTAX = json.loads(
    (Path(__file__).parents[1] / "support" / "reference" / "optax_schedules.json").read_text()
)
"""Made by the script beside it."""


@pytest.mark.parametrize("name", OPTAX["schedules"])
def test_a_schedule_equals_optax(name):
    wanted = OPTAX["schedules"][name]
    assert values(made(name), range(len(wanted))) == pytest.approx(wanted, rel=1e-13, abs=1e-15)


def test_all_but_two_are_compared_with_optax():
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
    schedule = schedules.warmup_stable_decay(0.0, 2.0, 5, 10, 8, kind=kind)
    assert values(schedule, range(5, 16)) == [2.0] * 11
    wanted = [2 * left(k / 8) for k in range(9)]
    assert values(schedule, range(15, 24)) == pytest.approx(wanted, abs=1e-15)
    assert schedule(24) == 0.0


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


# ---------------------------------------------------------------- bad input

NAN = float("nan")
