"""The hyperparameters of a parameter group, as numbers that two steps can be compared by."""

from __future__ import annotations

from operator import is_not
from typing import Any

from torch import Tensor

PLAIN_NUMBERS = (float, int, bool)


def host_values(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters, those in CPU tensors as Python numbers."""
    return {
        key: _host(value) for key, value in group.items() if key not in ("params", "param_names")
    }


def constants(group: dict[str, Any]) -> dict[str, Any] | None:
    """A group's entries, if none of them can change in place."""
    values = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    inner = [
        x for value in values.values() for x in (value if isinstance(value, tuple) else (value,))
    ]
    return None if any(isinstance(x, (Tensor, list, dict)) for x in inner) else dict(group)


def _host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else value
    if isinstance(value, (tuple, list)):
        parts = tuple([_host(x) for x in value])
        if isinstance(value, list) or type(value) is tuple:  # a list may be edited in place
            return parts
        if any(map(is_not, parts, value)):
            return getattr(value, "_make", tuple)(parts)
    return value  # a transformation is a NamedTuple, too


def changed_values(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The new hyperparameters that differ from the old; all, if they have other names.

    Tensors on other devices always do: their values may change in place.
    """
    if old.keys() != new.keys():
        return new
    return {key: x for key, x in new.items() if not _equal(old[key], x)}


def _equal(x: Any, y: Any) -> bool:
    if x is y:
        return not isinstance(x, Tensor)  # its value may have changed in place
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return False
    if isinstance(x, tuple) and type(x) is type(y):
        return len(x) == len(y) and all(_equal(a, b) for a, b in zip(x, y, strict=True))
    return type(x) is type(y) and bool(x == y)  # 0.1 equals numpy's float32(0.1), and 1 True
