"""A line on stderr that says how far something is: a bar of rich where it is installed."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

PAUSE = 0.1
"""Seconds between two lines of plain text."""


def progress(
    text: str, total: int, show: bool | None = None
) -> AbstractContextManager[Callable[[int], object]]:
    """A context with a function that takes how much of `total` is done.

    show: False shows nothing; None (the default) shows it if stderr is a terminal.
    """
    if show is False or (show is None and not sys.stderr.isatty()):
        return nullcontext(lambda done: None)
    return _bar(text, total) if importlib.util.find_spec("rich") else _line(text, total)


@contextmanager
def _bar(text: str, total: int) -> Iterator[Callable[[int], object]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def _line(text: str, total: int) -> Iterator[Callable[[int], object]]:
    last = 0.0
    width = len(f"{text} {total} of {total}")

    def tell(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= PAUSE:
            last = now
            sys.stderr.write(f"\r{f'{text} {done} of {total}':<{width}}")
            sys.stderr.flush()

    try:
        yield tell
    finally:
        sys.stderr.write(f"\r{'':{width}}\r")
        sys.stderr.flush()
