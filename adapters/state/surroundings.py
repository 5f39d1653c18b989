"""What surrounds a method of an optimizer object: torch.inference_mode, and wrappers of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def outlives_inference(groups: list[dict[str, Any]]) -> bool:
    """Whether torch.inference_mode is on, and parameters can also be written outside of it."""
    return torch.is_inference_mode_enabled() and not any(
        p.is_inference() for group in groups for p in group["params"]
    )


@contextmanager
def outside_inference() -> Iterator[None]:
    """Make tensors that can still be written when a surrounding torch.inference_mode has ended."""
    with ExitStack() as modes_of_torch:
        if torch.is_inference_mode_enabled():
            modes_of_torch.enter_context(torch.inference_mode(False))
            modes_of_torch.enter_context(torch.no_grad())
        yield


def without_compiler(method: Any, *args: Any) -> Any:
    """Call a method of torch's Optimizer.

    torch hides some methods from its compiler by a wrapper whose import takes a second. A step that
    is not being compiled does not need the wrapper.
    """
    hidden = method.__func__
    by_torch = hidden.__globals__["__name__"].startswith("torch.")  # and not by another library
    if torch.compiler.is_compiling() or not (by_torch and hasattr(hidden, "__wrapped__")):
        return method(*args)
    return hidden.__wrapped__(method.__self__, *args)
