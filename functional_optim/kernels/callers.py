"""Warnings that name the line of the user's code."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_warned: set[str] = set()


def warn_once(message: str, kind: type[Warning] = RuntimeWarning) -> None:
    """Warn, once a process, at the line that has called this package. message: without a period."""
    if message not in _warned:
        _warned.add(message)
        warn(f"functional_optim: {message}.", kind)


def warn(message: str, kind: type[Warning] = RuntimeWarning) -> None:
    """Warn at the line that has called this package."""
    warnings.warn(message, kind, stacklevel=1 + _depth(sys._getframe(1)))


def _depth(frame: FrameType | None) -> int:
    """How many frames down to the first one that is neither this package's nor torch's."""
    depth = 1
    while frame is not None and _is_inner(frame.f_globals.get("__name__", "")):
        frame, depth = frame.f_back, depth + 1
    return depth


def _is_inner(module: str) -> bool:
    return module.partition(".")[0] in ("functional_optim", "torch", "contextlib", "functools")
