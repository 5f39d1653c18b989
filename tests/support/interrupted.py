"""A Ctrl-C at every place of a step at which Python would deliver one."""

import gc
import inspect
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from helpers import assert_same, clone

from functional_optim import numeric
from functional_optim.core import modes
from functional_optim.kernels import interrupts


def interrupt(fn: Callable[[], Any], at: int, name: str = "") -> tuple[bool, bool]:
    """Call a function and interrupt it once: was there a KeyboardInterrupt, was the place reached?

    Python runs the handler of a signal where a function is entered, and when one in C has returned.
    name: count only the places where a function in C of this name has returned.
    """
    seen = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal seen
        generator = frame.f_code.co_flags & inspect.CO_GENERATOR  # "called" to be closed, too
        back = event == "c_return" and (not name or argument.__name__ == name)
        if back or (event == "call" and not generator and not name):
            seen += 1
            if seen == at:
                signal.raise_signal(signal.SIGINT)

    raised = False
    sys.setprofile(profile)
    try:
        fn()
    except KeyboardInterrupt:
        raised = True
    finally:
        sys.setprofile(None)
    return raised, seen >= at


def flags() -> tuple[Any, ...]:
    """All that a step changes for its time, and puts back."""
    return (
        *(torch.is_grad_enabled(), numeric._trusts(), numeric.storage_dtype(), gc.isenabled()),
        *(modes.intercepted(), signal.getsignal(signal.SIGINT), list(interrupts._replaced)),
    )


def check_every_place(make: Callable[[], Any], stride: int = 1, name: str = "") -> int:
    """Interrupt a step at every place, or every so many: it is before or after, and goes on.

    make: a new step and what reads all that it writes. Returns how many places there were.
    """
    step, read = make()
    known = [clone(read())]
    for _ in range(3):
        step()
        known.append(clone(read()))
    usual = flags()
    places, reached = 1, True
    befores = 0
    while reached:
        step, read = make()
        raised, reached = interrupt(step, places, name)
        assert flags() == usual, f"left changed at {places}"
        assert raised == reached, f"swallowed at {places}"
        done = 1 if not raised or is_same(read(), known[1]) else 0
        befores += not done
        assert_same(read(), known[done])
        for i in range(done + 1, 4):
            step()
            assert_same(read(), known[i])
        places += stride
    assert befores > 0
    return places


def is_same(a: Any, b: Any) -> bool:
    try:
        assert_same(a, b)
    except (AssertionError, ValueError):
        return False
    return True
