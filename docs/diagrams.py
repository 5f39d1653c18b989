"""Draws choosing.svg, overview.svg and speed.svg: python docs/diagrams.py [folder]

The pictures are narrow, so that they can be read on a phone, and transparent: what stands outside
of a box is legible on white and on black.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

from speed import measured, setup_of_cpu, setup_of_gpu

QUESTIONS = (
    ("No gradients?", "fo.search.cma_es, openai_es", "hundreds of parameters; networks"),
    ("Deterministic loss (full batch)?", "fo.lbfgs", "fits, physics, regression"),
    (
        "Little memory?",
        'fo.stored(tx, "int8"), fo.adafactor',
        "a quarter of the state; almost none",
    ),
    ("No time to tune?", "fo.prodigy", "finds its own rate; lr = 1"),
    ("Unknown length of training?", "fo.schedule_free_adamw", "stop whenever you like"),
    ("Hidden matrices?", "fo.muon_adamw, fo.soap", "fewest steps; each costs more"),
    ("A proven SGD recipe?", "fo.sgd", "convolutional networks; least state"),
)
"""What to ask in this order; what to take if the answer is yes, and a word about it."""

FINE = 86
"""Letters of fine print in a line."""

OTHERWISE = ("fo.adamw", "with warm-up, decay, and clipping at 1")
RULE = """def update(g, slots, p, a1, a2):
    m = slots.exp_avg
    d = (m + a1 * (g - m)).sign()
    m = m + a2 * (g - m)
    return d, LionSlots(m)"""
MADE = (
    ("a pure transform over any pytree", "tx.update(grads, state, params)"),
    ("one kernel for all models and rates", "fo.compile(tx)"),
    ("a torch.optim.Optimizer", "Optimizer(params, lion)"),
    ("many models at once", "torch.vmap(train_step)"),
    ("gradients through training", "torch.func.grad(loss_after)(lr)"),
)
"""What becomes of a rule, and how one asks for it."""

STYLE = {"font.family": "DejaVu Sans", "font.size": 10, "svg.hashsalt": "functional_optim"}
ASKED, TAKEN, LINE = "#dfe9f5", "#fdeed6", "#8c8c8c"
INK, FAINT, OUTSIDE = "#1b1b1b", "#4d4d4d", "#767676"
BAR = "#3a8fd9"
WIDTH, INDENT = 4.8, 0.55
MONO = {"family": "DejaVu Sans Mono", "va": "center", "color": INK}


@contextmanager
def canvas(path: Path, height: float, *says: str) -> Iterator[Any]:
    """Axes in inches, from the upper left corner down; what is drawn there is written.

    says: the picture in words, which the file keeps.

    Raises:
        ValueError: if a text ends outside of the picture.
    """
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE}):
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, WIDTH), ylim=(-height, 0))
        axes.set_axis_off()
        yield axes
        for text in axes.texts:
            at = text.get_window_extent()
            if not (figure.bbox.contains(at.x0, at.y0) and figure.bbox.contains(at.x1, at.y1)):
                raise ValueError(f"{path.name} has no room for the text {text.get_text()!r}.")
        told = {"Date": None, "Description": "\n".join(says)}
        figure.savefig(path, transparent=True, metadata=told)


def box(axes: Any, x: float, y: float, height: float, colour: str) -> None:
    """A box from x to the right margin, whose middle is at y."""
    corner, width = (x, y - height / 2), WIDTH - x - 0.05
    shape = {"boxstyle": "round,pad=0,rounding_size=0.07", "facecolor": colour}
    axes.add_patch(FancyBboxPatch(corner, width, height, edgecolor=LINE, linewidth=0.8, **shape))


def answer(axes: Any, y: float, name: str, word: str) -> None:
    """What to take."""
    box(axes, INDENT, y, 0.46, TAKEN)
    axes.text(INDENT + 0.12, y + 0.09, name, fontsize=9.5, **MONO)
    axes.text(INDENT + 0.12, y - 0.11, word, fontsize=9, va="center", color=FAINT)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "color": LINE, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def branch(axes: Any, x: float, top: float, y: float) -> None:
    """Down from `top`, then to the right to an answer."""
    axes.plot([x, x], [top, y], color=LINE, linewidth=1)
    arrow(axes, (x, y), (INDENT, y))


def plot_decisions(path: Path) -> None:
    """Questions from top to bottom, each with its answer."""
    step = 1.2
    says = [f"{question} {name}" for question, name, _ in QUESTIONS]
    says.append(f"Otherwise {OTHERWISE[0]}")
    with canvas(path, step * len(QUESTIONS) + 0.98, *says) as axes:
        for i, (question, name, word) in enumerate(QUESTIONS):
            y = -0.2 - step * i
            box(axes, 0.05, y, 0.32, ASKED)
            axes.text(0.17, y, question, va="center", color=INK)
            arrow(axes, (0.15, y - 0.16), (0.15, y - step + 0.16))
            axes.text(0.19, y - 0.93, "no", va="center", fontsize=9, color=OUTSIDE)
            branch(axes, 0.33, y - 0.16, y - 0.58)
            axes.text(0.37, y - 0.26, "yes", va="center", fontsize=9, color=OUTSIDE)
            answer(axes, y - 0.58, name, word)
        y = -0.2 - step * len(QUESTIONS)
        box(axes, 0.05, y, 0.32, ASKED)
        axes.text(0.17, y, "Otherwise", va="center", color=INK)
        branch(axes, 0.33, y - 0.16, y - 0.5)
        answer(axes, y - 0.5, *OTHERWISE)


def plot_overview(path: Path) -> None:
    """A rule at the top, and below it what is made of it."""
    with canvas(path, 1.65 + 0.56 * len(MADE), RULE, *[how for _, how in MADE]) as axes:
        axes.text(0.05, -0.12, "You write the rule for one tensor", va="center", color=OUTSIDE)
        axes.add_patch(Rectangle((0.05, -1.4), WIDTH - 0.1, 1.15, ec=LINE, fc=ASKED, lw=0.8))
        axes.text(0.17, -0.825, RULE, linespacing=1.45, fontsize=9.5, **MONO)
        for i, (what, how) in enumerate(MADE):
            y = -1.8 - 0.56 * i
            branch(axes, 0.25, -1.4, y)
            answer(axes, y, how, what)


def plot_speed(path: Path) -> None:
    """A bar for each measured step: ours as a part of theirs."""
    rows, step, below = measured(), 0.66, (setup_of_cpu(), setup_of_gpu())
    says = [f"{x.what} ({x.where}): {x.ours} / {x.theirs}" for x in rows]
    title = "Time of a step, ours / theirs"
    lines = [line for text in below for line in textwrap.wrap(text, FINE)]
    with canvas(path, step * len(rows) + 0.45 + 0.15 * len(lines), title, *says, *below) as axes:
        axes.text(0.05, -0.12, title, va="center", color=OUTSIDE)
        for i, row in enumerate(rows):
            y, whole = -0.36 - step * i, WIDTH - 0.65
            axes.text(0.05, y, f"{row.what} ({row.where})", va="center", fontsize=9, color=OUTSIDE)
            low = {"linewidth": 0.8, "edgecolor": LINE}
            axes.add_patch(Rectangle((0.05, y - 0.29), whole, 0.17, facecolor="none", **low))
            axes.add_patch(
                Rectangle((0.05, y - 0.29), whole * row.ratio, 0.17, facecolor=BAR, **low)
            )
            at = {"va": "center", "color": OUTSIDE}
            axes.text(WIDTH - 0.55, y - 0.205, f"{row.ratio:.2f}", fontsize=10, **at)
            axes.text(0.05, y - 0.39, f"{row.ours} / {row.theirs}", fontsize=8, **at)
        y = -0.33 - step * len(rows)
        at = {"va": "top", "color": OUTSIDE, "linespacing": 1.4}
        axes.text(0.05, y, "\n".join(lines), fontsize=7, **at)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    plot_overview(folder / "overview.svg")
    plot_decisions(folder / "choosing.svg")
    plot_speed(folder / "speed.svg")
