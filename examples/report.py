"""What the user sees: progress, the table, the picture, the verdict."""

from __future__ import annotations

from collections import deque
from itertools import combinations
from pathlib import Path
from statistics import mean, median

from checkpoint import Record
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

COMPARED = 50
"""So many first losses of the runs must agree."""

TOLERANCE = 1e-3
"""How far they may be apart."""

WORST_VALID = 2.5
"""Nats a byte on the validation text; guessing from the last byte alone gives 2.36."""


class Display:
    """A progress bar per run; in a log file or a pipe, ten lines per run instead.

    Args:
        names: the runs.
        steps: how many each takes.
        tokens: how many bytes a step learns from.
    """

    def __init__(self, console: Console, names: list[str], steps: int, tokens: int) -> None:
        self.console = console
        self.steps = steps
        self.tokens = tokens
        self.progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.tasks: dict[str, TaskID] = {
            name: self.progress.add_task(name, total=steps, status="") for name in names
        }

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def begin(self, name: str, done: int) -> None:
        """A run starts, or goes on, after `done` steps."""
        self.name = name
        self.start = self.done = done
        self.recent: deque[float] = deque(maxlen=20)
        self.show("first step …")

    def advance(self, loss: float, seconds: float) -> None:
        """One more step was taken."""
        self.done += 1
        if self.done == self.start + 2:
            self.recent.clear()  # of the first step, which compiles
        self.recent.append(seconds)
        pace = mean(self.recent)
        left = int(pace * (self.steps - self.done))
        status = f"loss {loss:.3f}  {self.tokens / pace:>6,.0f} tokens/s"
        self.show(f"{status}  {left // 60}:{left % 60:02} left")

    def end(self, record: Record) -> None:
        """The run is over."""
        self.show(f"loss {record.losses[-1]:.3f}, validation {record.valid_weights:.3f}")

    def show(self, status: str) -> None:
        self.progress.update(self.tasks[self.name], completed=self.done, status=status)
        every = max(1, self.steps // 10)
        if not self.console.is_terminal and (self.done % every == 0 or self.done == self.steps):
            print(f"{self.name:<10} {self.done:>5}/{self.steps}  {status}", flush=True)


def table(records: dict[str, Record]) -> Table:
    """One row per run."""
    found = Table(title="Validation loss in nats a byte, and median times")
    found.add_column("run")
    for heading in ("weights", "averaged", "step, ms", "optimizer, ms", "compiling, s"):
        found.add_column(heading, justify="right")
    for name, record in records.items():
        own = record.optimizer_seconds
        found.add_row(
            name,
            f"{record.valid_weights:.4f}",
            f"{record.valid_average:.4f}",
            f"{1000 * median(record.step_seconds):.1f}",
            f"{1000 * median(own):.1f}" if own else "in the step",
            f"{compile_seconds(record):.1f}",
        )
    return found


def compile_seconds(record: Record) -> float:
    """By how much the first call was slower than a typical one."""
    seconds = record.optimizer_seconds or record.step_seconds
    return seconds[0] - median(seconds)


def differences(a: Record, b: Record) -> list[float]:
    """How far the losses of two runs are apart, step by step."""
    return [abs(x - y) for x, y in zip(a.losses, b.losses, strict=True)]


def complaint(records: dict[str, Record], *, trained: bool) -> str | None:
    """What is wrong with the runs, in one sentence; None if nothing is.

    Args:
        records: of all runs.
        trained: were there enough steps for the validation loss to mean something?
    """
    for (a, x), (b, y) in combinations(records.items(), 2):
        for step, difference in enumerate(differences(x, y)[:COMPARED]):
            if not difference <= TOLERANCE:  # so that NaN is caught
                return (
                    f"the runs {a} and {b} part: their losses at step {step} differ by "
                    f"{difference:.1e}, and {TOLERANCE:g} is allowed in the first {COMPARED} steps."
                )
    for name, record in records.items():
        valid = record.valid_weights
        if trained and (valid is None or not valid <= WORST_VALID):
            return (
                f"the run {name} has not learnt enough: its validation loss is {valid:.3f} nats a "
                f"byte, and at most {WORST_VALID} is expected."
            )
    return None


def praise(records: dict[str, Record]) -> str:
    """What is right with the runs, in one sentence."""
    pairs = [differences(x, y)[:COMPARED] for x, y in combinations(records.values(), 2)]
    worst = max([max(pair) for pair in pairs])
    return f"The first {len(pairs[0])} losses of the three runs agree to {worst:.1e}."


def plot(records: dict[str, Record], path: Path) -> None:
    """Draw the losses above, and how far they are apart below."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    styles = {
        "functional": {"color": "#9ecae1", "linewidth": 5},
        "adapter": {"color": "#e6550d", "linewidth": 2, "linestyle": (0, (4, 3))},
        "torch": {"color": "black", "linewidth": 0.7},
    }
    for name, record in records.items():
        valid = f"{name}: validation {record.valid_weights:.3f}"
        above.plot(record.losses, label=valid, **styles[name])
    above.set_title("The same optimizer, three ways: the losses lie on top of each other")
    above.set_ylabel("training loss [nats a byte]")
    above.legend()
    for name, mark, color in (("functional", "o", "#3182bd"), ("adapter", "x", "#e6550d")):
        apart = differences(records[name], records["torch"])
        below.semilogy(apart, mark, color=color, markersize=3, label=f"|{name} − torch|")
    below.hlines(TOLERANCE, 0, COMPARED - 1, color="crimson", label=f"allowed: first {COMPARED}")
    below.set_ylabel("difference [nats a byte]")
    below.set_xlabel("step")
    below.legend(loc="lower right")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
