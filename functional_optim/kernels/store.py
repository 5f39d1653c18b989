"""The folder where compiled kernels are kept.

A second process neither compiles nor imports a compiler. What lies there is code, so the folder is
its owner's (or the administrator's) alone. `FUNCTIONAL_OPTIM_CACHE` names another, or is `off`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import stat
import sys
import tempfile
import warnings
from pathlib import Path

import torch

VARIABLE = "FUNCTIONAL_OPTIM_CACHE"
DIGEST = 32
"""Bytes of the checksum behind a kept library."""


def folder() -> Path | None:
    """The folder, made if it is missing; None where nothing can or may be kept."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen.lower() == "off":
        return None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return _checked(Path(chosen) if chosen else Path(base) / "functional_optim")


@functools.cache
def _checked(path: Path) -> Path | None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        _refuse(path, f"it cannot be used ({error})")
        return None
    if hasattr(os, "getuid") and found.st_uid not in (0, os.getuid()):
        _refuse(path, "it belongs to somebody else")
        return None
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _refuse(path, "others can write to it; take that right away with chmod go-w")
        return None
    return path


def _refuse(path: Path, why: str) -> None:
    warnings.warn(
        f"functional_optim: compiled kernels are not kept in {path}: {why}. Every process compiles "
        f"its own; set {VARIABLE} to another folder, or to off.",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def machine() -> str:
    """What makes a library fit here: versions, and the processor that it was compiled for."""
    flags = ""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = platform.processor()
    capability = torch.backends.cpu.get_cpu_capability()
    return repr((torch.__version__, torch.version.git_version, sys.platform, capability, flags))


def name_of(*parts: str) -> str:
    """The file name of a library with these fingerprints, for this machine."""
    whole = "\n".join([machine(), str(torch.get_default_dtype()), *parts])
    return hashlib.sha256(whole.encode()).hexdigest()[:40] + ".so"


def find(name: str) -> Path | None:
    """The kept library of a name, if there is one and it is whole."""
    here = folder()
    if here is None:
        return None
    path = here / name
    try:
        content = path.read_bytes()
    except OSError:
        return None
    body, digest = content[:-DIGEST], content[-DIGEST:]
    return path if hashlib.sha256(body).digest() == digest else None


def keep(name: str, library: Path) -> None:
    """Keep a library under a name, whole or not at all."""
    here = folder()
    if here is None:
        return
    body = library.read_bytes()
    try:
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
