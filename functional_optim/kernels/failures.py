"""What is said where something cannot be compiled: a warning, once, or a strict step's error."""

from __future__ import annotations

import warnings

from functional_optim.core.private import of_compiler
from functional_optim.kernels.compiler import NoCompiler

_told: set[str] = set()


def refusal(what: str) -> RuntimeError:
    """The error of a strict step."""
    return RuntimeError(
        f"functional_optim: a strict step must be compiled, but {what}. Nothing was stepped; put "
        "this right, or compile without strict, which falls back with a warning."
    )


def cause(what: str, error: Exception) -> str:
    """Why something is not compiled: what failed, and its error."""
    return str(error) if isinstance(error, NoCompiler) else f"{what} ({line(error)})"


def tell(message: str) -> None:
    """Warn, once a process."""
    if message not in _told:
        _told.add(message)
        warnings.warn(f"functional_optim: {message}.", RuntimeWarning, stacklevel=4)


def tell_failed(what: str, error: Exception, then: str = "") -> None:
    """Warn that something failed, and what is done `then`; without a compiler there is one warning
    for all of that."""
    if isinstance(error, NoCompiler):
        tell(f"steps run eagerly, and take longer, where no compiled kernel is kept: {error}")
    else:
        tell(cause(what, error) + then)


def line(error: Exception) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def is_compile_error(error: Exception) -> bool:
    """Does an error come from compiling, not from what was compiled?"""
    return (
        isinstance(error, (OSError, NoCompiler))
        or of_compiler(error)
        or is_limit(error)
        or "inductor" in repr(error).lower()
    )


def is_limit(error: Exception) -> bool:
    """Has torch.compile made as many graphs of a code object as it will?"""
    return "RecompileLimit" in type(error).__name__ or "CacheLimit" in type(error).__name__
