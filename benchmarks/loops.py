"""Measures the loops of docs/training_loops.md: python benchmarks/loops.py

Prints their table, and draws docs/training_loops.png.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path

from fresh import fresh
from matplotlib.figure import Figure
from rows import Effort

PICTURE = Path(__file__).parents[1] / "docs" / "training_loops.png"

LOOPS = {
    "eager": "eager model, our AdamW",
    "object": "compiled model, our AdamW",
    "ours": "compile_train_step",
    "graph": "one graph",
    "theirs": "compiled model, torch's fused AdamW",
}

EFFORT = Effort(seconds=20.0)
PROCESSES = 2


def main() -> None:
    """Measure, print and draw."""
    compiling, steps = {}, {}
    for side in LOOPS:
        found = [fresh("train_compile", side=side, quick=False) for _ in range(PROCESSES)]
        compiling[side] = min([x["seconds"] for x in found])
        pair = fresh("train_steps", side=side, effort=asdict(EFFORT))
        mine, other = pair["ours"], pair["theirs"]
        medians = statistics.median(mine) / statistics.median(other)
        steps[side] = (min(mine) / min(other), medians)
    print("| loop | first step | step / torch's, minima; medians |")
    print("| --- | --- | --- |")
    for side, words in LOOPS.items():
        ratio, medians = steps[side]
        print(f"| {words} | {compiling[side]:.1f} s | {ratio:.2f}; {medians:.2f} |")
    draw(compiling, {side: ratio for side, (ratio, *_) in steps.items()})


def draw(compiling: dict[str, float], steps: dict[str, float]) -> None:
    """Two rows of bars: the first step, which compiles, and every other one, as ratios."""
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, values, words, form in (
        (left, compiling, "first step, seconds", "%.1f"),
        (right, steps, "each step / one of torch's loop", "%.2f"),
    ):
        shown = [values[side] for side in LOOPS]
        colors = ["#9ecae1" if side != "theirs" else "#fdae6b" for side in LOOPS]
        bars = axes.barh(list(LOOPS.values()), shown, color=colors, height=0.7)
        axes.bar_label(bars, fmt=form, padding=3, fontsize=8)
        axes.set_xlim(0, 1.15 * max(shown))
        axes.set_title(words, loc="left", fontsize=9.5)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8.5)
    left.invert_yaxis()
    figure.savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main()
