"""The whole benchmark: `make bench`, or `make bench ARGS="--only adamw,composed --repeats 100"`.

Prints a table and writes `RESULTS.md` and `RESULTS.png`: a full run into `benchmarks/`, where they
are kept, a part of it into `out/benchmarks/`. `--resume` continues a run that was stopped.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import algorithms
import backends
import fresh
import gpu_rows
import gradient_free
import kinds
import lbfgs
import load
import machine
import matrices
import memory
import peers
import plot
import poisson
import report
import research
import sharded
import solvers
import steps
import train_rows
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rows import Effort, Measured, Result, Row, attempt, read, write

HERE = Path(__file__).parent
PARTIAL = Path("out") / "benchmarks"
QUICK = Effort(seconds=0.02, processes=1, quick=True)


class BadInput(Exception):
    """A flag that cannot be used: one sentence for the user, exit code 2."""


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong flag gets one sentence instead of the usage too."""

    def error(self, message: str) -> NoReturn:
        raise BadInput(message)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = Parser(prog="benchmarks/run.py", description="Measure every bar and every peer.")
    parser.add_argument("--only", metavar="NAMES", help="rows whose name starts with one of these")
    parser.add_argument("--quick", action="store_true", help="tiny tensors: does it all run?")
    parser.add_argument("--repeats", type=int, help="timed calls, or processes, of each row")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each pair (default 4)")
    parser.add_argument("--processes", type=int, default=5, help="fresh processes of each row")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the results go")
    parser.add_argument("--resume", action="store_true", help="keep the rows that OUT has already")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    flags = parser.parse_args(argv)
    for name in ("repeats", "processes"):
        if getattr(flags, name) is not None and getattr(flags, name) < 1:
            raise BadInput(f"--{name} must be at least 1, but is {getattr(flags, name)}.")
    if not flags.seconds > 0:
        raise BadInput(f"--seconds must be above 0, but is {flags.seconds:g}.")
    return flags


def chosen(only: str | None) -> list[Row]:
    """The rows whose names start with one of these, separated by commas; all, if there are none."""
    rows = [
        *steps.rows(),
        *load.rows(),
        *kinds.rows(),
        *matrices.rows(),
        *algorithms.rows(),
        *fresh.rows(),
        *backends.rows(),
        *memory.rows(),
        *train_rows.rows(),
        *lbfgs.rows(),
    ]
    rows += [
        *gradient_free.rows(),
        *sharded.rows(),
        *research.rows(),
        *solvers.rows(),
        *poisson.rows(),
    ]
    rows += [*peers.rows(), *gpu_rows.rows()]
    if only is None:
        return rows
    wanted = [name.strip() for name in only.split(",")]
    for name in wanted:
        if not name or not any(row.name.startswith(name) for row in rows):
            families = ", ".join(dict.fromkeys([row.name.split("-")[0] for row in rows]))
            raise BadInput(
                f"--only names no row with {name!r}; names start with one of {families}, and "
                "--list prints all of them."
            )
    return [row for row in rows if row.name.startswith(tuple(wanted))]


def measured(
    rows: list[Row],
    effort: Effort,
    console: Console,
    known: dict[str, Measured],
    keep: Callable[[list[Result]], None],
) -> list[Result]:
    """All rows, with their progress; a line for each if the output is not a terminal.

    known: what an earlier run has measured, by the rows' names. keep: called with the results so
    far after each of them, so that a run may be stopped.
    """
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    results: list[Result] = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(rows))
        for row in rows:
            progress.update(task, description=row.name)
            found = known.get(row.name)
            result = Result(row, found) if found else attempt(row, effort)
            results.append(result)
            if not found:
                keep(results)
            if not console.is_terminal:
                print(f"{len(results):>3}/{len(rows)}  {report.line(result)}", flush=True)
            progress.advance(task)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; returns the exit code."""
    flags = parse(argv)
    rows = chosen(flags.only)
    if flags.list:
        print("\n".join([row.name for row in rows]))
        return 0
    whole = flags.only is None and not flags.quick
    out: Path = flags.out or (HERE if whole else PARTIAL)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {out} cannot be made: {error.strerror}.") from None
    given = Effort(seconds=flags.seconds, repeats=flags.repeats, processes=flags.processes)
    effort = QUICK if flags.quick else given
    console = Console()
    where = machine.describe()
    arguments = shlex.join(sys.argv[1:] if argv is None else argv)
    command = "make bench" + (f' ARGS="{arguments}"' if arguments else "")

    stored = (flags.out or PARTIAL) / "rows.json"
    known = read(stored) if flags.resume else {}

    def keep(results: list[Result]) -> None:
        write(stored, known, results)
        missing = [row.name for row in rows[len(results) :]]
        text = report.markdown(results, where, command, quick=flags.quick, missing=missing)
        (out / "RESULTS.md").write_text(text)

    results = measured(rows, effort, console, known, keep)
    keep(results)
    plot.plot(results, out / "RESULTS.png")
    if any(result.row.words for result in results):
        plot.plot_traffic(results, out / "TRAFFIC.png")
    wide = console if console.is_terminal else Console(width=200)
    wide.print(report.console(results))
    print(f"{report.summary(results)} Written to {out / 'RESULTS.md'} and RESULTS.png there.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BadInput as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(2)
