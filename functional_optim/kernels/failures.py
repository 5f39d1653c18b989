"""Code that cannot be compiled: a warning, once, or the error of a strict step."""

from __future__ import annotations

from functional_optim.kernels.callers import warn_once
from functional_optim.kernels.private import of_compiler


class NoCompiler(Exception):
    """This machine has no working compiler; the text says why, and what to do."""


def refusal(what: str) -> RuntimeError:
    """The error of a strict step."""
    return RuntimeError(
        f"functional_optim: a strict step must be compiled, but {what}. No parameter was changed. "
        "Fix this, or compile without strict, which falls back with a warning."
    )


def cause(what: str, error: Exception) -> str:
    """Why something is not compiled: what failed, and its error."""
    return str(error) if isinstance(error, NoCompiler) else f"{what} ({line(error)})"


def fallback(what: str, who: str, *, strict: bool) -> None:
    """Warn that `who` runs eagerly because of `what`; if `strict`, raise the error of a strict
    step."""
    if strict:
        raise refusal(what)
    warn_once(f"{what}; {who} eagerly, which is slower")


def warn_failed(what: str, error: Exception, then: str = "") -> None:
    """Warn that something failed, and what is done `then`. Without a compiler, all failures share
    one warning."""
    if isinstance(error, NoCompiler):
        warn_once(f"steps without a kept kernel run eagerly, which is slower: {error}")
    else:
        warn_once(cause(what, error) + then)


def line(error: Exception) -> str:
    """An error in one line, of 300 characters at most; two of its lines if the first ends in ":",
    as torch.compile's do."""
    text = str(error).strip().splitlines()
    if not text:
        return type(error).__name__
    first = " ".join(map(str.strip, text[:2])) if text[0].endswith(":") else text[0]
    short = first if len(first) <= 300 else first[:300].rsplit(" ", 1)[0] + " …"
    return f"{type(error).__name__}: {short}"


def is_compile_error(error: Exception) -> bool:
    """Whether the compiler raised an error, not the compiled code."""
    return (
        isinstance(error, (OSError, NoCompiler))
        or of_compiler(error)
        or is_limit(error)
        or "inductor" in repr(error).lower()
    )


def is_limit(error: Exception) -> bool:
    """Whether torch.compile has reached its limit of graphs for a code object."""
    return "RecompileLimit" in type(error).__name__ or "CacheLimit" in type(error).__name__
