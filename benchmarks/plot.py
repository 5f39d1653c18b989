"""The picture: each row's ratio, on a logarithmic axis."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from rows import Result

OURS, THEIRS, BAR = "#9ecae1", "#fdae6b", "#a50f15"
TICKS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]


def label(result: Result) -> str:
    rival = result.measured.rival if result.measured else ""
    beside = f" / {rival}" if result.row.name.startswith("peer-") else ""
    return f"{result.row.what}{beside} — {result.row.workload}"


def plot(results: list[Result], path: Path) -> None:
    """Draw ours / theirs for every row that is about this ratio."""
    shown = [(r, ratio) for r in results if r.row.judged == "ratio" and (ratio := r.ratio())]
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
