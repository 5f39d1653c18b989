"""Whether torch.compile, a dispatch mode or a transform of torch.func sees operations."""

from __future__ import annotations

import torch

_modes = torch._C._len_torch_dispatch_stack
_early_modes = torch._ops._len_torch_dispatch_stack_pre_dispatch
_functorch = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]

function_modes = torch._C._len_torch_function_stack
"""How many modes, such as that of a default device, see calls of torch's functions."""


def transformed() -> bool:
    """Whether a transform of torch.func, such as vmap, is active."""
    return _functorch() is not None


def intercepted() -> bool:
    """Whether operations must go through torch's dispatcher.

    A dispatch mode, such as make_fx's, sees only what goes through it, and tensors inside a
    transform of torch.func have no memory of their own: a kernel that reads and writes memory
    directly would be missed by the one, and find nothing in the other.
    """
    return _modes() > 0 or _functorch() is not None or _early_modes() > 0


def traced() -> bool:
    """Whether values may be unknown: torch.compile is tracing, or operations are intercepted."""
    return torch.compiler.is_compiling() or intercepted()
