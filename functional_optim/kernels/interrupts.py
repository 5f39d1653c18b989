"""Ctrl-C during a step: what must not be torn is run with the interrupt held back.

Python runs a signal's handler in the main thread, between two bytecodes, so a KeyboardInterrupt may
come after any call. A step that is interrupted between its writes and its count would leave
parameters moved and the step not counted.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_signal: Any = importlib.import_module("_signal")
"""The module in C: signal.signal looks up an enum's member, which takes ten times as long."""

_replaced: list[Any] = []
"""The handlers that `held` has put aside, those of outer calls first."""


def held(fn: Callable[..., T], *args: Any) -> T:
    """Call a function; an interrupt that comes meanwhile is delivered when it has returned.

    Nothing is held back in another thread, which gets no interrupts, where the handler of SIGINT is
    not a Python function, and in a graph. Costs half a microsecond.
    """
    if torch.compiler.is_compiling():
        return fn(*args)
    handler = _signal.getsignal(signal.SIGINT)
    if not callable(handler) or not _in_main_thread():
        return fn(*args)
    waiting: dict[int, Any] = {}
    outer = len(_replaced)
    # `setdefault` is a handler in C, which only notes the signal: once it is there, no line can be
    # left by an interrupt but those after it was replaced again.
    try:
        _signal.signal(signal.SIGINT, waiting.setdefault)
        _replaced.append(handler)
        return fn(*args)
    finally:
        del _replaced[outer:]
        _put_back(handler)
        if waiting:
            handler(*waiting.popitem())


def let_through(fn: Callable[..., T], *args: Any) -> T:
    """Call a function that writes nothing and may take long; inside `held`, interrupts reach it."""
    if not _replaced or not _in_main_thread():
        return fn(*args)
    noting = _signal.getsignal(signal.SIGINT)
    try:
        _signal.signal(signal.SIGINT, _replaced[0])
        return fn(*args)
    finally:
        _signal.signal(signal.SIGINT, noting)


def _put_back(handler: Any) -> None:
    try:
        _signal.signal(signal.SIGINT, handler)
    except BaseException:  # another signal's handler, such as an alarm's, raised before the change
        _signal.signal(signal.SIGINT, handler)
        raise


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
