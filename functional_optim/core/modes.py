"""Whether torch.compile, a dispatch mode or a transform of torch.func sees operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from functional_optim.kernels.private import differentiated as _differentiated
from functional_optim.kernels.private import dispatch_modes as _modes
from functional_optim.kernels.private import early_dispatch_modes as _early_modes
from functional_optim.kernels.private import transform as _transform

P = ParamSpec("P")
T = TypeVar("T")


def transformed() -> bool:
    """Whether a transform of torch.func, such as vmap, is active."""
    return _transform() is not None


def differentiable(x: torch.Tensor) -> bool:
    """Whether derivatives of what is computed from x may be asked for."""
    if _transform() is None:
        return torch.is_grad_enabled() and x.requires_grad
    return torch.compiler.is_compiling() or _differentiated(x, forward=True)


def recorded() -> bool:
    """Whether a dispatch mode, such as make_fx's, is active."""
    return _modes() > 0 or _early_modes() > 0


def intercepted() -> bool:
    """Whether operations must go through torch's dispatcher.

    A dispatch mode, such as make_fx's, sees only what goes through it, and tensors inside a
    transform of torch.func have no memory: the mode would not see a kernel that reads and writes
    memory directly, and the kernel would find no memory in the transform.
    """
    return _modes() > 0 or _transform() is not None or _early_modes() > 0


def traced() -> bool:
    """Whether values may be unknown: torch.compile is tracing, or operations are intercepted."""
    return torch.compiler.is_compiling() or intercepted()


def with_cpu_as_default(fn: Callable[P, T]) -> Callable[P, T]:
    """A function that runs rules on small tensors of the CPU: tensors that rules make without a
    device are there, too."""

    @wraps(fn)
    def inner(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.get_default_device().type == "cpu":
            return fn(*args, **kwargs)
        with torch.device("cpu"):
            return fn(*args, **kwargs)

    return inner


def _casts(device: str) -> bool:
    """Whether torch.autocast is on. For a device without autocast torch raises an error; traces of
    torch before 2.13 do not support that check."""
    if not torch.compiler.is_compiling() and not torch.amp.is_autocast_available(device):
        return False
    return torch.is_autocast_enabled(device)


def uncast(device: str, fn: Any, *args: Any) -> Any:
    """Call a function with torch.autocast switched off."""
    if not _casts(device):
        return fn(*args)
    with torch.autocast(device, enabled=False):
        return fn(*args)
