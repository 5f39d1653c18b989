"""Writes optax_schedules.json: what optax gives for the table in schedule_cases, in float64.

Run `python tests/support/reference/optax_schedules.py` where the extra "peers" is installed.
"""

import sys
from pathlib import Path

import jax
import optax

sys.path.insert(0, str(Path(__file__).parent.parent))
from schedule_cases import EVERY
from test_plateau import losses

from reference import write

STEPS = 50
PLATEAUS = (
    {"patience": 3, "cooldown": 2},
    {"patience": 2, "accumulation_size": 3, "rtol": 1e-2},
    {"patience": 2, "atol": 0.05, "min_scale": 0.125},
)


def numbers(name: str) -> list[float] | None:
    """The first values of a schedule; None if optax does not have it."""
    function, settings = name.split("-")[0], EVERY[name][1]
    make = getattr(optax, f"{function}_schedule", None) or getattr(optax, function, None)
    if make is None:
        return None
    schedule = make(**settings)
    return [float(schedule(jax.numpy.asarray(k))) for k in range(STEPS)]


def scales(settings: dict[str, float]) -> list[float]:
    """What reduce_on_plateau multiplies by."""
    tx, one = optax.contrib.reduce_on_plateau(factor=0.5, **settings), jax.numpy.ones(())
    state, found = tx.init(one), []
    for value in losses(STEPS):
        u, state = tx.update(one, state, value=value)
        found.append(float(u))
    return found


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    every = {name: numbers(name) for name in EVERY}
    schedules = {name: found for name, found in every.items() if found is not None}
    plateaus = [{"settings": s, "scales": scales(s)} for s in PLATEAUS]
    file, head = Path(__file__).with_suffix(".json"), {"optax": optax.__version__}
    write(file, head, schedules=schedules, plateaus=plateaus)
