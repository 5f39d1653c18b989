"""Kernels for other processors than this one, by ISA levels.

A kernel is compiled for the processor on which it is cached. For other machines, or for a wheel, it
is compiled for an ISA level that many processors have. Such a kernel is used if the cache has no
better one.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path
from typing import NamedTuple

PREBUILT = Path(__file__).parent.parent / "prebuilt"
"""The folder of the kernels in a wheel; only wheels for one kind of machine have any."""

VARIABLE = "FUNCTIONAL_OPTIM_LEVEL"
"""The environment variable with the level for which to compile, instead of this processor."""


class Level(NamedTuple):
    """An ISA level: what a processor must support.

    name: of the compiler's -march. features: as Linux lists them.
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
    """The levels that this processor supports, the best first."""
    return [x for x in LEVELS if x.features <= features()]


def chosen() -> Level | None:
    """The level for which this process compiles; None: its own processor.

    Raises:
        ValueError: for an unknown level, or one that this processor does not support.
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
