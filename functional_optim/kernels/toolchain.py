"""The C++ compiler: which one, with which flags, and libraries that it is building.

Nothing of torch's compiler is imported, and no header of torch is read: a kernel takes 0.2 s. The
flags suit g++ and clang, which passes over those that it does not know.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from functional_optim.kernels import disk_cache, isa_levels
from functional_optim.kernels.failures import NoCompiler
from functional_optim.kernels.interrupts import held

NAMES = ("g++", "clang++", "c++")
"""The compilers that are looked for, unless the environment variable CXX names another."""

SHARED = ("-shared", "-fPIC", "-w")

# Products and sums are rounded as the text says. What only tells of errors, such as errno, would
# keep loops from being vectorised; what peels a loop for alignment makes its results depend on it.
# Unswitching makes a loop for each case of a choice by a number, some of which g++ leaves scalar.
FLAGS = (
    *("-O3", "-std=c++17", *SHARED, "-fno-exceptions", "-fopenmp-simd", "-ffp-contract=off"),
    *("-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-fno-unswitch-loops"),
    "--param=vect-max-peeling-for-alignment=0",
)

WAITED = ((2.0, logging.INFO), (30.0, logging.WARNING))
"""After how many seconds of a build the log says so, at which level."""

LONGEST = 300.0
"""Seconds after which a compiler that has not answered is given up."""

LINKER_FAILED = ("ld returned", "linker command failed")
"""What g++ and clang say below the lines of the linker, in which there may be no "error"."""

log = logging.getLogger("functional_optim")

_known: dict[tuple[str, ...], str] = {}
"""Why a compiler does not work, of those that were tried; empty for one that does."""


class Job(NamedTuple):
    """A library that is to be built: its text, and the compiler's flags."""

    text: str
    flags: Sequence[str]


def kernel(text: str) -> Job:
    """The library of a kernel."""
    return Job(text, (*FLAGS, *target(isa_levels.chosen())))


def target(level: isa_levels.Level | None) -> list[str]:
    """The flags for a level of processors; None: for this one."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return ["-mcpu=native"]
    has = isa_levels.features() if level is None else level.features
    wide = ["-mprefer-vector-width=512"] if "avx512f" in has else []
    return [f"-march={'native' if level is None else level.name}", *wide]


def name_of(text: str) -> str:
    """Under which a kernel is kept that is built here: with the compiler, if there is one."""
    return f"{digest(text, isa_levels.chosen())}-{_identity()}.so"


def names_of(text: str) -> list[str]:
    """The patterns of names under which a kernel may be kept, the best first: for this processor,
    and for levels, whose kernels any compiler may have built."""
    level = isa_levels.chosen()
    rest = [] if level else [f"{digest(text, x)}-*.so" for x in isa_levels.fitting()]
    return [name_of(text), *rest]


def digest(text: str, level: isa_levels.Level | None) -> str:
    """What a kernel is known by: its text, the flags, and the processors that can run it."""
    processor = sorted(isa_levels.features()) if level is None else []
    return disk_cache.name_of(text, *FLAGS, *target(level), *processor, suffix="")


def _identity() -> str:
    """A digest of the compiler, as far as its file tells; any compiler if there is none."""
    words = command()
    if not words:
        return "*"
    status = Path(words[0]).stat()
    whole = repr((words, status.st_size, status.st_mtime_ns))
    return hashlib.sha256(whole.encode()).hexdigest()[:8]


def command() -> list[str]:
    """The compiler, as a command; empty if there is none."""
    named = os.environ.get("CXX")
    for name in NAMES if named is None else [named]:
        words = shlex.split(name)
        found = shutil.which(words[0]) if words else None
        if found is not None:
            return [str(Path(found).absolute()), *words[1:]]
    return []


def trouble() -> str:
    """Why nothing can be compiled here, and what to do; empty if the compiler works."""
    words = tuple(command())
    if words:
        if words not in _known:
            _known[words] = _trial(words)
        return _known[words]
    named = os.environ.get("CXX")
    looked = "CXX is empty" if named == "" else f"looked for {named or ', '.join(NAMES)}"
    return (
        f"there is no C++ compiler ({looked}); install g++, or name another in the environment "
        "variable CXX, or copy kernels that python -m functional_optim.warmup has compiled on a "
        "machine like this one"
    )


def require() -> None:
    """Go on only if there is a C++ compiler that works.

    Raises:
        NoCompiler: otherwise.
    """
    if why := trouble():
        raise NoCompiler(why)


def _trial(words: Sequence[str]) -> str:
    """Why a compiler does not build one line; empty if it does."""
    try:
        build = Build([Job('extern "C" int one() { return 1; }\n', SHARED)], "one line")
        try:
            path = build.finish(0)
            return "" if ctypes.CDLL(str(path)).one() == 1 else "what it builds is wrong"
        finally:
            build.close()
    except NoCompiler as error:
        return str(error)
    except OSError as error:
        if error.errno is not None and error.filename != words[0]:
            return (
                f"the compiler's files cannot be written ({error}); make room there, or name "
                "another folder in the environment variable TMPDIR"
            )
        why = "what it builds is no library" if error.errno is None else str(error)
    except (RuntimeError, AttributeError) as error:
        why = str(error)
    return f"the C++ compiler {' '.join(words)} does not work here ({why})"


class Build:
    """Libraries that are being built, each by a separate process, in a temporary folder.

    what: is built, for the log.

    Raises:
        NoCompiler: if there is none.
        OSError: if no file can be written.
    """

    def __init__(self, jobs: Sequence[Job], what: str) -> None:
        self.words = tuple(command())
        if not self.words or _known.get(self.words):
            raise NoCompiler(trouble())
        self.jobs = jobs
        self.what = what
        self.since: float | None = None
        self.waited = list(WAITED)
        self.folder = Path(tempfile.mkdtemp(prefix="functional_optim-"))
        self.processes: list[subprocess.Popen[str]] = []
        self.close = weakref.finalize(self, _clear, self.folder, self.processes, os.getpid())
        try:
            for _ in range(os.cpu_count() or 1):
                self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Start the next process, if there is one left."""
        i = len(self.processes)
        if i == len(self.jobs):
            return
        job, source = self.jobs[i], f"{i}.cpp"
        (self.folder / source).write_text(job.text)
        self.processes.append(
            subprocess.Popen(
                [*self.words, *job.flags, source, "-o", f"{i}.so"],
                cwd=self.folder,
                env={**os.environ, "TMPDIR": str(self.folder), "LC_ALL": "C"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # the compiler proper is a process of its driver's
            )
        )

    def finish(self, i: int) -> Path:
        """Wait for a library.

        Raises:
            RuntimeError: if the compiler fails.
        """
        while len(self.processes) <= i:
            held(self._start)
        process = self.processes[i]
        said = self._said(process)
        held(self._start)
        if process.returncode:
            raise RuntimeError(_fault(said) or f"exit {process.returncode}")
        return self.folder / f"{i}.so"

    def _said(self, process: subprocess.Popen[str]) -> str:
        self.since = self.since or time.monotonic()
        while True:
            until = self.waited[0][0] if self.waited else LONGEST
            try:
                left = self.since + until - time.monotonic()
                return process.communicate(timeout=max(left, 0.0))[0]
            except subprocess.TimeoutExpired:
                if not self.waited:
                    compiler = f"the C++ compiler {' '.join(self.words)}"
                    _known[self.words] = f"{compiler} has not answered for {LONGEST:.0f} s"
                    raise NoCompiler(_known[self.words]) from None
                _, level = self.waited.pop(0)
                here = disk_cache.folder()
                kept = "not kept" if here is None else f"kept in {here}"
                log.log(level, "compiling %s, %s (%.0f s so far)", self.what, kept, until)


def _fault(said: str) -> str:
    """The line that tells why a compiler has failed: not that the linker has, but why."""
    lines = said.splitlines()
    own = [x for x in lines if not any(words in x for words in LINKER_FAILED)] or lines
    told = [x for x in own if "error" in x.lower()] or [x for x in own if "failed" in x] or own
    return told[0].strip()[:200] if told else ""


def _clear(folder: Path, processes: list[Any], owner: int) -> None:
    if os.getpid() != owner:  # a fork, in which neither is its own
        return
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
    shutil.rmtree(folder, ignore_errors=True)
