"""Conditions for loading a value, and their error messages."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

MOST = 8
"""Largest number of names in one line of an error."""
LINES = 12
"""Largest number of faults in an error, one on each line."""


def kind(x: Any) -> str:
    """The kind of a number or of the elements of a tensor: bool, int, float or complex."""
    if isinstance(x, Tensor):
        if x.dtype is torch.bool:
            return "bool"
        if x.is_complex():
            return "complex"
        return "float" if x.is_floating_point() else "int"
    return type(x).__name__


def misfit(found: Any, like: Any) -> str | None:
    """Why a saved value cannot replace `like`, as "is …, but …"; None if it can.

    Shapes must be equal, and the kinds of numbers: a float32 may replace a bfloat16, an integer may
    not.
    """
    if not isinstance(like, Tensor):
        same = kind(found) == kind(like) and (not isinstance(found, Tensor) or not found.dim())
        return None if same else f"is a {described(found)}, but it needs a {described(like)}"
    if not isinstance(found, (Tensor, bool, int, float, complex)):
        return f"is a {described(found)}, but it needs a tensor of shape {tuple(like.shape)}"
    if isinstance(found, Tensor) and found.layout is not like.layout:
        return f"is a tensor of {found.layout}, but it needs {like.layout}"
    shape = tuple(found.shape) if isinstance(found, Tensor) else ()
    if shape != tuple(like.shape):
        return f"has shape {shape}, but it needs {tuple(like.shape)}"
    if kind(found) != kind(like):
        return f"is a {described(found)}, but it needs a {kind(like)}"
    return None


def not_a_number(found: Any, *, whole: bool) -> str | None:
    """Why a saved value is not a step count (whole) or carried scalar; None if it is one."""
    if isinstance(found, Tensor) and found.numel() == 1 and kind(found) in ("float", "int"):
        value: Any = found.detach().item()
    elif isinstance(found, (int, float)) and not isinstance(found, bool):
        value = found
    else:
        return f"is a {described(found)}, but it needs one real number"
    if whole and not (value >= 0 and value == value // 1):  # NaN and infinity are neither
        return f"is {value}, but it needs the number of finished steps"
    return None


def described(x: Any) -> str:
    """A value in few words, for an error."""
    if isinstance(x, Tensor):
        return f"tensor of {str(x.dtype).removeprefix('torch.')}, shape {tuple(x.shape)}"
    return type(x).__name__


def near(name: str, others: Collection[str]) -> str:
    """A name, followed by the most similar of the others, if there is one."""
    close = difflib.get_close_matches(name, others, n=1, cutoff=0.75)
    return f"{name} (near: {close[0]})" if close else name


def listed(names: Iterable[str]) -> str:
    """A list of names, with a count of those after the first few."""
    every = list(names)
    more = f", … {len(every) - MOST} more" if len(every) > MOST else ""
    return ", ".join(every[:MOST]) + more


def refuse(what: str, faults: Sequence[str], advice: str) -> None:
    """Raise one ValueError for all faults of saved or loaded values, if there are any."""
    more = [f"… {len(faults) - LINES} more"] if len(faults) > LINES else []
    if faults:
        lines = "".join([f"\n  {fault}" for fault in [*faults[:LINES], *more]])
        raise ValueError(f"{what} does not fit:{lines}\n{advice[0].upper()}{advice[1:]}.")
