"""Arithmetic on scalars that may be Python floats or float64 tensors.

A rule's `scalars` is written once. The optimizer object and the engine call it with Python floats
(a step costs no tensor operation), a traced or vmapped update calls it with 0-dim float64 tensors.
These functions compute the same for both, always in float64: `torch.where(c, 0.0, 0.9)`,
`torch.as_tensor(0.9)` and a power of an integer tensor would silently compute in float32.

Both follow IEEE 754; Python's functions drop a NaN (`max(1.0, nan)` is 1.0) or raise errors
(`math.sqrt(-1.0)`, `0.0 ** -1`). The sign of the larger or smaller of 0.0 and -0.0 may be either.

Example::

    >>> import math, torch
    >>> from functional_optim import numeric
    >>> def scalars(t, lr=0.1, betas=(0.9, 0.99)):  # t counts the steps, from 1
    ...     beta1, beta2 = numeric.pair(betas, "betas", "(0.9, 0.99)")
    ...     warm = numeric.lerp(0.1, 1.0, numeric.minimum(numeric.divide(t, 10), 1.0))
    ...     correction = numeric.sqrt(1 - numeric.power(beta2, t))
    ...     return numeric.where(t > 1, lr * warm * correction, lr), 1 - beta1
    >>> [round(float(scalars(t)[0]), 6) for t in (5.0, torch.tensor(5.0, dtype=torch.float64))]
    [0.012176, 0.012176]
    >>> numeric.sqrt(-1.0), numeric.log(0.0), numeric.maximum(1.0, math.nan)
    (nan, -inf, nan)
    >>> numeric.cos(math.inf), numeric.floor(-0.5), numeric.clip(math.inf, 0.0, 1.0)
    (nan, -1.0, 1.0)
    >>> numeric.float64(torch.ones(1))
    tensor(1., dtype=torch.float64)
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor

__all__ = [
    "Hyper", "NotANumber", "Number", "Schedule", "at", "check", "check_count", "clip", "cos",
    "divide", "equals", "float64", "floor", "is_zero", "lerp", "like", "log", "maximum", "minimum",
    "pair", "power", "sqrt", "triple", "where",
]  # fmt: skip
"""Functions for writing rules; the others are for running them."""

Number: TypeAlias = "float | Tensor"
"""A Python number or a 0-dim tensor."""

Schedule: TypeAlias = Callable[[Any], Any]
"""A function from the number of finished steps (0 at the first step) to a number."""

Hyper: TypeAlias = "float | Tensor | Schedule"
"""A hyperparameter: a number, a 0-dim tensor, or a schedule."""


def float64(x: Any) -> Any:
    """x as a Python float or, if it is a tensor, as a 0-dim float64 tensor."""
    if isinstance(x, Tensor):
        return x.to(torch.float64).reshape(())
    if not isinstance(x, (float, int)):
        kind = getattr(getattr(x, "dtype", None), "kind", "f")  # of numpy
        if isinstance(x, (str, bytes, bytearray, complex)) or kind in "cSU":  # that float() reads
            raise TypeError(f"expected a real number, but got {x!r}.")
    return float(x)


def at(hyper: Hyper, t: Number) -> Any:
    """The value of a hyperparameter at step t (t = 1 at the first step; a schedule gets t - 1).

    Raises:
        NotANumber: if it is not a single number.

    Example::

        >>> import functional_optim as fo
        >>> lr = fo.schedules.linear(0.1, 0.0, 10)
        >>> fo.numeric.at(lr, 1), fo.numeric.at(lr, 6), fo.numeric.at(0.1, 6)
        (0.1, 0.05, 0.1)
    """
    value = hyper(t - 1) if callable(hyper) else hyper
    if type(value) is float:
        return value
    if type(value) is Placeholder:
        return value.read()
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return float64(value)
    else:
        try:
            return float64(value)
        except (TypeError, ValueError):
            pass
    raise NotANumber(hyper, value)


class NotANumber(TypeError):
    """A hyperparameter is not a number, or its schedule has returned no number.

    Example::

        >>> from functional_optim import numeric
        >>> print(numeric.NotANumber(None, None, "lr"))
        the hyperparameter lr is None; it must be a number, a 0-dim tensor or a schedule.
    """

    def __init__(self, hyper: Any, value: Any, name: str = "") -> None:
        self.hyper = hyper
        self.value = value
        shape = f" of shape {(*value.shape,)} in {value.dtype}" if isinstance(value, Tensor) else ""
        what = f"a {type(value).__name__}{shape}" if value is not None else "None"
        if callable(hyper):
            whose = f"the schedule of {name}" if name else "a schedule"
            text = f"{whose} returned {what}; it must return a number or a 0-dim tensor."
        else:
            whose = f"the hyperparameter {name}" if name else "a hyperparameter"
            text = f"{whose} is {what}; it must be a number, a 0-dim tensor or a schedule."
        super().__init__(text)

    def among(self, known: Iterable[tuple[str, Any]]) -> NotANumber:
        """The same error, with the name of the hyperparameter if it is one of these."""
        for name, hyper in known:
            if hyper is self.hyper:
                return NotANumber(hyper, self.value, name)
        return self


class Placeholder:
    """A placeholder for a Python number that may change at the next step.

    An optimizer object passes it instead of a hyperparameter, so that a new learning rate needs no
    new transformation. `at` reads the number, `equals` compares it, and `check` accepts it; all
    other uses that depend on the number raise an error.

    now: the number. readable: whether `at` may read it; False while the transformation is being
    built. equal: for each number that it was compared with, whether they are equal. refused:
    whether a use has raised an error.
    """

    def __init__(self, now: float) -> None:
        self.now = now
        self.readable = False
        self.equal: dict[float, bool] = {}
        self.refused = False

    def read(self) -> float:
        """The current number."""
        return float(self.now) if self.readable else self.refuse()

    def suits(self, value: Any) -> bool:
        """Whether all comparisons of the number have the same results for this value."""
        if type(value) is not type(self.now):
            return False
        return all((value == x) is equal for x, equal in self.equal.items())

    def refuse(self, *args: Any) -> Any:
        """Raise TypeError for a use whose result may change with the number."""
        self.refused = True
        raise TypeError(
            "this number may change at each step, so a transformation must not depend on it; read "
            "it with functional_optim.numeric.at in the scalars of a rule."
        )


def _refuse_what_numbers_can_do() -> None:
    refuse = Placeholder.refuse
    kept = {*vars(Placeholder), "__class__", "__new__", "__getattribute__", "__setattr__"}
    kept |= {"__init_subclass__", "__subclasshook__"}
    for name in {*dir(int), *dir(float)} - kept:
        setattr(Placeholder, name, refuse if name.startswith("__") else property(refuse))


_refuse_what_numbers_can_do()


def is_static(x: Any) -> TypeGuard[float]:
    """Is x a Python number, so that its value may select the graph?"""
    if type(x) is Placeholder:
        x.refuse()
    return isinstance(x, (bool, int, float))


def equals(x: Any, number: float) -> bool:
    """Is x this Python number? A tensor or a schedule never is: its value may change.

    Example::

        >>> import torch
        >>> from functional_optim import numeric
        >>> def raised(x, p):  # no operation where p is 1 and cannot change
        ...     return x if numeric.equals(p, 1) else x.pow(p)
        >>> raised(torch.tensor([3.0]), 1), raised(torch.tensor([3.0]), torch.tensor(2.0))
        (tensor([3.]), tensor([9.]))
    """
    if type(x) is Placeholder:
        return x.equal.setdefault(number, x.now == number)
    return is_static(x) and x == number


def is_zero(x: Any) -> bool:
    """Is x the Python number 0?

    Example::

        >>> import functional_optim as fo
        >>> def decay(weight_decay):  # no rule, and no work, if there is none
        ...     none = fo.numeric.is_zero(weight_decay)
        ...     return fo.identity() if none else fo.add_decayed_weights(weight_decay)
        >>> decay(0.0), decay(fo.schedules.linear(0.0, 0.1, 10))
        (chain(), chain(add_decayed_weights))
    """
    return equals(x, 0)


def where(condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, else b."""
    if isinstance(condition, Tensor):
        return torch.where(condition, _tensor(a, condition), _tensor(b, condition))
    return a if condition else b


def maximum(a: Any, b: Any) -> Any:
    """The larger of two numbers; NaN if one of them is."""
    tensor = _first_tensor(a, b)
    if tensor is None:
        return a if a >= b or a != a else b
    return torch.maximum(_tensor(a, tensor), _tensor(b, tensor))


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two numbers; NaN if one of them is."""
    tensor = _first_tensor(a, b)
    if tensor is None:
        return a if a <= b or a != a else b
    return torch.minimum(_tensor(a, tensor), _tensor(b, tensor))


def clip(x: Any, low: Any, high: Any) -> Any:
    """x, but not below `low` and not above `high`; NaN if one of them is."""
    return minimum(maximum(x, low), high)


def sqrt(x: Any) -> Any:
    """The square root, whose derivative at 0 is 0; NaN of a negative number."""
    if isinstance(x, Tensor):
        null = (x := float64(x)) == 0
        return torch.where(null, x.detach(), x.masked_fill(null, 1.0).sqrt())
    return math.sqrt(x) if x >= 0 else math.nan


def cos(x: Any) -> Any:
    """The cosine of x radians; NaN of an infinite number."""
    if isinstance(x, Tensor):
        return float64(x).cos()
    return math.cos(x) if abs(x) < math.inf else math.nan


def log(x: Any) -> Any:
    """The natural logarithm; −inf of 0, and NaN of a negative number."""
    if isinstance(x, Tensor):
        return float64(x).log()
    if x > 0:
        return math.log(x)
    return -math.inf if x == 0 else math.nan


def floor(x: Any) -> Any:
    """The largest integer not above x; infinities and NaN stay unchanged."""
    if isinstance(x, Tensor):
        return float64(x).floor()
    return x // 1.0 if abs(x) < math.inf else float(x)


def divide(a: Any, b: Any) -> Any:
    """a / b; infinite or NaN where b is 0."""
    tensor = _first_tensor(a, b)
    if tensor is not None:
        return _tensor(a, tensor) / _tensor(b, tensor)
    if b != 0:
        return a / b
    return math.nan if a == 0 or a != a else math.copysign(1, a) * math.copysign(math.inf, b)


def power(x: Any, y: Any) -> Any:
    """x to the power of y; NaN for a negative x and a non-integer y."""
    tensor = _first_tensor(x, y)
    if tensor is not None:
        return torch.pow(_tensor(x, tensor), _tensor(y, tensor))
    try:
        result = float(x) ** y
    except (OverflowError, ZeroDivisionError):
        if x < 0 and y % 1:
            return math.nan
        return math.copysign(math.inf, x) if y % 2 == 1 else math.inf
    return math.nan if isinstance(result, complex) else result


def lerp(a: Any, b: Any, x: Any) -> Any:
    """Linear interpolation from a (x = 0) to b (x = 1), exact at both ends."""
    tensor = _first_tensor(a, b, x)
    if tensor is not None:
        return torch.lerp(_tensor(a, tensor), _tensor(b, tensor), _tensor(x, tensor))
    return a + x * (b - a) if abs(x) < 0.5 else b - (1 - x) * (b - a)


def like(x: Any, example: Any) -> Any:
    """x in float64: as a tensor if it or the example is one, else as a Python float.

    Example::

        >>> import torch, functional_optim as fo
        >>> fo.numeric.like(10, example=2.0), fo.numeric.like(10, example=torch.ones(()))
        (10.0, tensor(10., dtype=torch.float64))
    """
    if isinstance(x, Tensor) or not isinstance(example, Tensor):
        return float64(x)
    return _tensor(x, example)


def rounded(x: Any) -> Any:
    """x as a state would store it: rounded to `storage_dtype`, then widened again."""
    if isinstance(x, Tensor):
        return x.to(storage_dtype()).to(torch.float64)
    return x if storage_dtype() is torch.float64 else ctypes.c_float(x).value


def storage_dtype() -> torch.dtype:
    """The dtype of scalars in a state, as in torch.optim: float32, or float64 if that is torch's
    default dtype, or under `storing_wide`."""
    if getattr(_local, "wide", False):
        return torch.float64
    return torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32


def carry_dtype(first: Any) -> torch.dtype:
    """The dtype of a carried scalar: float64 for a count, which starts from an int.

    float32 represents integers up to 2^24; a count would stop there.
    """
    return torch.float64 if type(first) is int else storage_dtype()


def stored(x: Any, device: torch.device | None = None, *, dtype: torch.dtype | None = None) -> Any:
    """x as a 0-dim tensor in the dtype of states, or in `dtype`; an int in float64."""
    dtype = carry_dtype(x) if dtype is None else dtype
    if isinstance(x, Tensor):
        return x.to(device=device, dtype=dtype, copy=True).reshape(())  # x may be written to
    try:
        return torch.full((), x, dtype=dtype, device=device or "cpu")
    except RuntimeError:  # torch refuses a Python number that is too large for float32
        return torch.full((), ctypes.c_float(x).value, dtype=dtype, device=device or "cpu")


def storing_wide(fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function that stores scalars in float64, without rounding them.

    Not a context manager: an interrupt could leave its `__exit__` before the first line.
    """
    before = getattr(_local, "wide", False)
    try:
        _local.wide = True
        return fn(*args)
    finally:
        _local.wide = before


def trusting(on: bool, fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function; `check` accepts every value during the call, if `on`."""
    before = _trusts()
    try:
        _local.trusting = on or before
        return fn(*args)
    finally:
        _local.trusting = before


_local = threading.local()


def _trusts() -> bool:
    return getattr(_local, "trusting", False)


def check(ok: Callable[[Any], bool], value: Any, message: str) -> None:
    """Raise ValueError if a Python number is out of range; tensors and schedules are accepted.

    `{}` in the message stands for the value: formatting a tensor here would break a trace.

    Raises:
        TypeError: if x is not a number, a tensor or a schedule.

    Example::

        >>> from functional_optim import numeric
        >>> numeric.check(lambda x: 0 <= x < 1, 1.5, "beta must be in [0, 1), but is {}.")
        Traceback (most recent call last):
        ValueError: beta must be in [0, 1), but is 1.5.
    """
    if type(value) is Placeholder:
        return
    if value is None or isinstance(value, NO_NUMBERS):
        raise TypeError(
            f"a hyperparameter must be a number, a 0-dim tensor or a schedule, but got {value!r}."
        )
    if is_static(value) and not ok(value) and not _trusts():
        raise ValueError(message.format(value))


NO_NUMBERS = (str, bytes, list, tuple, dict, torch.optim.lr_scheduler.LRScheduler)

RANGES: dict[str, Callable[[Any], bool]] = {
    "in [0, 1)": lambda x: 0 <= x < 1,
    "in [0, 1]": lambda x: 0 <= x <= 1,
    "in (0, 1]": lambda x: 0 < x <= 1,
    "in (0, 1)": lambda x: 0 < x < 1,
    "of 0 or more": lambda x: x >= 0,
    "of 1 or more": lambda x: x >= 1,
    "that is a whole number of 1 or more": lambda x: x >= 1 and x % 1 == 0,
    "above 0": lambda x: x > 0,
    "positive": lambda x: x > 0,
}
"""Ranges of hyperparameters, by their descriptions in error messages."""


def check_range(who: str | None, words: str, **values: Any) -> None:
    """`check` the range that `words` names in RANGES. who: None for the message of torch.optim."""
    for name, x in values.items():
        an = name[0] in "aeiou" or name.split("_")[0] in ("lr", "r", "s", "l2", "rtol")
        what = f"a positive {name}" if words == "positive" else f"a{'n' * an} {name} {words}"
        torchs = f"Invalid {'epsilon' if name == 'eps' else name} value: {{}}"
        check(RANGES[words], x, torchs if who is None else f"{who} needs {what}, but got {{}}.")


def check_least(who: str, least: int, **values: Any) -> None:
    """`check` that hyperparameters are at least as large as a number."""
    for name, x in values.items():
        check(lambda x: x >= least, x, f"{who} needs {name} of at least {least}, but got {{}}.")


def check_count(who: str, least: int, **counts: Any) -> None:
    """Raise ValueError unless each of `counts` is an integer of at least `least`.

    Example::

        >>> from functional_optim import numeric
        >>> numeric.check_count("my_average", 1, every=0.5)
        Traceback (most recent call last):
        ValueError: my_average needs a whole number of 1 or more for every, but got 0.5.
    """
    for name, x in counts.items():
        whole = type(x) is int or (isinstance(x, Integral) and not isinstance(x, bool))
        if not whole or x < least:
            raise ValueError(
                f"{who} needs a whole number of {least} or more for {name}, but got {x!r}."
            )


def pair(values: Any, name: str, example: str) -> tuple[Any, Any]:
    """The two values of a hyperparameter that is a pair.

    Raises:
        TypeError: if it is not a pair.
    """
    if _has(2, values):
        return values[0], values[1]
    raise TypeError(f"{name} must be a pair of numbers, e.g. {example}, but got {values!r}.")


def triple(values: Any, name: str, example: str) -> tuple[Any, Any, Any]:
    """The three values of a hyperparameter that is a triple.

    Raises:
        TypeError: if it is not a triple.

    Example::

        >>> import functional_optim as fo
        >>> fo.numeric.triple((0.98, 0.92, 0.99), "betas", "(0.98, 0.92, 0.99)")
        (0.98, 0.92, 0.99)
    """
    if _has(3, values):
        return values[0], values[1], values[2]
    raise TypeError(f"{name} must be three numbers, e.g. {example}, but got {values!r}.")


def _has(count: int, values: Any) -> bool:
    several = isinstance(values, (tuple, list)) or (isinstance(values, Tensor) and values.dim())
    return bool(several) and len(values) == count


def _first_tensor(*values: Any) -> Tensor | None:
    return next((x for x in values if isinstance(x, Tensor)), None)


def _tensor(x: Any, like: Tensor) -> Tensor:
    if isinstance(x, Tensor):
        return x.to(torch.float64)
    return torch.full((), x, dtype=torch.float64, device=like.device)
