"""Two contenders take turns in one process: A B A B …

What disturbs the machine disturbs both of them. The minima decide: medians swing by tens of percent
where other programs run.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

from rows import Effort, Measured

Step = Callable[[], Any]
WARM_UP = 3
MOST = 3000
"""Calls of each side, however quick they are."""
FEWEST, FEW = 10, 3
"""Calls of each side at least; where ten of them take more than `LONG` seconds, three."""
LONG = 30.0
HEAT = 0.05
"""Seconds of the heat of each contender, after the warm-up."""
OUT_OF_THE_RACE = 2.0
"""A rival that is so many times slower than the best one in the heats is not timed further."""


def nothing() -> None:
    """The device has always done its work when a call on the CPU returns."""


def timed(step: Step, wait: Step = nothing) -> float:
    """Seconds of one call, up to the moment when the device has done its work."""
    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


def heat(step: Step, wait: Step) -> float:
    """The seconds that a call takes at least, as far as a short look shows."""
    for _ in range(WARM_UP):
        if timed(step, wait) > LONG / FEWEST:
            break
    end = time.perf_counter() + HEAT
    best = timed(step, wait)
    while time.perf_counter() < end:
        best = min(best, timed(step, wait))
    return best


def race(ours: Step, rivals: dict[str, Step], effort: Effort, wait: Step = nothing) -> Measured:
    """Time ours alternately with each rival, and return the pair with the fastest of them.

    Each side is warmed up by up to three calls, the first of which may compile. With `wait` a
    device is waited for before and after each call.
    """
    mine = heat(ours, wait)
    found = {name: heat(step, wait) for name, step in rivals.items()}
    limit = OUT_OF_THE_RACE * min(found.values())
    good = {name: rivals[name] for name, seconds in found.items() if seconds <= limit}
    round_seconds = sum([mine + found[name] for name in good])
    fewest = FEWEST if FEWEST * round_seconds <= LONG else FEW
    repeats = effort.repeats or min(MOST, max(fewest, int(effort.seconds / round_seconds)))
    samples: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in good}
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            for name, step in good.items():
                samples[name][0].append(timed(ours, wait))
                samples[name][1].append(timed(step, wait))
    finally:
        gc.enable()
    best = min(samples, key=lambda name: min(samples[name][1]))
    return Measured(*samples[best], rival=best)
