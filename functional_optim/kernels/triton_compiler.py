"""Triton's compiler, for the text of a kernel."""

from __future__ import annotations

import itertools
import linecache
import warnings
from typing import Any

from functional_optim.kernels.triton_primitives import KernelText

OPTIONS = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
"""Of Triton: a fused product and sum would be rounded once, where torch rounds twice; and
libdevice flushes subnormal numbers to zero unless a flag forbids it."""

_numbered = itertools.count()


def compiled(text: KernelText, target: Any) -> Any:
    """The kernel of a text, compiled by Triton for a target."""
    import triton
    from triton.compiler import ASTSource

    source = ASTSource(function_of(text), text.types, {}, {})
    with warnings.catch_warnings():  # Triton uses deprecated forms in its own code
        warnings.simplefilter("ignore", DeprecationWarning)
        return triton.compile(source, target=target, options={"num_warps": text.warps, **OPTIONS})


def function_of(text: KernelText) -> Any:
    """The function of a text, which Triton can read again."""
    path = f"<functional_optim kernel {next(_numbered)}>"
    lines = text.text.splitlines(keepends=True)
    linecache.cache[path] = (len(text.text), None, lines, path)
    space: dict[str, Any] = {"__name__": path}
    exec(compile(text.text, path, "exec"), space)
    return space[text.name]
