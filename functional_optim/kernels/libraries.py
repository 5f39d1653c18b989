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
_pending: dict[str, PendingBuild] = {}
"""Libraries that are being built."""
_lock = threading.RLock()


def _in_a_fork() -> None:
    """Begin without the builds of the parent, one of whose other threads may hold the lock."""
    global _lock
    _lock = threading.RLock()
    begun = set(_pending.values())
    _pending.clear()
    for pending in begun:
        pending.locks.close()


os.register_at_fork(after_in_child=_in_a_fork)


class PendingBuild:
    """Libraries that are being built. beside: that of `watch`, if it is built at the same time."""

    def __init__(self, sources: Sequence[Source], beside: Sequence[toolchain.Job]) -> None:
        self.sources = sources
        self.beside = beside
        self.locks = ExitStack()
        """Locks that keep other processes from building them."""
        jobs = [*beside, *[toolchain.kernel(x.text) for x in sources]]
        count = len(sources)
        # an interrupt that is held back until then leaves no compiler that nobody knows
        self.build = held(toolchain.Build, jobs, f"{count} kernel{'s' * (count != 1)}")
        _pending.update({x.text: self for x in sources})

    def finish(self) -> None:
        """Wait for them, and keep them.

        Raises:
            Exception: if the compiler fails.
        """
        try:
            if self.beside:  # first: an interrupt here leaves the kernels missing, too
                with suppress(RuntimeError, OSError, NoCompiler):  # nobody has to have it
                    watch.take(self.build.finish(0), keep=True)
                watch.tried = True
            for i, source in enumerate(self.sources, len(self.beside)):
                _built[source.text] = _loaded(self.build.finish(i), source)
        finally:
            for source in self.sources:
                _pending.pop(source.text, None)
            self.build.close()
            self.locks.close()


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
            if text in _pending:
                with suppress(Exception):
                    let_through(_pending[text].finish)
            if text not in _built or (strict and _built[text] is None):
                _built[text] = let_through(partial(_made, wanted, strict))
    return _built[text]


def prefetch(every: Sequence[Source], *, wait: bool = True) -> None:
    """Build what is missing of some libraries at once, for `library`.

    Nothing is said of what cannot be built: `library` tries it again. What another process is
    building is left to it, until `library` asks.

    wait: until they are there. False: until `library` asks for one of them.
    """
    missing = {x.text: x for x in every if x.text not in _built}
    if len(missing) >= (2 if wait else 1):
        with _lock, suppress(Exception):
            left = [x for text, x in missing.items() if text not in {*_built, *_pending}]
            pending = let_through(partial(_begin, left, wait=False))
            if wait and pending is not None:
                let_through(pending.finish)


def count() -> int:
    """How many libraries this process has asked for: what a test of recompilation counts."""
    return len(_built)


def _made(wanted: Source, strict: bool) -> Native | None:
    try:
        pending = _begin([wanted], wait=True)
        if pending is not None:
            pending.finish()
    except Exception as error:
        why = toolchain.trouble()
        found = NoCompiler(why) if why else error
        if strict:
            raise refusal(cause("no kernel can be built here", found)) from error
        warn_failed("no kernel can be built here", found)
        return None
    return _built[wanted.text]


def _begin(sources: Sequence[Source], *, wait: bool) -> PendingBuild | None:
    """Begin to build libraries, but those that are kept.

    wait: for other processes that build one of them.
    """
    kept: dict[str, Native] = {}
    with ExitStack() as locks:
        missing: list[Source] = []
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
        begun = any(x.beside for x in _pending.values())
        beside = [] if begun else list(filter(None, [watch.missing()]))
        if missing:
            pending = PendingBuild(missing, beside)
            pending.locks = locks.pop_all()
            _built.update(kept)
            return pending
    if beside:
        with suppress(OSError, NoCompiler):
            PendingBuild([], beside).finish()
    _built.update(kept)  # now: after an interrupt `watch` is begun again with them
    return None


def _kept(source: Source) -> Native | None:
    for pattern in toolchain.names_of(source.text):
        path = disk_cache.find(pattern)
        if path is not None:
            with suppress(OSError, AttributeError):  # one that this system cannot load
                return Native(path, source, path.name, found=True)
    return None
