"""The folder where compiled kernels are kept.

A second process neither compiles nor imports a compiler. What lies there is code, so the folder is
its owner's (or the administrator's) alone. `FUNCTIONAL_OPTIM_CACHE` names another, or is `off`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from functional_optim.kernels import levels

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

VARIABLE = "FUNCTIONAL_OPTIM_CACHE"
NAME = re.compile(r"[0-9a-f]{40}(\.\w+)?")
"""What is kept has such a name; all else in the folder is left alone."""

DIGEST = 32
"""Bytes of the checksum behind a kept library."""

PATIENCE = 60.0
"""Seconds to wait for another process that builds the same kernel."""

ABANDONED = 3600.0
"""Seconds after which a file that was not finished is taken for a killed process's."""

LARGEST = 512 * 2**20
"""Bytes that may be kept: above, what was used least recently is removed. A kernel has 0.1 MB."""

OLDEST = 90 * 86400.0
"""Seconds without use after which a kernel is removed."""

NOTED = 86400.0
"""Seconds until a use is noted again, as the time of the last change."""

_refused: set[Path] = set()


def folder() -> Path | None:
    """The folder, made if it is missing; None where nothing can or may be kept."""
    if _is_off():
        return None
    chosen = os.environ.get(VARIABLE, "")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _checked(Path(chosen or f"{base}/functional_optim"))


def _is_off() -> bool:
    return os.environ.get(VARIABLE, "").lower() == "off"


@functools.cache
def _checked(path: Path) -> Path | None:
    try:
        path = path.expanduser().absolute()
        for part in (*reversed(path.parents), path):
            if not part.is_dir():
                part.mkdir(mode=0o700, exist_ok=True)
        above = [(parent, parent.stat().st_mode) for parent in path.resolve().parents]
        found = path.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        _refuse(path, f"it cannot be used ({error})")
        return None
    if hasattr(os, "getuid"):
        open_above = [p for p, mode in above if mode & stat.S_IWOTH and not mode & stat.S_ISVTX]
        if found.st_uid not in (0, os.getuid()):
            _refuse(path, "it belongs to somebody else")
            return None
        if not _is_private(found):
            _refuse(path, "others can write to it; take that right away with chmod go-w")
            return None
        if open_above:
            _refuse(path, f"others can replace it, as everybody can write to {open_above[0]}")
            return None
    return path


def _is_private(found: os.stat_result) -> bool:
    """Can only this user, or the administrator, have written there?"""
    if not hasattr(os, "getuid"):
        return True
    mine = found.st_uid in (0, os.getuid())
    return mine and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _refuse(path: Path, why: str) -> None:
    if path in _refused:
        return
    _refused.add(path)
    warnings.warn(
        f"functional_optim: compiled kernels are not kept in {path}: {why}. Every process compiles "
        f"its own; set {VARIABLE} to another folder, or to off.",
        RuntimeWarning,
        stacklevel=2,
    )


def told() -> list[str]:
    """What the environment tells Inductor that its code may depend on: nothing of caches."""
    return sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("TORCHINDUCTOR_")
        and "CACHE" not in name
        and name != "TORCHINDUCTOR_COMPILE_THREADS"
    )


@functools.cache
def machine() -> str:
    """What makes a library fit here: versions, the processor that it was compiled for, and what the
    environment tells Inductor."""
    level = levels.chosen()
    if level is not None:
        return levels.described(level) + "".join(told())
    versions = torch.__version__, torch.version.git_version, sys.implementation.cache_tag
    capability = torch.backends.cpu.get_cpu_capability()
    here = sys.platform, platform.machine(), capability, levels.processor(), told()
    return repr((*versions, *here))


def name_of(*parts: str, suffix: str = ".so") -> str:
    """The file name of a library with these fingerprints, for this machine."""
    return _named(machine(), parts, suffix)


def names_of(*parts: str, suffix: str = ".so") -> list[str]:
    """The file names under which such a library may be kept, the best first: for this machine, and
    for levels of processors, unless the environment tells Inductor something."""
    own = name_of(*parts, suffix=suffix)
    if told() or levels.chosen():
        return [own]
    return [own, *[_named(levels.described(x), parts, suffix) for x in levels.fitting()]]


def _named(machine: str, parts: Sequence[str], suffix: str) -> str:
    whole = "\n".join([machine, str(torch.get_default_dtype()), *parts])
    return hashlib.sha256(whole.encode()).hexdigest()[:40] + suffix


def find(name: str) -> Path | None:
    """The kept library of a name, or the package's own, if there is one and it is whole."""
    if _is_off():
        return None
    here = folder()
    kept = None if here is None else _found(here / name)
    shipped = levels.PREBUILT / name
    return kept or (shipped if _is_whole(shipped) else None)


def _found(path: Path) -> Path | None:
    """A library of the folder, if nobody else can have put it there; its use is noted."""
    try:
        found = path.stat()
    except OSError:
        return None
    if not _is_private(found) or not _is_whole(path):
        return None
    with suppress(OSError):  # a folder that is only read
        if found.st_mtime < time.time() - NOTED:
            os.utime(path)
    return path


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]


def read(name: str) -> bytes | None:
    """What `keep` was given under this name; None if it is not there, or not whole."""
    path = find(name)
    return None if path is None else path.read_bytes()[:-DIGEST]


def keep(name: str, body: bytes) -> None:
    """Keep a library, or what one is made from, under a name, whole or not at all."""
    here = folder()
    if here is None:
        return
    try:
        _tidy(here)
        handle, temporary = tempfile.mkstemp(dir=here, prefix="new-")
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(body + hashlib.sha256(body).digest())
            Path(temporary).replace(here / name)
        except BaseException:
            Path(temporary).unlink()
            raise
    except OSError as error:
        _refuse(here, f"writing failed ({error})")


class KeptKernel(NamedTuple):
    """A file of the folder. size: bytes. used: when it was last used, to a day, in seconds since
    1970."""

    path: Path
    size: int
    used: float


def kept(here: Path) -> list[KeptKernel]:
    """What a folder keeps, the most recently used first."""
    found = []
    for path in here.iterdir():
        if NAME.fullmatch(path.name):
            with suppress(OSError):  # another process was faster
                status = path.stat()
                found.append(KeptKernel(path, status.st_size, status.st_mtime))
    return sorted(found, key=lambda file: -file.used)


def prune(here: Path, largest: float = LARGEST, oldest: float = OLDEST) -> list[KeptKernel]:
    """Remove what was not used for `oldest` seconds, and what is more than `largest` bytes; give
    what was removed. A process that has loaded a library keeps it."""
    whole, removed, since = 0, list[KeptKernel](), time.time() - oldest
    for file in kept(here):
        whole += file.size
        if whole > largest or file.used < since:
            with suppress(OSError):
                file.path.unlink()
                removed.append(file)
    return removed


def _tidy(here: Path) -> None:
    """Remove what killed processes left, and what is too old or too much."""
    prune(here)
    for path in (*here.glob("new-*"), *here.glob("*.lock")):
        with suppress(OSError):  # another process was faster
            if path.stat().st_mtime < time.time() - ABANDONED:
                path.unlink()


@contextmanager
def turn(name: str | None, *, wait: bool = True) -> Iterator[bool]:
    """Inside, no other process builds the library of this name, unless it takes a minute.

    The lock is the operating system's: it goes with a process that is killed. wait: for another
    process that builds it. Gives False if one does, still.
    """
    here = None if name is None or fcntl is None else folder()
    path = None if here is None else here / f"{name}.lock"
    handle = None
    if path is not None:
        try:
            handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError:  # a folder that is only read needs no turns
            path = None
    try:
        locked = handle is None or _locked(handle, PATIENCE if wait else 0.0)
        if not locked:
            path = None
        yield locked
    finally:
        if path is not None:
            with suppress(OSError):
                path.unlink()
        if handle is not None:
            os.close(handle)


def _locked(handle: int, patience: float) -> bool:
    assert fcntl is not None
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
        except OSError:  # a file system without locks
            return False
