"""Draws the pictures of these pages: python docs/plots.py [folder]"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from functional_optim import schedules
from functional_optim.numeric import Schedule

STEPS = 100
COLUMNS = 3
COLOURS = ("#0072B2", "#D55E00", "#009E73")  # Okabe and Ito: distinguishable with colour blindness
STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.grid": True,
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "grid.color": "#e6e6e6",
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "legend.handlelength": 1.2,
    "legend.labelspacing": 0.25,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "xtick.color": "#888888",
    "xtick.labelcolor": "#333333",
    "ytick.color": "#888888",
    "ytick.labelcolor": "#333333",
}

SCHEDULES: dict[str, tuple[str, ...]] = {
    "constant": ("constant(0.5)",),
    "linear": ("linear(1.0, 0.1, 60, transition_begin=20)",),
    "polynomial": (
        "polynomial(1.0, 0.0, power=2, transition_steps=100)",
        "polynomial(1.0, 0.0, power=0.5, transition_steps=100)",
    ),
    "cosine_decay": (
        "cosine_decay(1.0, 100)",
        "cosine_decay(1.0, 100, alpha=0.2, exponent=2)",
    ),
    "exponential_decay": (
        "exponential_decay(1.0, 20, 0.5)",
        "exponential_decay(1.0, 20, 0.5, staircase=True)",
    ),
    "piecewise_constant": ("piecewise_constant(1.0, {30: 0.5, 70: 0.4})",),
    "piecewise_interpolate": (
        "piecewise_interpolate('linear', 1.0, {30: 0.5, 70: 0.4})",
        "piecewise_interpolate('cosine', 1.0, {30: 0.5, 70: 0.4})",
    ),
    "linear_onecycle": ("linear_onecycle(100, 1.0)",),
    "cosine_onecycle": ("cosine_onecycle(100, 1.0)",),
    "warmup": (
        "warmup(polynomial(1.0, 0.0, 2, 70), 30, 0.05)",
        "warmup(polynomial(1.0, 0.0, 2, 70), 30, 0.05, 'exponential')",
        "warmup(polynomial(1.0, 0.0, 2, 70), 30, 0.05, 'constant')",
    ),
    "warmup_constant": ("warmup_constant(0.0, 1.0, 20)",),
    "warmup_cosine_decay": ("warmup_cosine_decay(0.0, 1.0, 20, 100, end_value=0.1)",),
    "warmup_exponential_decay": ("warmup_exponential_decay(0.0, 1.0, 20, 20, 0.5)",),
    "warmup_stable_decay": (
        "warmup_stable_decay(0.0, 1.0, 10, 50, 40)",
        "warmup_stable_decay(0.0, 1.0, 10, 50, 40, kind='cosine')",
        "warmup_stable_decay(0.0, 1.0, 10, 50, 40, kind='1-sqrt')",
    ),
    "inverse_square_root": ("inverse_square_root(1.0, warmup_steps=15)",),
    "sgdr": (
        "sgdr([dict(init_value=0.0, peak_value=peak, warmup_steps=4, decay_steps=steps) "
        "for peak, steps in [(1.0, 20), (0.8, 30), (0.6, 50)]])",
    ),
    "join": ("join([linear(0.2, 1.0, 30), constant(0.7), cosine_decay(0.7, 40)], [30, 60])",),
    "from_torch": ("from_torch(CyclicLR(opt, 0.1, 1.0, step_size_up=15, mode='triangular2'))",),
}
"""The plotted calls by name; the page shows the first one."""

LABELS: dict[str, tuple[str, ...]] = {
    "polynomial": ("power 2", "power 0.5"),
    "cosine_decay": ("alpha 0, exponent 1", "alpha 0.2, exponent 2"),
    "exponential_decay": ("smooth", "staircase"),
    "piecewise_interpolate": ("linear", "cosine"),
    "warmup": ("linear", "exponential", "constant"),
    "warmup_stable_decay": ("linear", "cosine", "1-sqrt"),
    "from_torch": ("CyclicLR",),
}
"""The legend of panels with several curves."""


def build(call: str) -> Schedule:
    """The schedule that a call returns; `opt` is an optimizer of torch."""
    opt = torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.9)
    names: dict[str, Any] = {**vars(torch.optim.lr_scheduler), **vars(schedules), "opt": opt}
    return eval(call, names)


def draw(panel: Any, name: str) -> None:
    """All curves of one name."""
    counts = [k / 10 for k in range(10 * STEPS + 1)]
    labels = LABELS.get(name, ("",) * len(SCHEDULES[name]))
    for i, (call, label) in enumerate(zip(SCHEDULES[name], labels, strict=True)):
        schedule = build(call)
        line = {"color": COLOURS[i], "label": label or None, "zorder": 3 - i / 10}  # first on top
        panel.plot(counts, [schedule(k) for k in counts], **line)
    if any(labels):
        low = name == "warmup_stable_decay"
        panel.legend(loc="lower center" if low else "upper right", borderaxespad=0.1)
    panel.set_title(name)


def plot_schedules(path: Path) -> None:
    """One panel for each schedule."""
    rows = -(-len(SCHEDULES) // COLUMNS)
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE}):
        figure = Figure(figsize=(9.6, 1.75 * rows), dpi=120, layout="constrained")
        panels = figure.subplots(rows, COLUMNS, sharex=True, sharey=True)
        for panel, name in zip(panels.flat, SCHEDULES, strict=True):
            draw(panel, name)
        for panel in panels[-1]:
            panel.set_xlabel("step")
        for panel in panels[:, 0]:
            panel.set_ylabel("value")
        panels[0, 0].set(xlim=(0, STEPS), ylim=(-0.03, 1.08), yticks=(0, 0.5, 1))
        figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    plot_schedules(folder / "schedules.png")
