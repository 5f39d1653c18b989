"""The picture: each row's ratio, on a logarithmic axis."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from rows import Result
from traffic import ADAMW

OURS, THEIRS, BAR = "#9ecae1", "#fdae6b", "#a50f15"
TICKS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]


def label(result: Result) -> str:
    rival = result.measured.rival if result.measured else ""
    compared = f" / {rival}" if result.row.name.startswith("peer-") else ""
    return f"{result.row.what}{compared} — {result.row.workload}"


def plot(results: list[Result], path: Path) -> None:
    """Draw ours / theirs for every row that is about this ratio, but for losses and traffic."""
    about = [r for r in results if r.row.judged == "ratio" and r.row.unit != "loss"]
    shown = [(r, ratio) for r in about if not r.row.words and (ratio := r.ratio())]
    ratios = [ratio for _, ratio in shown]
    low, high = min([0.5, *ratios]) / 1.2, max([2.0, *ratios]) * 1.2
    figure = Figure(figsize=(12, 2.2 + 0.27 * len(shown)), layout="constrained")
    axes = figure.subplots()
    places = range(len(shown))
    colors = [OURS if ratio <= 1 else THEIRS for ratio in ratios]
    axes.barh(places, [x - 1 for x in ratios], left=1, color=colors, height=0.7)
    for place, (result, ratio) in zip(places, shown, strict=True):
        beside = axes.get_yaxis_transform()
        axes.text(1.01, place, f"{ratio:.2f}", transform=beside, va="center", fontsize=8)
        for bar in result.row.bars[-1:]:
            axes.plot([bar, bar], [place - 0.45, place + 0.45], color=BAR, linewidth=2)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator([x for x in TICKS if low <= x <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_yticks(places, [label(result) for result, _ in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_xlabel("ours / theirs, of the minima: below 1 ours needs less")
    axes.set_title("functional_optim against the best of torch.optim, and other libraries")
    marks = [
        Patch(color=OURS, label="ours needs less"),
        Patch(color=THEIRS, label="theirs needs less"),
        Line2D([], [], color=BAR, linewidth=2, label="the bar"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), fontsize=8)
    figure.savefig(path, dpi=120)


def plot_traffic(results: list[Result], path: Path) -> None:
    """Draw time over limit of the rows that have words and a bar: a mark for each workload."""
    found: dict[str, dict[str, float]] = {}
    for r in results:
        if r.row.words and r.row.bars and (ratio := r.ratio()):
            found.setdefault(r.row.what.strip("`"), {})[r.row.workload] = (
                ratio * ADAMW / r.row.words
            )
    kinds = list(dict.fromkeys([kind for own in found.values() for kind in own]))
    figure = Figure(figsize=(9, 1.8 + 0.24 * len(found)), layout="constrained")
    axes = figure.subplots()
    marks = zip(
        kinds, ("o", "s", "^", "D"), ("#3182bd", "#9ecae1", "#e6550d", "#fdae6b"), strict=False
    )
    for kind, mark, color in marks:
        points = [(own[kind], place) for place, own in enumerate(found.values()) if kind in own]
        x, y = zip(*points, strict=True)
        axes.scatter(x, y, marker=mark, color=color, label=kind, s=28, zorder=3)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.axvline(1.15, color=BAR, linewidth=1, linestyle="--", label="the bar, 1.15")
    axes.set_xscale("log")
    every = [x for own in found.values() for x in own.values()]
    low, high = min([0.5, *every]) / 1.1, max([2.0, *every]) * 1.1
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator([x for x in TICKS if low <= x <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_yticks(range(len(found)), list(found), fontsize=8)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.grid(alpha=0.3)
    axes.set_xlabel("time of a step over the time that its memory traffic takes")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=120)
