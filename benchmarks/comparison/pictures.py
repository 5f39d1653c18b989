"""The pictures: losses over learning rates, and how often who is how near to the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from comparison.measures import FLOOR, REFERENCE, Cell, Comparison, logarithm, median
from comparison.tasks import Task

FAMILIES = {
    "Adam and its kin": ("nadam", "cautious", "adan", "adopt", "ademamix", "mars"),
    "lighter, or less to tune": (
        "sgd", "lion", "adafactor", "schedule_free_adamw", "prodigy",
    ),
    "matrices and curvature": (
        "muon_adamw", "soap", "shampoo", "psgd_kron", "lbfgs", "levenberg_marquardt", "ssbfgs",
    ),
}  # fmt: skip
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's: told apart by everybody."""
MARKS = ("o", "s", "^", "D", "v", "P", "X")
STYLE: dict[Any, Any] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "axes.grid": True,
    "grid.color": "#e8e8e8",
    "font.size": 8.5,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
}
WORST = 50.0
"""Scores above this many times the best are not drawn: there the interesting part would be flat."""


def curve(axes: Any, cell: Cell, colour: str, mark: str, *, beneath: bool = False) -> None:
    """A score over learning rates; the chosen rate has a ring."""
    points = [(lr, FLOOR if x is None else max(x, FLOOR)) for lr, x in cell.sweep if x is not None]
    label, order = cell.contender.title, 1 if beneath else 2
    if cell.contender.exact:
        score = median(cell.scores)
        axes.axhline(max(score or FLOOR, FLOOR), color=colour, ls="--", label=label, zorder=order)
        return
    axes.plot(*zip(*points, strict=True), color=colour, marker=mark, label=label, zorder=order)
    if best := [(lr, y) for lr, y in points if math.isclose(lr, cell.numbers.lr, rel_tol=1e-6)]:
        axes.plot(*best[0], "o", ms=8, mfc="none", color=colour, zorder=order)


def limits(cells: Sequence[Cell]) -> tuple[float, float]:
    """Of the scores that are drawn."""
    scores = [max(x, FLOOR) for cell in cells for _, x in cell.sweep if x is not None]
    scores += [max(x, FLOOR) for cell in cells for x in cell.scores if x is not None]
    start = max(median(cell.scores) or FLOOR for cell in cells)
    return min(scores) / 1.1, min(max(scores), max(WORST * min(scores), 2 * start)) * 1.1


def sensitivity(comparison: Comparison, task: Task, path: Path) -> None:
    """Final scores of a task over learning rates: a panel for each family, AdamW in all."""
    cells = comparison.of(task)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.3), layout="constrained")
        panels = figure.subplots(1, len(FAMILIES), sharey=True)
        for axes, (title, names) in zip(panels, FAMILIES.items(), strict=True):
            if REFERENCE in cells:
                curve(axes, cells[REFERENCE], "#555555", ".", beneath=True)
            for name, colour, mark in zip(names, COLOURS, MARKS, strict=False):
                if name in cells:
                    curve(axes, cells[name], colour, mark)
            axes.set(xscale="log", yscale="log", title=title, xlabel="learning rate")
            axes.set_ylim(*limits([*cells.values()]))
            axes.xaxis.set_major_locator(LogLocator(numticks=8))
            axes.xaxis.set_minor_formatter(NullFormatter())
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="best")
        panels[0].set_ylabel(task.measure)
        figure.savefig(path, dpi=110)


def single(comparison: Comparison, name: str, tasks: Sequence[Task], path: Path) -> None:
    """One optimizer on all tasks over its learning rate, compared with AdamW."""
    shown = [task for task in tasks if (task.name, name) in comparison.cells]
    rows = -(-len(shown) // 4)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 2.1 * rows))
        # as a constrained layout would leave it, which takes twice as long to draw
        figure.subplots_adjust(0.045, 0.12 / rows, 0.985, 1 - 0.13 / rows, 0.22, 0.33)
        panels = figure.subplots(rows, 4, squeeze=False).flat
        for task, axes in zip(shown, panels, strict=False):
            cells = comparison.of(task)
            drawn = [cells[x] for x in dict.fromkeys((REFERENCE, name)) if x in cells]
            for cell, colour in zip(drawn, ("#999999", COLOURS[0]), strict=False):
                curve(axes, cell, colour if len(drawn) > 1 else COLOURS[0], ".")
            axes.set(xscale="log", yscale="log", title=task.name)
            low, high = axes.set_ylim(*limits(drawn))
            if high < 30 * low:  # powers of ten alone are too few
                subs = (1, 2, 5) if high > 3 * low else (1, 1.5, 2, 2.5, 3, 4, 5, 7)
                axes.yaxis.set_major_locator(LogLocator(subs=subs))
                axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()  # of small panels, where they take half of the time
        for axes in [*panels]:
            axes.set_axis_off()
        figure.axes[0].legend()
        figure.savefig(path, dpi=90)


def ratios(comparison: Comparison, name: str, tasks: Sequence[Task], *, time: bool) -> list[float]:
    """On each task, this optimizer's steps (or time) to the target over the least of all."""
    found = []
    for task in tasks:
        target, costs = comparison.common(task), dict[str, float]()
        for other, cell in comparison.of(task).items():
            steps = cell.steps_to(target)
            each = cell.step_ms if time else 1.0
            costs[other] = math.inf if steps is None or each is None else steps * each
        least = min(costs.values(), default=math.inf)
        found.append(costs.get(name, math.inf) / least if math.isfinite(least) else math.inf)
    return found


def profile(comparison: Comparison, tasks: Sequence[Task], path: Path) -> None:
    """The share of tasks on which each optimizer needs at most so many times the best one's steps,
    or time, to the score that half of them reach, or to the minimum."""
    known = {x.name for x in comparison.contenders if not x.only}
    names = [REFERENCE, *[name for x in FAMILIES.values() for name in x if name in known]]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, time in zip(panels, (False, True), strict=True):
            for i, name in enumerate(names):
                own = ratios(comparison, name, tasks, time=time)
                steps = sorted(x for x in own if x <= 16)
                places = [1.0, *[x for x in steps for _ in (0, 1)], 16.0]
                shares = [k / len(own) for k in range(len(steps) + 1) for _ in (0, 1)]
                kind = {"color": "black", "lw": 2.2} if not i else {"color": COLOURS[(i - 1) % 6]}
                dashes = "-" if i < 7 else "--" if i < 12 else "-."
                title = next(x.title for x in comparison.contenders if x.name == name)
                axes.plot(places, shares, ls=dashes if i else "-", label=title, **kind)
            axes.set(xscale="log", xlim=(0.97, 16), ylim=(-0.01, 1.02))
            axes.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
            axes.xaxis.set_minor_formatter(NullFormatter())
            what = "time" if time else "steps"
            axes.set(
                title=what, xlabel=f"times the fewest {what}" if not time else "times the least"
            )
        panels[0].set_ylabel("share of tasks")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
        figure.savefig(path, dpi=110)


def overall(comparison: Comparison, tasks: Sequence[Task], name: str) -> float:
    """The mean place of an optimizer on tasks where it takes part, 0 the first and 1 the last."""
    places = []
    for task in tasks:
        scores = {n: logarithm(median(c.scores)) for n, c in comparison.of(task).items()}
        if name in scores and len(scores) > 1:
            before = sum([x < scores[name] for x in scores.values()])
            ties = sum([x == scores[name] for x in scores.values()]) - 1
            places.append((before + ties / 2) / (len(scores) - 1))
    return sum(places) / len(places) if places else math.nan
