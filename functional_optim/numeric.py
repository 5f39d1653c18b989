"""Arithmetic on numbers that are Python floats in one place and float64 tensors in another.

A rule's `scalars` is written once. The optimizer object and the engine call it with Python floats
(a step costs no tensor operation), a traced or vmapped update calls it with 0-dim float64 tensors.
These helpers do the same in both, always in float64: `torch.where(c, 0.0, 0.9)`,
`torch.as_tensor(0.9)` and a power of an integer tensor would silently compute in float32.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor

Number: TypeAlias = "float | Tensor"
"""A Python number or a 0-dim tensor."""

Schedule: TypeAlias = Callable[[Any], Any]
"""A function from the number of finished steps (0 at the first) to a number."""

Hyper: TypeAlias = "float | Tensor | Schedule"
"""A hyperparameter: a number, a 0-dim tensor, or a schedule."""


def float64(x: Any) -> Any:
    """x as a Python float or, if it is a tensor, as a 0-dim float64 tensor."""
    if isinstance(x, Tensor):
        return x.to(torch.float64).reshape(())
    return float(x)


def at(hyper: Hyper, t: Number) -> Any:
    """The value of a hyperparameter at step t (t = 1 at the first step; a schedule gets t - 1)."""
    return float64(hyper(t - 1) if callable(hyper) else hyper)


def is_static(x: Any) -> TypeGuard[float]:
    """Is x a Python number, so that its value may choose the graph?"""
    return isinstance(x, (bool, int, float))


def is_zero(x: Any) -> bool:
    """Is x the Python number 0? A tensor or a schedule never is: its value may change."""
    return is_static(x) and x == 0


def where(condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, else b."""
    if isinstance(condition, Tensor):
        return torch.where(condition, _tensor(a, condition), _tensor(b, condition))
    return a if condition else b


def maximum(a: Any, b: Any) -> Any:
    """The larger of two numbers."""
    tensor = _first_tensor(a, b)
    return max(a, b) if tensor is None else torch.maximum(_tensor(a, tensor), _tensor(b, tensor))


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two numbers."""
    tensor = _first_tensor(a, b)
    return min(a, b) if tensor is None else torch.minimum(_tensor(a, tensor), _tensor(b, tensor))


def clip(x: Any, low: Any, high: Any) -> Any:
    """x, but not below `low` and not above `high`."""
    return minimum(maximum(x, low), high)


def sqrt(x: Any) -> Any:
    """The square root."""
    return float64(x).sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def cos(x: Any) -> Any:
    """The cosine of x radians."""
    return float64(x).cos() if isinstance(x, Tensor) else math.cos(x)


def log(x: Any) -> Any:
    """The natural logarithm."""
    return float64(x).log() if isinstance(x, Tensor) else math.log(x)


def floor(x: Any) -> Any:
    """The largest whole number that is not above x."""
    return float64(x).floor() if isinstance(x, Tensor) else float(math.floor(x))


def power(x: Any, y: Any) -> Any:
    """x to the power of y, x ≥ 0 or y whole; infinite where float64 ends, as tensors have it."""
    tensor = _first_tensor(x, y)
    if tensor is not None:
        return torch.pow(_tensor(x, tensor), _tensor(y, tensor))
    try:
        return float(x) ** y
    except OverflowError:
        return math.inf


def lerp(a: Any, b: Any, x: Any) -> Any:
    """The number at x on the way from a (x = 0) to b (x = 1), exact at both ends."""
    tensor = _first_tensor(a, b, x)
    if tensor is not None:
        return torch.lerp(_tensor(a, tensor), _tensor(b, tensor), _tensor(x, tensor))
    return a + x * (b - a) if x < 0.5 else b - (1 - x) * (b - a)


def like(x: Any, example: Any) -> Any:
    """x in float64: as a tensor if it or the example is one, else as a Python float."""
    if isinstance(x, Tensor) or not isinstance(example, Tensor):
        return float64(x)
    return _tensor(x, example)


def rounded(x: Any) -> Any:
    """x as it would be kept in a state: rounded to `storage_dtype`, then widened again."""
    if isinstance(x, Tensor):
        return x.to(storage_dtype()).to(torch.float64)
    return x if storage_dtype() is torch.float64 else ctypes.c_float(x).value


def storage_dtype() -> torch.dtype:
    """The dtype of numbers kept in a state, as torch.optim has it: float32, or float64 if that is
    torch's default dtype, or inside `storing_wide`."""
    if getattr(_local, "wide", False):
        return torch.float64
    return torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32


def stored(x: Any, device: torch.device | None = None) -> Tensor:
    """x as a 0-dim tensor in the dtype of states."""
    if isinstance(x, Tensor):
        return x.to(device=device, dtype=storage_dtype()).reshape(())
    return torch.full((), x, dtype=storage_dtype(), device=device)


class storing_wide:
    """Inside, numbers are kept in float64: for a state that somebody has given such numbers."""

    def __enter__(self) -> None:
        _local.wide = True

    def __exit__(self, *error: object) -> None:
        _local.wide = False


class trusting:
    """Inside, `check` lets everything pass, if `on`."""

    def __init__(self, on: bool = True) -> None:
        self.on = on

    def __enter__(self) -> None:
        self.before, _local.trusting = _trusts(), self.on or _trusts()

    def __exit__(self, *error: object) -> None:
        _local.trusting = self.before


_local = threading.local()


def _trusts() -> bool:
    return getattr(_local, "trusting", False)


def check(ok: Callable[[Any], bool], value: Any, message: str) -> None:
    """Raise ValueError if a Python number is out of range; tensors and schedules pass.

    `{}` in the message stands for the value: formatting a tensor here would break a trace.

    Raises:
        TypeError: for what can never be a number.
    """
    if value is None or isinstance(value, (str, bytes)):
        raise TypeError(
            f"a hyperparameter must be a number, a 0-dim tensor or a schedule, but got {value!r}."
        )
    if is_static(value) and not ok(value) and not _trusts():
        raise ValueError(message.format(value))


def _first_tensor(*values: Any) -> Tensor | None:
    for value in values:
        if isinstance(value, Tensor):
            return value
    return None


def _tensor(x: Any, like: Tensor) -> Tensor:
    if isinstance(x, Tensor):
        return x.to(torch.float64)
    return torch.full((), x, dtype=torch.float64, device=like.device)
