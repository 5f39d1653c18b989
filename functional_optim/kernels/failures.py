"""What is said where something cannot be compiled: a warning, once, or a strict step's error."""

from __future__ import annotations

from functional_optim.kernels.callers import tell_once
from functional_optim.kernels.private import of_compiler


class NoCompiler(Exception):
    """Nothing can be compiled on this machine; the text says why, and what to do."""


def refusal(what: str) -> RuntimeError:
    """The error of a strict step."""
    return RuntimeError(
        f"functional_optim: a strict step must be compiled, but {what}. No parameter was changed. "
        "Fix this, or compile without strict, which falls back with a warning."
    )


def cause(what: str, error: Exception) -> str:
    """Why something is not compiled: what failed, and its error."""
    return str(error) if isinstance(error, NoCompiler) else f"{what} ({line(error)})"


def tell(message: str) -> None:
    """Warn, once a process, at the line that has called this package."""
    tell_once(f"functional_optim: {message}.")


def give_way(what: str, who: str, *, strict: bool) -> None:
    """Warn that somebody runs eagerly, and why; if `strict`, raise the error of a strict step."""
    if strict:
        raise refusal(what)
    tell(f"{what}; {who} eagerly, which is slower")


def tell_failed(what: str, error: Exception, then: str = "") -> None:
    """Warn that something failed, and what is done `then`; without a compiler there is one warning
    for all of that."""
    if isinstance(error, NoCompiler):
        tell(f"steps without a kept kernel run eagerly, which is slower: {error}")
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
