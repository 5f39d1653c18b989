"""The picture: each row's ratio, on a logarithmic axis."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from rows import Result

OURS, THEIRS = "#3182bd", "#e6550d"
TICKS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]


def label(result: Result) -> str:
    rival = result.measured.rival if result.measured else ""
    beside = f" / {rival}" if result.row.name.startswith("peer-") else ""
    return f"{result.row.what}{beside} — {result.row.workload}"


def plot(results: list[Result], path: Path) -> None:
    """Draw ours / theirs for every row that has a ratio; the rows without one are not in it."""
    shown = [(label(r), r, ratio) for r in results if (ratio := r.ratio())]
    figure = Figure(figsize=(11, 2 + 0.27 * len(shown)), layout="constrained")
    axes = figure.subplots()
    ratios = [ratio for _, _, ratio in shown]
    low, high = min([0.5, *ratios]) / 1.3, max([2.0, *ratios]) * 1.6
    colors = [OURS if ratio <= 1 else THEIRS for ratio in ratios]
    places = range(len(shown))
    axes.barh(places, [x / low for x in ratios], left=low, color=colors, height=0.7)
    for place, (_, result, ratio) in zip(places, shown, strict=True):
        axes.text(ratio * 1.02, place, f"{ratio:.2f}", va="center", fontsize=8)
        if result.row.judged == "ratio" and result.row.bars:
            axes.plot([result.row.bars[-1]] * 2, [place - 0.45, place + 0.45], "k", linewidth=2)
    axes.axvline(1.0, color="crimson", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator([x for x in TICKS if low <= x <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_yticks(places, [text for text, _, _ in shown], fontsize=8)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_xlabel("ours / theirs, of the minima: below 1 we are faster (or smaller)")
    axes.set_title("functional_optim against the best of torch.optim, and other libraries")
    marks = [
        Line2D([], [], color="black", linewidth=2, label="the bar"),
        Line2D([], [], color="crimson", linewidth=1, label="as good as theirs"),
    ]
    axes.legend(handles=marks, loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)
