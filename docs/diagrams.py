"""Draws choosing.png and overview.png: python docs/diagrams.py [folder]"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

QUESTIONS = (
    ("Is there no gradient?", "fo.search.cma_es, openai_es", "hundreds of parameters; networks"),
    ("Has the loss no noise?", "fo.lbfgs", "full batches: fits, physics, regression"),
    (
        "Is memory short?",
        'fo.stored(tx, "int8"), fo.adafactor',
        "a quarter of AdamW's state; little",
    ),
    ("Is there no time to tune?", "fo.prodigy", "finds its own rate; lr = 1"),
    ("Is the length not known?", "fo.schedule_free_adamw", "stop whenever you like"),
    ("Has the model hidden matrices?", "fo.muon_adamw, fo.soap", "fewest steps; each costs more"),
    ("Is there a proven SGD recipe?", "fo.sgd", "convolutional networks; least state"),
)
"""What to ask in this order; what to take if the answer is yes, and a word about it."""

OTHERWISE = ("fo.adamw", "with a warm-up, a decay of the rate, and clipping at 1")
RULE = """def update(g, slots, p, a1, a2):
    m = slots.exp_avg
    d = (m + a1 * (g - m)).sign()
    m = m + a2 * (g - m)
    return d, LionSlots(m)"""
MADE = (
    ("a pure transform over any pytree", "tx.update(grads, state, params)"),
    ("one kernel for all models and numbers", "fo.compile(tx)"),
    ("a torch.optim.Optimizer", "Optimizer(params, lion)"),
    ("many models at once", "torch.vmap(train_step)"),
    ("gradients through training", "torch.func.grad(loss_after)(lr)"),
)
"""What becomes of a rule, and how one asks for it."""

STYLE = {"font.family": "DejaVu Sans", "font.size": 10}
ASKED, TAKEN, LINE = "#e8eef5", "#fdf0dc", "#888888"
LEFT, RIGHT, WIDTH, HEIGHT = 0.0, 4.6, 3.7, 0.62


def box(axes: Any, x: float, y: float, width: float, colour: str) -> None:
    """A box whose left end is at x, and its middle at y."""
    corner = (x, y - HEIGHT / 2)
    shape = {"boxstyle": "round,pad=0,rounding_size=0.12", "facecolor": colour}
    axes.add_patch(FancyBboxPatch(corner, width, HEIGHT, edgecolor=LINE, linewidth=0.8, **shape))


def answer(axes: Any, y: float, name: str, word: str) -> None:
    """What to take."""
    box(axes, RIGHT, y, WIDTH, TAKEN)
    at = {"ha": "center", "va": "center"}
    axes.text(RIGHT + WIDTH / 2, y + 0.11, name, family="DejaVu Sans Mono", fontsize=9.5, **at)
    axes.text(RIGHT + WIDTH / 2, y - 0.15, word, fontsize=8, color="#555555", **at)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "color": LINE, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def plot_decisions(path: Path) -> None:
    """A column of questions, and an answer beside each."""
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE}):
        figure = Figure(figsize=(8.6, 0.9 * (len(QUESTIONS) + 1)), dpi=110, layout="constrained")
        axes = figure.subplots()
        for i, (question, name, word) in enumerate(QUESTIONS):
            y = -float(i)
            box(axes, LEFT, y, WIDTH, ASKED)
            axes.text(LEFT + WIDTH / 2, y, question, ha="center", va="center")
            arrow(axes, (LEFT + WIDTH, y), (RIGHT, y))
            axes.text((LEFT + WIDTH + RIGHT) / 2, y + 0.07, "yes", ha="center", fontsize=8)
            down = 1 - HEIGHT / 2
            arrow(axes, (LEFT + WIDTH / 2, y - HEIGHT / 2), (LEFT + WIDTH / 2, y - down))
            axes.text(LEFT + WIDTH / 2 + 0.07, y - 0.5, "no", va="center", fontsize=8)
            answer(axes, y, name, word)
        last = -float(len(QUESTIONS))
        box(axes, LEFT, last, WIDTH, ASKED)
        axes.text(LEFT + WIDTH / 2, last, "Otherwise", ha="center", va="center")
        arrow(axes, (LEFT + WIDTH, last), (RIGHT, last))
        answer(axes, last, *OTHERWISE)
        axes.set(xlim=(LEFT - 0.1, RIGHT + WIDTH + 0.1), ylim=(last - 0.4, 0.4))
        axes.set_aspect("equal")
        axes.set_axis_off()
        figure.savefig(path, metadata={"Software": None})


def plot_overview(path: Path) -> None:
    """A rule on the left, what is made of it on the right."""
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE}):
        figure = Figure(figsize=(8.6, 3.9), dpi=110, layout="constrained")
        axes = figure.subplots()
        middle = -(len(MADE) - 1) / 2
        axes.add_patch(Rectangle((LEFT, middle - 1.1), WIDTH, 2.2, ec=LINE, fc=ASKED, lw=0.8))
        axes.text(LEFT, middle + 1.22, "You write the rule for one tensor", fontsize=9.5)
        mono = {"family": "DejaVu Sans Mono", "fontsize": 9, "va": "center"}
        axes.text(LEFT + 0.15, middle, RULE, linespacing=1.5, **mono)
        for i, (what, how) in enumerate(MADE):
            arrow(axes, (LEFT + WIDTH, middle), (RIGHT, -float(i)))
            answer(axes, -float(i), how, what)
        axes.set(xlim=(LEFT - 0.1, RIGHT + WIDTH + 0.1), ylim=(-len(MADE) + 0.5, 0.5))
        axes.set_aspect("equal")
        axes.set_axis_off()
        figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    plot_overview(folder / "overview.png")
    plot_decisions(folder / "choosing.png")
