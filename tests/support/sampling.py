"""Parameters of costly tests: some run in `make test`, the rest in `make test-full`."""

from collections.abc import Iterable
from typing import Any

import pytest


def some(values: Iterable[Any], first: int = 1, keep: Iterable[Any] = ()) -> list[Any]:
    """The first values, and those to keep, as they are; all others marked `full`.

    A value may be a tuple, for several parameters, or a `pytest.param`.
    """
    kept, found = list(keep), []
    for i, value in enumerate(values):
        if i >= first and value not in kept:
            own = value if hasattr(value, "marks") else pytest.param(*several(value))
            value = own._replace(marks=[*own.marks, pytest.mark.full])
        found.append(value)
    return found


def several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
