"""Whether there is a C++ compiler that works.

Without one, every way of compiling a kernel would fail in turn, each with its own warning and pages
of Inductor's log. So each asks here first, and reports its failure here: the user gets one warning.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import subprocess

from functional_optim.kernels import building, watch
from functional_optim.kernels.tracing import quiet

TRIAL = '#include <omp.h>\nextern "C" int threads() { return omp_get_max_threads(); }\n'

UNWRITTEN = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
}
"""What the operating system says where a file cannot be written, or has no folder to be in."""

_trouble: list[str] = []
"""Why the compiler builds nothing, once that is known."""


class NoCompiler(Exception):
    """Nothing can be compiled on this machine; the text says why, and what to do."""


def require() -> None:
    """Go on only if there is a C++ compiler, and it has not been found to be of no use.

    Raises:
        NoCompiler: otherwise.
    """
    if why := _trouble[0] if _trouble else _absence():
        raise NoCompiler(why)


def explained(error: Exception) -> Exception:
    """What has kept a kernel from being built: `error`, or that the compiler builds nothing."""
    if isinstance(error, NoCompiler):
        return error
    try:
        require()
        said = _trial() or _unwritten(error)
    except NoCompiler as found:
        return found
    except Exception as failed:  # an interface that has moved
        said = _unwritten(failed)
    if said:
        _trouble.append(said)
        return NoCompiler(said)
    return error


def _absence() -> str:
    """Why there is no compiler; empty if there is one."""
    try:
        with quiet():
            from torch._inductor import config
            from torch._inductor.cpp_builder import get_cpp_compiler
            from torch._inductor.exc import InvalidCxxCompiler
    except Exception as error:  # a first import makes folders; a second one would say nonsense
        if why := _unwritten(error):
            _trouble.append(why)
            return why
        raise
    try:
        return _strange(get_cpp_compiler())
    except (InvalidCxxCompiler, OSError):  # OSError: it may not be run
        named = config.cpp.cxx
    names = [x for x in (named if isinstance(named, (tuple, list)) else [named]) if x]
    looked = f"{', '.join(names)} was looked for" if names else "CXX is empty"
    return (
        f"there is no C++ compiler ({looked}); install g++, or name another in the environment "
        "variable CXX, or copy kernels that python -m functional_optim.warmup has compiled on a "
        "machine like this one"
    )


@functools.cache
def _strange(compiler: str) -> str:
    """Why a program is no compiler, as it does not tell its version; empty if it does."""
    if subprocess.run([compiler, "--version"], capture_output=True).stdout.strip():
        return ""
    return f"{compiler} is not a C++ compiler: it prints nothing for --version; name one in CXX"


def _unwritten(error: Exception) -> str:
    """What to do where the compiler's files cannot be written; empty if something else is wrong."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, OSError):
        inner = getattr(inner, "inner_exception", None) or inner.__cause__
    if inner is None or inner.errno not in UNWRITTEN:
        return ""
    return (
        f"the compiler's files cannot be written ({inner}); make room there, or name other folders "
        "in the environment variables TMPDIR and TORCHINDUCTOR_CACHE_DIR"
    )


def _trial() -> str:
    """Why the compiler does not build three lines; empty if it does."""
    scratch = watch.Scratch()
    try:
        process, built = building.start(TRIAL, scratch)
        said, _ = process.communicate()
        if process.returncode == 0:
            try:
                ctypes.CDLL(str(built)).threads()
                return ""
            except (OSError, AttributeError) as error:
                said = f"error: what it builds is no library: {error}"
        lines = [x for x in said.splitlines() if "error" in x.lower()] or said.splitlines()
        lacks = "omp.h" in said or "lomp" in said
        needs = "; clang needs OpenMP's header and library, libomp-dev" if lacks else ""
        why = lines[0].strip()[:200] if lines else f"exit status {process.returncode}"
        return f"the C++ compiler does not work here ({why}){needs}"
    finally:
        scratch.remove()
