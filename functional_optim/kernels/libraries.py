"""Libraries that are built once: in this process by their text, on disk by its digest."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from functional_optim.kernels import disk_cache, toolchain, watch
from functional_optim.kernels.failures import NoCompiler, cause, refusal, warn_failed
from functional_optim.kernels.interrupts import held, let_through
from functional_optim.kernels.print_cpp import SYMBOL, Source


class Text(NamedTuple):
    """What a library is built from, if it is called otherwise than as a `Source` says."""

    text: str


class Native:
    """A loaded library.

    name: under which it is kept. found: it was kept before, and not built by this process. source:
    what it was built from, which says how it is to be called.
    """

    def __init__(self, path: Path, source: Source, name: str, *, found: bool) -> None:
        self.name = name
        self.found = found
        self.source = source
        library = ctypes.CDLL(str(path))
        self.call = getattr(library, SYMBOL)
        self.call.restype = None
        self.call.argtypes = [ctypes.c_void_p]
        self.address: Any = ctypes.cast(self.call, ctypes.c_void_p).value


_built: dict[str, Native | None] = {}
"""Libraries by their texts; None for one that is not available."""
_lock = threading.RLock()


def _in_a_fork() -> None:
    """Begin without the lock, which another thread of the parent may hold."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_in_a_fork)


def _loaded(path: Path, source: Source) -> Native:
    name = toolchain.name_of(source.text)
    native = Native(path, source, name, found=False)
    disk_cache.keep(name, path.read_bytes())
    return native


def library(wanted: Source, *, strict: bool = False) -> Native | None:
    """A library; None if it is not available.

    strict: raise if it cannot be built, also if that has failed before.

    Raises:
        RuntimeError: if `strict`, and building it fails.
    """
    text = wanted.text
    if text not in _built or (strict and _built[text] is None):
        with _lock:
            if text not in _built or (strict and _built[text] is None):
                _built[text] = let_through(partial(_made, wanted, strict))
    return _built[text]


def prefetch(every: Sequence[Source]) -> None:
    """Build what is missing of some libraries at once, for `library`.

    Nothing is said of what cannot be built: `library` tries it again. What another process is
    building is left to it, until `library` asks.
    """
    if len({x.text for x in every if x.text not in _built}) > 1:
        with _lock, suppress(Exception):
            missing = {x.text: x for x in every if x.text not in _built}
            let_through(partial(_take, [*missing.values()], wait=False))


def count() -> int:
    """How many libraries this process has asked for: what a test of recompilation counts."""
    return len(_built)


def _made(wanted: Source, strict: bool) -> Native | None:
    try:
        _take([wanted], wait=True)
    except Exception as error:
        why = toolchain.trouble()
        found = NoCompiler(why) if why else error
        if strict:
            raise refusal(cause("no kernel can be built here", found)) from error
        warn_failed("no kernel can be built here", found)
        return None
    return _built[wanted.text]


def _take(sources: Sequence[Source], *, wait: bool) -> None:
    """Load libraries that are kept, and build the others.

    wait: for other processes that build one of them.
    """
    kept: dict[str, Native] = {}
    missing: list[Source] = []
    with ExitStack() as locks:
        for source in sources:
            native = _kept(source)
            if native is None:
                name = toolchain.name_of(source.text)
                if not locks.enter_context(disk_cache.build_lock(name, wait=wait)) and not wait:
                    continue
                native = _kept(source)
            if native is None:
                missing.append(source)
            else:
                kept[source.text] = native
        _build(missing)
    _built.update(kept)  # now: after an interrupt `watch` is begun again with them


def _build(sources: Sequence[Source]) -> None:
    """Build libraries together with that of `watch`, and keep them.

    Raises:
        Exception: if the compiler fails.
    """
    beside = list(filter(None, [watch.missing()]))
    jobs = [*beside, *[toolchain.kernel(x.text) for x in sources]]
    if not jobs:
        return
    count = len(sources)
    # an interrupt that is held back until then leaves no compiler that nobody knows
    with suppress(*(() if sources else (OSError, NoCompiler))):
        build = held(toolchain.Build, jobs, f"{count} kernel{'s' * (count != 1)}")
        try:
            if beside:  # first: an interrupt here leaves the kernels missing, too
                with suppress(RuntimeError, OSError, NoCompiler):  # nobody has to have it
                    watch.take(build.finish(0), keep=True)
                watch.tried = True
            for i, source in enumerate(sources, len(beside)):
                _built[source.text] = _loaded(build.finish(i), source)
        finally:
            build.close()


def _kept(source: Source) -> Native | None:
    for pattern in toolchain.names_of(source.text):
        path = disk_cache.find(pattern)
        if path is not None:
            with suppress(OSError, AttributeError):  # one that this system cannot load
                return Native(path, source, path.name, found=True)
    return None
