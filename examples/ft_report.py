"""What the user of `fault_tolerant.py` sees: two bars that live and die, a picture, the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

COLORS = ("#d95f02", "#1f78b4")
NAMES = ("replica 0", "replica 1")


@dataclass
class Story:
    """All that happened.

    lines: what each replica has said, step by step. killed_at and back_at: when replica 1 was
    killed, and when its next life took its first step, in seconds since the epoch.
    """

    lines: tuple[list[dict[str, Any]], list[dict[str, Any]]] = field(
        default_factory=lambda: ([], [])
    )
    killed_at: float | None = None
    back_at: float | None = None

    @property
    def begin(self) -> float:
        """When the first step was over."""
        return min(lines[0]["time"] for lines in self.lines)

    def committed(self, rank: int) -> list[dict[str, Any]]:
        return [line for line in self.lines[rank] if line["committed"]]

    def refused(self, rank: int) -> list[dict[str, Any]]:
        return [line for line in self.lines[rank] if not line["committed"]]

    def lives(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Replica 1's committed steps before it was killed and since it is back."""
        found = self.committed(1)
        back = self.back_at or float("inf")
        return [x for x in found if x["time"] < back], [x for x in found if x["time"] >= back]

    def shared(self) -> tuple[int, int]:
        """How many steps both replicas committed, and after how many they were bit-equal."""
        first, second = ({x["step"]: x["digest"] for x in self.committed(r)} for r in (0, 1))
        both = first.keys() & second.keys()
        return len(both), sum(first[step] == second[step] for step in both)

    def longest_pause(self) -> float:
        """Of the survivor, in seconds."""
        times = [line["time"] for line in self.lines[0]]
        return max((b - a for a, b in pairwise(times)), default=0.0)


class Display:
    """A bar per replica; in a log file or a pipe, ten lines per replica instead."""

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self.steps = steps
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self.tasks = [self.progress.add_task(x, total=steps, status="starting …") for x in NAMES]

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def step(self, rank: int, line: dict[str, Any]) -> None:
        """A replica has taken a step, or was refused one."""
        company = "alone" if line["participants"] == 1 else "together"
        status = f"loss {line['loss']:.3f}  {company}" + ("  healed" if line["healed"] else "")
        if not line["committed"]:
            status = "refused: the step is as if it had never been"
        self.status(rank, status, line["step"])
        if not self.console.is_terminal and (
            line["healed"] or not line["committed"] or line["step"] % max(1, self.steps // 10) == 0
        ):
            print(f"{NAMES[rank]}  {line['step']:>5}  {status}", flush=True)

    def status(self, rank: int, status: str, step: int | None = None) -> None:
        self.progress.update(self.tasks[rank], completed=step, status=status)

    def ends_at(self, step: int) -> None:
        """How many steps there will be is known."""
        for task in self.tasks:
            self.progress.update(task, total=step)

    def say(self, sentence: str) -> None:
        """One line above the bars."""
        self.console.print(sentence, highlight=False)


def complaint(story: Story) -> str | None:
    """What went wrong, in one sentence; None if nothing did."""
    shared, equal = story.shared()
    if equal < shared:
        return f"after {shared - equal} of {shared} shared steps the replicas were not equal."
    steps = [line["step"] for line in story.committed(0)]
    if steps != list(range(steps[0], steps[0] + len(steps))):
        return "the survivor has lost a step, or counted one twice."
    if not story.lives()[1]:
        return "the killed replica did not come back."
    return None


def praise(story: Story) -> str:
    """What went right, in one sentence."""
    shared, equal = story.shared()
    alone = sum(line["participants"] == 1 for line in story.committed(0))
    return (
        f"{equal} of {shared} shared steps bit-equal: parameters, moments and schedule. Replica 0 "
        f"took {alone} more alone, had {len(story.refused(0))} refused, and paused at most "
        f"{story.longest_pause():.1f} s."
    )


def plot(story: Story, path: Path) -> None:
    """Draw losses over steps above, and steps over time below."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[3, 2])
    first, second = story.lives()
    runs = ((0, story.committed(0), NAMES[0]), (1, first, NAMES[1]), (1, second, None))
    for rank, lines, label in runs:
        color = COLORS[rank]
        own = [x for x in lines if not x["healed"]]  # else the loss is of what was replaced
        losses = [x["loss"] for x in own]
        steps = [x["step"] for x in own]
        above.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
        above.plot(steps, smooth(losses), color=color, linewidth=2, label=label)
        times = [x["time"] - story.begin for x in lines]
        style = {"color": color, "linewidth": 3 - rank, "linestyle": (0, (3, 3)) if rank else "-"}
        below.plot(times, [x["step"] for x in lines], **style)
    above.set_title("One of two replicas is killed, comes back, and is healed")
    above.set_xlabel("committed step")
    above.set_ylabel("training loss [nats a byte]")
    below.set_xlabel("time [s]")
    below.set_ylabel("committed steps")
    if first and second and story.killed_at is not None and story.back_at is not None:
        died, healed = first[-1]["step"], second[0]["step"]
        lost = [f"step {x['step'] + 1} is refused" for x in story.refused(0)[:1]]
        begin = "\n".join([f"killed after step {died}", *lost])
        span(above, died, healed, begin, f"healed in step {healed}")
        times = story.killed_at - story.begin, story.back_at - story.begin
        span(below, *times, "SIGKILL", "healed")
    for line in story.refused(0):
        place = line["time"] - story.begin, line["step"]
        below.plot(*place, "x", color="crimson", markersize=9, markeredgewidth=2.5, zorder=5)
        below.annotate(
            "step refused",
            place,
            (8, -12),
            textcoords="offset points",
            color="crimson",
        )
    above.legend(title="each on different text", loc="center")
    for axes in (above, below):
        axes.margins(x=0.01)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def smooth(values: list[float], window: int = 10) -> list[float]:
    """The mean of each value and those before it."""
    parts = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def span(axes: Axes, a: float, b: float, begin: str, end: str) -> None:
    """Shade the time in which replica 0 was alone."""
    axes.axvspan(a, b, color="0.92", zorder=0)
    for x, text, side in ((a, begin, "left"), (b, end, "right")):
        axes.axvline(x, color="0.4", linewidth=1)
        axes.annotate(
            text,
            (x, 0.96),
            (-5 if side == "right" else 5, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha=side,
            va="top",
        )
