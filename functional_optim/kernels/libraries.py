"""Libraries that are built once: in this process by their text, on disk by its digest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from functional_optim.kernels import disk_cache, toolchain, watch
from functional_optim.kernels.failures import NoCompiler, cause, refusal, tell_failed
from functional_optim.kernels.graph import Unsuitable
from functional_optim.kernels.interrupts import held, let_through
from functional_optim.kernels.launches import Native
from functional_optim.kernels.print_cpp import Source

_built: dict[str, Native | None] = {}
"""Libraries by their texts; None for one that is not available."""
_pending: dict[str, PendingBuild] = {}
"""Libraries that are being built."""
_lock = threading.RLock()


class Request(NamedTuple):
    """A library that is asked for. check: raises Unsuitable if it does not do what the rules do."""

    source: Source
    check: Callable[[Native], None]


class PendingBuild:
    """Libraries that are being built. beside: what is built beside them."""

    def __init__(self, requests: Sequence[Request], beside: Sequence[toolchain.Job]) -> None:
        self.requests = requests
        self.turns = ExitStack()
        """In which nobody else builds them."""
        jobs = [*[toolchain.kernel(x.source.text) for x in requests], *beside]
        count = len(requests)
        # an interrupt that is held back until then leaves no compiler that nobody knows
        self.build = held(toolchain.Build, jobs, f"{count} kernel{'s' * (count != 1)}")
        _pending.update({x.source.text: self for x in requests})

    def finish(self) -> None:
        """Wait for them, try them, and keep those that pass.

        Raises:
            Exception: if the compiler fails.
        """
        try:
            for i, request in enumerate(self.requests):
                _built[request.source.text] = self._tried(self.build.finish(i), request)
            if len(self.build.jobs) > len(self.requests):
                with suppress(RuntimeError, OSError, NoCompiler):  # nobody has to have it
                    watch.take(self.build.finish(len(self.requests)), keep=True)
        finally:
            for request in self.requests:
                _pending.pop(request.source.text, None)
            self.build.close()
            self.turns.close()

    def _tried(self, path: Path, request: Request) -> Native | None:
        name = toolchain.name_of(request.source.text)
        native = Native(path, request.source, name, found=False)
        try:
            request.check(native)
        except Unsuitable:
            return None
        disk_cache.keep(name, path.read_bytes())
        return native


def library(wanted: Request, *, strict: bool = False) -> Native | None:
    """A library; None if it is not available.

    strict: raise if it cannot be built, also if that has failed before.

    Raises:
        RuntimeError: if `strict`, and building it fails.
    """
    text = wanted.source.text
    if text not in _built or (strict and _built[text] is None):
        with _lock:
            if text in _pending:
                with suppress(Exception):
                    let_through(_pending[text].finish)
            if text not in _built or (strict and _built[text] is None):
                _built[text] = let_through(partial(_made, wanted, strict))
    return _built[text]


def prefetch(every: Sequence[Request], *, wait: bool = True) -> None:
    """Build what is missing of some libraries at once, for `library`.

    Nothing is said of what cannot be built: `library` tries it again. What another process is
    building is left to it, until `library` asks.

    wait: until they are there. False: until `library` asks for one of them.
    """
    missing = {x.source.text: x for x in every if x.source.text not in _built}
    if len(missing) >= (2 if wait else 1):
        with _lock, suppress(Exception):
            left = [x for text, x in missing.items() if text not in {*_built, *_pending}]
            pending = let_through(partial(_begin, left, wait=False))
            if wait and pending is not None:
                let_through(pending.finish)


def count() -> int:
    """How many libraries this process has asked for: what a test of recompilation counts."""
    return len(_built)


def _made(wanted: Request, strict: bool) -> Native | None:
    try:
        pending = _begin([wanted], wait=True)
        if pending is not None:
            pending.finish()
    except Exception as error:
        why = toolchain.trouble()
        found = NoCompiler(why) if why else error
        if strict:
            raise refusal(cause("no kernel can be built here", found)) from error
        tell_failed("no kernel can be built here", found)
        return None
    return _built[wanted.source.text]


def _begin(requests: Sequence[Request], *, wait: bool) -> PendingBuild | None:
    """Begin to build libraries, but those that are kept.

    wait: for other processes that build one of them.
    """
    with ExitStack() as turns:
        missing: list[Request] = []
        for request in requests:
            native = _kept(request)
            if native is None:
                name = toolchain.name_of(request.source.text)
                if not turns.enter_context(disk_cache.turn(name, wait=wait)) and not wait:
                    continue
                native = _kept(request)
            if native is None:
                missing.append(request)
            else:
                _built[request.source.text] = native
        beside = list(filter(None, [watch.missing()]))
        if missing:
            pending = PendingBuild(missing, beside)
            pending.turns = turns.pop_all()
            return pending
    if beside:
        with suppress(OSError, NoCompiler):
            PendingBuild([], beside).finish()
    return None


def _kept(request: Request) -> Native | None:
    for pattern in toolchain.names_of(request.source.text):
        path = disk_cache.find(pattern)
        if path is not None:
            with suppress(OSError, AttributeError):  # one that this system cannot load
                return Native(path, request.source, path.name, found=True)
    return None
