"""The table of schedules: one row sends a schedule through every property."""

from typing import Any

import pytest

from functional_optim import schedules

CYCLES = (
    {"init_value": 0.1, "peak_value": 1.0, "warmup_steps": 3, "decay_steps": 20},
    {"init_value": 0.0, "peak_value": 0.5, "warmup_steps": 0, "decay_steps": 15, "end_value": 0.2},
)

EVERY: dict[str, tuple[Any, dict[str, Any]]] = {
    "constant": (schedules.constant, {"value": 0.3}),
    "linear": (
        schedules.linear,
        {"init_value": 0.2, "end_value": 0.9, "transition_steps": 20, "transition_begin": 4},
    ),
    "polynomial": (
        schedules.polynomial,
        {"init_value": 0.9, "end_value": 0.1, "power": 2.5, "transition_steps": 20},
    ),
    "cosine_decay": (
        schedules.cosine_decay,
        {"init_value": 0.9, "decay_steps": 20, "alpha": 0.1, "exponent": 1.5},
    ),
    "exponential_decay": (
        schedules.exponential_decay,
        {"init_value": 0.9, "transition_steps": 7, "decay_rate": 0.6, "transition_begin": 3},
    ),
    "exponential_decay-staircase": (
        schedules.exponential_decay,
        {
            "init_value": 0.1,
            "transition_steps": 5,
            "decay_rate": 1.6,
            "staircase": True,
            "end_value": 0.7,
        },
    ),
    "piecewise_constant": (
        schedules.piecewise_constant,
        {"init_value": 0.9, "boundaries_and_scales": {20: 0.1, 8: 0.5}},
    ),
    "piecewise_interpolate": (
        schedules.piecewise_interpolate,
        {
            "interpolate_type": "cosine",
            "init_value": 0.9,
            "boundaries_and_scales": {20: 2.5, 8: 0.5},
        },
    ),
    "linear_onecycle": (schedules.linear_onecycle, {"transition_steps": 33, "peak_value": 0.8}),
    "cosine_onecycle": (schedules.cosine_onecycle, {"transition_steps": 33, "peak_value": 0.8}),
    "sgdr": (schedules.sgdr, {"cosine_kwargs": CYCLES}),
    "warmup_constant": (
        schedules.warmup_constant,
        {"init_value": 0.1, "peak_value": 0.8, "warmup_steps": 6},
    ),
    "warmup_cosine_decay": (
        schedules.warmup_cosine_decay,
        {
            "init_value": 0.1,
            "peak_value": 0.8,
            "warmup_steps": 6,
            "decay_steps": 30,
            "end_value": 0.05,
            "exponent": 1.5,
        },
    ),
    "warmup_exponential_decay": (
        schedules.warmup_exponential_decay,
        {
            "init_value": 0.1,
            "peak_value": 0.8,
            "warmup_steps": 6,
            "transition_steps": 10,
            "decay_rate": 0.3,
            "end_value": 0.05,
        },
    ),
    "warmup_stable_decay": (
        schedules.warmup_stable_decay,
        {
            "init_value": 0.1,
            "peak_value": 0.8,
            "warmup_steps": 6,
            "stable_steps": 10,
            "decay_steps": 16,
            "end_value": 0.05,
            "kind": "1-sqrt",
        },
    ),
    "inverse_square_root": (
        schedules.inverse_square_root,
        {"peak_value": 0.8, "warmup_steps": 6, "init_value": 0.1},
    ),
}
COUNTS = range(45)
TWO_WAYS = {"rtol": 1e-14, "atol": 1e-15}
"""math and torch round some functions differently in the last bit."""
ALL = pytest.mark.parametrize("name", EVERY)


def made(name):
    make, settings = EVERY[name]
    return make(**settings)


def values(schedule, counts=COUNTS):
    return [schedule(k) for k in counts]
