"""Kernels for other processors than this one, by levels of instructions.

A kernel is compiled for the very processor that it is kept on. For other machines, or for a wheel,
it is compiled for a level that many processors have; it is looked for where nothing better is kept.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path
from typing import NamedTuple

PREBUILT = Path(__file__).parent.parent / "prebuilt"
"""Where a wheel has the kernels that it brings; only wheels for one kind of machine have any."""

VARIABLE = "FUNCTIONAL_OPTIM_LEVEL"
"""In the environment: the level that this process compiles for, instead of for its processor."""


class Level(NamedTuple):
    """What a processor must have.

    name: as the compiler's -march knows it. features: as Linux lists them.
    """

    name: str
    features: frozenset[str]


_V3 = frozenset("abm avx avx2 bmi1 bmi2 f16c fma movbe xsave".split())  # noqa: SIM905
_V4 = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())  # noqa: SIM905

LEVELS = (Level("x86-64-v4", _V4), Level("x86-64-v3", _V3))
"""The best first (x86-64 psABI, https://gitlab.com/x86-psABIs/x86-64-ABI, table 3.1)."""


@functools.cache
def features() -> frozenset[str]:
    """The instructions that this processor has."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            found = next((x for x in lines if x.startswith(("flags", "Features"))), "")
    except OSError:
        found = platform.processor()
    return frozenset(found.partition(":")[2].split() or [found])


def fitting() -> list[Level]:
    """The levels that this processor has, the best first."""
    return [x for x in LEVELS if x.features <= features()]


def chosen() -> Level | None:
    """The level that this process compiles for; None for its own processor.

    Raises:
        ValueError: if there is no such level, or this processor cannot try its kernels.
    """
    name = os.environ.get(VARIABLE, "")
    for level in fitting():
        if level.name == name:
            return level
    if not name:
        return None
    known = ", ".join([level.name for level in LEVELS])
    here = ", ".join([level.name for level in fitting()]) or "none of them"
    raise ValueError(
        f"{VARIABLE} is {name!r}, which is no level that this machine has. The levels are {known}; "
        f"this machine has {here}, and must have a level to try the kernels that it builds."
    )
