"""The papers' loops, as plainly as they can be written, in numpy and float64.

Each has the name of its algorithm, takes one tensor and its gradients in all steps, and returns
where the tensor is at the end. Algorithms that torch.optim, optax or a package of their authors
have are compared with these instead.
"""

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
