"""Tables and progress as text; drawn by rich if it is installed."""

from __future__ import annotations

import importlib.util
import io
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

WIDTH = 100
"""Maximum number of characters of a line."""

FRAME = 3
"""Additional width of a column in a frame."""

NARROWEST = 20
"""Minimum width of the first column."""


class Table(NamedTuple):
    """Cells in columns. Those of the first column are wrapped if a table is too wide.

    head: the names of the columns. rows: lists of cells. title: lines above it. right: the indices
    of columns of numbers.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: tuple[str, ...] = ()
    right: tuple[int, ...] = ()

    def titles(self) -> list[str]:
        """The lines of the title, wrapped."""
        return [
            x for line in self.title for x in textwrap.wrap(line, WIDTH, subsequent_indent="  ")
        ]

    def lines(self, width: int) -> list[tuple[str, ...]]:
        """The rows in lines. width: of the first column."""
        found: list[tuple[str, ...]] = []
        for first, *others in self.rows:
            start, *more = textwrap.wrap(first, width) or [""]
            found.append((start, *others))
            found += [(x, *[""] * len(others)) for x in more]
        return found


def widths(tables: Sequence[Table]) -> list[int]:
    """The widths of the columns of tables that are printed below one another."""
    every = [row for table in tables for row in (table.head, *table.rows)]
    first, *others = [max(map(len, column)) for column in zip(*every, strict=True)]
    room = WIDTH - sum(others) - FRAME * (1 + len(others)) - 1
    return [min(first, max(room, NARROWEST)), *others]


def drawn(blocks: Sequence[Sequence[Table]], notes: Sequence[str]) -> str:
    """Tables and notes below them, in frames if rich is installed.

    blocks: tables of one block have columns of equal widths.
    """
    draw = framed if importlib.util.find_spec("rich") else plain
    return draw(blocks, notes)


def plain(blocks: Sequence[Sequence[Table]], notes: Sequence[str]) -> str:
    """Tables in plain columns."""
    texts: list[str] = []
    for tables in blocks:
        sizes = widths(tables) if tables else []
        texts += ["\n".join(_plain_lines(table, sizes)) for table in tables]
    return "\n\n".join([*texts, *_wrapped(notes)])


def _plain_lines(table: Table, sizes: Sequence[int]) -> Iterator[str]:
    yield from table.titles()
    indent = "  " if table.title else ""
    for row in (table.head, *table.lines(sizes[0])):
        cells = [
            cell.rjust(n) if i in table.right else cell.ljust(n)
            for i, (cell, n) in enumerate(zip(row, sizes, strict=True))
        ]
        yield (indent + "  ".join(cells)).rstrip()


def framed(blocks: Sequence[Sequence[Table]], notes: Sequence[str]) -> str:
    """Tables in frames, drawn by rich."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    file = io.StringIO()
    console = Console(file=file, width=WIDTH, color_system=None, force_terminal=False)
    for tables in blocks:
        sizes = widths(tables) if tables else []
        for table in tables:
            grid = Grid(box=box.ROUNDED)
            for i, (name, n) in enumerate(zip(table.head, sizes, strict=True)):
                justify = "right" if i in table.right else "left"
                grid.add_column(Text(name), width=n, justify=justify, no_wrap=True)
            for row in table.lines(sizes[0]):
                grid.add_row(*map(Text, row))
            for line in table.titles():
                console.print(Text(line))
            console.print(grid)
    for note in _wrapped(notes):
        console.print(Text(note))
    return "\n".join([line.rstrip() for line in file.getvalue().splitlines()])


def _wrapped(notes: Sequence[str]) -> list[str]:
    return [textwrap.fill(note, WIDTH, subsequent_indent="  ") for note in notes]


PAUSE = 0.1
"""Seconds between two lines of plain text."""


def progress(
    text: str, total: int, show: bool | None = None
) -> AbstractContextManager[Callable[[int], object]]:
    """A context with a function that receives the finished part of `total`.

    show: False shows nothing; None (the default) shows it if stderr is a terminal.
    """
    if not (sys.stderr.isatty() if show is None else show):
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
