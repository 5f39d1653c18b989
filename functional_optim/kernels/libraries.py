"""Libraries that are built once: in this process by their text, on disk by its digest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim.kernels import compiler, disk_cache, watch
from functional_optim.kernels import shim as toolchain
from functional_optim.kernels.failures import cause, refusal, tell_failed
from functional_optim.kernels.graph import Unsuitable
from functional_optim.kernels.interrupts import let_through
from functional_optim.kernels.launches import Native
from functional_optim.kernels.print_cpp import SYMBOL, Source

_built: dict[str, Native | None] = {}
"""Libraries by their texts; None for one that cannot be had."""
_begun: dict[str, Begun] = {}
"""Libraries that are being built."""
_gave_way: set[str] = set()
"""Texts of libraries that could not be built."""
_lock = threading.RLock()


class Request(NamedTuple):
    """A library that is asked for. check: raises Unsuitable if it does not do what the rules do."""

    source: Source
    check: Callable[[Native], None]


class Begun:
    """Libraries that are being built. turns: in which nobody else builds them."""

    def __init__(self, requests: Sequence[Request], names: Sequence[str], turns: Any) -> None:
        self.requests = requests
        self.names = names
        self.turns = turns
        texts = [text_of(x.source, name) for x, name in zip(requests, names, strict=True)]
        self.build = toolchain.build(texts)
        _begun.update({x.source.text: self for x in requests})

    def finish(self) -> None:
        """Wait for them, try them, and keep those that pass.

        Raises:
            Exception: if the compiler fails.
        """
        try:
            for request, name, path in zip(
                self.requests, self.names, self.build.finish(), strict=True
            ):
                native = Native(path, symbol_of(name), request.source, name, found=False)
                try:
                    request.check(native)
                except Unsuitable:
                    _built[request.source.text] = None
                    continue
                disk_cache.keep(name, path.read_bytes())
                _built[request.source.text] = native
        finally:
            for request in self.requests:
                _begun.pop(request.source.text, None)
            self.build.close()
            self.turns.close()


def symbol_of(name: str) -> str:
    """The symbol of a library's function."""
    return f"functional_optim_{name.partition('.')[0]}"


def text_of(source: Source, name: str) -> str:
    """The C++ of a library under a name."""
    return source.text.replace(SYMBOL, symbol_of(name))


def library(wanted: Request, *, strict: bool = False) -> Native | None:
    """A library; None if it cannot be had.

    strict: raise where it cannot.

    Raises:
        RuntimeError: if `strict`, and building it fails.
    """
    text = wanted.source.text
    if text not in _built or (strict and text in _gave_way):
        with _lock:
            if text in _begun:
                with suppress(Exception):
                    let_through(_begun[text].finish)
            if text not in _built or (strict and text in _gave_way):
                _built[text] = let_through(partial(_made, wanted, strict))
    return _built[text]


def prefetch(every: Sequence[Request], *, wait: bool = True) -> None:
    """Build what is missing of some libraries at once, for `library`.

    Nothing is said of what cannot be built: `library` tries it again.

    wait: until they are there. False: until `library` asks for one of them.
    """
    missing = {x.source.text: x for x in every}
    missing = {k: x for k, x in missing.items() if k not in _built and k not in _begun}
    if len(missing) >= (2 if wait else 1):
        with _lock, suppress(Exception):
            begun = let_through(partial(_begin, list(missing.values())))
            if wait and begun is not None:
                let_through(begun.finish)


def count() -> int:
    """How many libraries this process has asked for: what a test of recompilation counts."""
    return len(_built)


def _made(wanted: Request, strict: bool) -> Native | None:
    text = wanted.source.text
    try:
        begun = _begin([wanted])
        if begun is not None:
            begun.finish()
    except Exception as error:
        what, why = "no kernel can be built here", compiler.explained(error)
        if strict:
            raise refusal(cause(what, why)) from error
        _gave_way.add(text)
        tell_failed(what, why)
        return None
    _gave_way.discard(text)
    return _built.get(text)


def _begin(requests: Sequence[Request]) -> Begun | None:
    """Begin to build libraries, but those that are kept."""
    from contextlib import ExitStack

    with ExitStack() as turns:
        missing: list[tuple[Request, str]] = []
        for request in requests:
            name = toolchain.digest(request.source.text)
            native = _kept(request, name)
            if native is None:
                turns.enter_context(disk_cache.turn(name))
                native = _kept(request, name)
            if native is None:
                missing.append((request, name))
            else:
                _built[request.source.text] = native
        if not missing:
            return None
        return Begun([x for x, _ in missing], [y for _, y in missing], turns.pop_all())


def _kept(request: Request, name: str) -> Native | None:
    path = disk_cache.find(name)
    if path is None:
        return None
    try:
        native = Native(path, symbol_of(name), request.source, name, found=True)
    except (OSError, AttributeError):
        return None
    watch.load()
    return native
