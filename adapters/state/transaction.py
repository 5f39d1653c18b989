"""Atomic changes of an optimizer object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from functional_optim.kernels.interrupts import held

T = TypeVar("T")


def transaction(optimizer: torch.optim.Optimizer, change: Callable[..., T], *args: Any) -> T:
    """Call a function that loads or adds parameter groups; undo its changes if it raises an error.

    Restored are the optimizer's attributes (among them `state` and `param_groups`, which loading
    replaces), the list of its groups and the entries of its `defaults`. Tensors and the entries of
    a group or of a parameter's state are not copied: the function must replace them, not write to
    them. KeyboardInterrupt counts as an exception, and the undoing is not interrupted.
    """
    attributes = dict(vars(optimizer))
    groups, defaults = optimizer.param_groups, optimizer.defaults
    before = list(groups), dict(defaults)

    def undo() -> None:
        own = vars(optimizer)
        own.update(attributes)
        for name in own.keys() - attributes.keys():
            del own[name]
        groups[:] = before[0]
        defaults.clear()
        defaults.update(before[1])

    try:
        return change(*args)
    except BaseException:
        try:
            held(undo)
        finally:
            held(undo)  # again, if another interrupt came before it was held back
        raise
