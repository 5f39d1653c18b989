"""The folder where compiled kernels are kept.

A second process neither compiles nor imports a compiler. What lies there is code, so the folder is
its owner's (or the administrator's) alone. `FUNCTIONAL_OPTIM_CACHE` names another, or is `off`.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import platform
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from functional_optim.kernels.callers import warn_once
from functional_optim.kernels.isa_levels import PREBUILT

log = logging.getLogger("functional_optim")

VARIABLE = "FUNCTIONAL_OPTIM_CACHE"
NAME = re.compile(r"[0-9a-f]{40}(-[0-9a-f]{8})?(\.\w+)?")
"""What is kept has such a name; all else in the folder is left alone."""

DIGEST = 32
"""Bytes of the checksum at the end of a cached library."""

PATIENCE, NOTICED = 60.0, 2.0
"""Seconds to wait for another process that builds the same kernel, and until the log says so."""

ABANDONED = 3600.0
"""Seconds after which a file that was not finished is taken for a killed process's."""

LARGEST = 512 * 2**20
"""Bytes that may be kept: above, what was used least recently is removed. A kernel has 20 kB."""

OLDEST = 90 * 86400.0
"""Seconds without use after which a kernel is removed."""

NOTED = 86400.0
"""Seconds until a use is noted again, as the time of the last change."""


def folder() -> Path | None:
    """The folder, made if it is missing; None where nothing can or may be kept."""
    here, why = _usable()
    if why:
        _refuse(_wanted(), why)
    return here


def _usable() -> tuple[Path | None, str]:
    """The folder, or why none is used: nothing is said before there is something to keep."""
    return (None, "") if _is_off() else _checked(_wanted())


def _wanted() -> Path:
    chosen = os.environ.get(VARIABLE, "")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(chosen or f"{base}/functional_optim")


def _is_off() -> bool:
    return os.environ.get(VARIABLE, "").lower() == "off"


@functools.cache
def _checked(path: Path) -> tuple[Path | None, str]:
    """The folder, or why it is not used."""
    try:
        path = path.expanduser().absolute()
        for part in (*reversed(path.parents), path):
            if not part.is_dir():
                part.mkdir(mode=0o700, exist_ok=True)
        above = [(parent, parent.stat().st_mode) for parent in path.resolve().parents]
        found = path.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        return None, f"it cannot be used ({error})"
    open_above = [p for p, mode in above if mode & stat.S_IWOTH and not mode & stat.S_ISVTX]
    if found.st_uid not in (0, os.getuid()):
        return None, "it belongs to somebody else"
    if not _is_private(found):
        return None, "others can write to it; take that right away with chmod go-w"
    if open_above:
        return None, f"others can replace it, as everybody can write to {open_above[0]}"
    return path, ""


def _is_private(found: os.stat_result) -> bool:
    """Can only this user, or the administrator, have written there?"""
    mine = found.st_uid in (0, os.getuid())
    return mine and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _refuse(path: Path, why: str) -> None:
    warn_once(
        f"compiled kernels are not kept in {path}: {why}. Every process compiles its own; set "
        f"{VARIABLE} to another folder, or to off"
    )


def name_of(*parts: str, suffix: str) -> str:
    """A file name for what these parts say, on machines of this kind."""
    whole = "\n".join([sys.platform, platform.machine(), *parts])
    return hashlib.sha256(whole.encode()).hexdigest()[:40] + suffix


def find(name: str) -> Path | None:
    """The kept file of a name, or the package's own, if there is one and it is whole.

    name: may be a pattern, of which any file will do.
    """
    if _is_off():
        return None
    here, _ = _usable()
    kept = [] if here is None else [x for x in here.glob(name) if _is_ours(x)]
    shipped = PREBUILT.glob(name)
    return next((x for x in (*kept, *shipped) if _is_whole(x)), None)


def _is_ours(path: Path) -> bool:
    """Whether nobody else can have put a file into the folder; its use is noted."""
    try:
        found = path.stat()
    except OSError:  # another process removed it
        return False
    if found.st_mtime < time.time() - NOTED:
        with suppress(OSError):  # a folder that is only read
            os.utime(path)
    return _is_private(found)


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]


def read(name: str) -> bytes | None:
    """What `keep` was given under this name; None if it is not there, or not whole."""
    path = find(name)
    if path is not None:
        with suppress(OSError):  # another process removed it
            return path.read_bytes()[:-DIGEST]
    return None


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
def build_lock(name: str, *, wait: bool = True) -> Iterator[bool]:
    """Lock the library of this name: no other process builds it, unless this takes a minute.

    The operating system releases the lock of a process that is killed. wait: for another process
    that holds it. Yields False if the other process still holds it.
    """
    here, _ = _usable()
    path = Path() if here is None else here / f"{name}.lock"
    try:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError:  # there is no folder, or one that is only read, which needs no locks
        yield True
        return
    locked, owner = False, os.getpid()
    try:
        locked = _locked(handle, PATIENCE if wait else 0.0)
        yield locked
    finally:
        if locked and os.getpid() == owner:  # not in a fork, whose parent builds it
            with suppress(OSError):
                path.unlink()
            fcntl.flock(handle, fcntl.LOCK_UN)  # also of forks, which have the same handle
        os.close(handle)


def _locked(handle: int, patience: float) -> bool:
    begun, quiet = time.monotonic(), True
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            waited = time.monotonic() - begun
            if waited >= patience:
                return False
            if quiet and waited > NOTICED:
                quiet = False
                log.info("waiting for another process, which is compiling the same kernel")
            time.sleep(0.02)
        except OSError:  # a file system without locks
            return False
