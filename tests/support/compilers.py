"""Kernels and C++ compilers for tests of how kernels are built."""

import ctypes
import time
from pathlib import Path
from typing import Any, NamedTuple

from functional_optim.kernels import callers, disk_cache, libraries, toolchain
from functional_optim.kernels.print_cpp import SYMBOL

REAL = (toolchain.command() or [""])[0]
"""The compiler of this machine."""


class Text(NamedTuple):
    """What a library is built from."""

    text: str
    outputs: int = 0


def source(number: int) -> Any:
    """What a library is built from whose function returns a number."""
    return Text(f'extern "C" long {SYMBOL}(const void*) {{ return {number}; }}\n')


def answer(native: Any) -> int:
    """What the function of such a library returns."""
    native.call.restype = ctypes.c_long
    return native.call(None)


def forget(monkeypatch: Any) -> None:
    """As if this process had built no library, tried no compiler, and warned of nothing."""
    monkeypatch.setattr(libraries, "_built", {})
    monkeypatch.setattr(callers, "_warned", set())
    monkeypatch.setattr(toolchain, "_known", {})
    disk_cache._checked.cache_clear()


class Compiler:
    """The C++ compiler behind a script that notes its runs, for CXX.

    folder: where both are. does: lines of shell that run before it.
    """

    def __init__(self, folder: Path, does: str = "") -> None:
        self.path = folder / "compiler"
        self.log = folder / "runs"
        self.log.touch()
        self.path.write_text(
            f'#!/bin/sh\necho "begin $$ $*" >> {self.log}\n{does}\n{REAL} "$@"\ncode=$?\n'
            f'echo "end $$" >> {self.log}\nexit $code\n'
        )
        self.path.chmod(0o700)

    def runs(self, word: str = "begin") -> list[str]:
        """The lines of what has begun, or come to its end."""
        return [line for line in self.log.read_text().splitlines() if line.startswith(word)]

    def kernels(self) -> int:
        """How many kernels it has begun to build."""
        return sum("-O3" in line for line in self.runs())

    def wait(self, count: int = 1) -> set[int]:
        """The process groups of its runs, once there are so many."""
        until = time.monotonic() + 60
        while len(self.runs()) < count:
            assert time.monotonic() < until
            time.sleep(0.01)
        return {int(line.split()[1]) for line in self.runs()}


def running(groups: set[int]) -> list[int]:
    """The processes of these groups that still run; one that nobody has waited for does not."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it ended while we looked
            continue
        if int(group) in groups and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def gone(groups: set[int]) -> bool:
    """Whether all processes of these groups end; on a busy machine that may take a while."""
    until = time.monotonic() + 30
    while running(groups) and time.monotonic() < until:
        time.sleep(0.05)
    return not running(groups)
