"""The papers' loops, as plainly as they can be written, in numpy and float64.

Each has the name of its algorithm. A loop whose first argument is `p` steps one tensor, one whose
first argument is `params` a list of tensors; the second argument is the gradients of all steps. It
returns where the parameters are at the end.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

LOOPS: dict[str, Callable[..., Any]] = {
    name: thing
    for module in pkgutil.iter_modules(__path__)
    for name, thing in vars(importlib.import_module(f"{__name__}.{module.name}")).items()
    if inspect.isfunction(thing) and not name.startswith("_")
}
"""All of them, by the names of their algorithms."""
