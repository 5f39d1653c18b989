"""The table of schedules: one row sends a schedule through every property."""

from typing import Any

import pytest

from functional_optim import schedules as s

CYCLES = (
    {"init_value": 0.1, "peak_value": 1.0, "warmup_steps": 3, "decay_steps": 20},
    {"init_value": 0.0, "peak_value": 0.5, "warmup_steps": 0, "decay_steps": 15, "end_value": 0.2},
)

BEGIN = {"init_value": 0.1, "peak_value": 0.8, "warmup_steps": 6}
END = {**BEGIN, "end_value": 0.05}
SLOW = {"init_value": 0.9, "transition_steps": 7, "decay_rate": 0.6, "transition_begin": 3}
FAST = {"init_value": 0.1, "transition_steps": 5, "decay_rate": 1.6, "end_value": 0.7}
PIECES = {"init_value": 0.9, "boundaries_and_scales": {20: 2.5, 8: 0.5}}


def row(make: Any, **settings: Any) -> tuple[Any, dict[str, Any]]:
    return make, settings


EVERY = {
    "constant": row(s.constant, value=0.3),
    "linear": row(s.linear, init_value=0.2, end_value=0.9, transition_steps=20, transition_begin=4),
    "polynomial": row(s.polynomial, init_value=0.9, end_value=0.1, power=2.5, transition_steps=20),
    "cosine_decay": row(s.cosine_decay, init_value=0.9, decay_steps=20, alpha=0.1, exponent=1.5),
    "exponential_decay": row(s.exponential_decay, **SLOW),
    "exponential_decay-staircase": row(s.exponential_decay, **FAST, staircase=True),
    "piecewise_constant": row(
        s.piecewise_constant, init_value=0.9, boundaries_and_scales={20: 0.1, 8: 0.5}
    ),
    "piecewise_interpolate": row(s.piecewise_interpolate, interpolate_type="cosine", **PIECES),
    "linear_onecycle": row(s.linear_onecycle, transition_steps=33, peak_value=0.8),
    "cosine_onecycle": row(s.cosine_onecycle, transition_steps=33, peak_value=0.8),
    "sgdr": row(s.sgdr, cosine_kwargs=CYCLES),
    "warmup_constant": row(s.warmup_constant, **BEGIN),
    "warmup_cosine_decay": row(s.warmup_cosine_decay, **END, decay_steps=30, exponent=1.5),
    "warmup_exponential_decay": row(
        s.warmup_exponential_decay, **END, transition_steps=10, decay_rate=0.3
    ),
    "warmup_stable_decay": row(
        s.warmup_stable_decay, **END, stable_steps=10, decay_steps=16, kind="1-sqrt"
    ),
    "inverse_square_root": row(
        s.inverse_square_root, peak_value=0.8, warmup_steps=6, init_value=0.1
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
