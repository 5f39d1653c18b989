"""What the user of `gradient_free.py` sees: a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from rich.table import Table
from torch import Tensor

SHOWN = (0, 5, 12, 20, 30, 45)
"""The generations of CMA-ES that are drawn."""
INK, POINTS, SHAPE = "#22313f", "#c0392b", "#e67e22"


class Point(NamedTuple):
    """How good the network was after so many generations and seconds."""

    generation: int
    seconds: float
    accuracy: float


class Generation(NamedTuple):
    """What CMA-ES tried, (n, 2), from which normal distribution, and its best loss before that."""

    candidates: Tensor
    mean: Tensor
    covariance: Tensor
    best: float


def rosenbrock(x: Tensor) -> Tensor:
    """(n, 2) → (n,): a curved valley with its lowest point at (1, 1)."""
    a, b = x.unbind(-1)
    return 100 * (b - a**2) ** 2 + (1 - a) ** 2


def table(curve: list[Point], population: int) -> Table:
    """The accuracy on the way."""
    found = Table(
        title="Digits by evolution: accuracy on 450 test pictures, seconds with compiling"
    )
    for heading in ("generations", "evaluations", "seconds", "accuracy"):
        found.add_column(heading, justify="right")
    every = max(1, (len(curve) - 1) // 10)
    for point in [*curve[:-1:every], curve[-1]]:
        found.add_row(
            str(point.generation),
            f"{point.generation * population:,}",
            f"{point.seconds:.1f}",
            f"{point.accuracy:.1%}",
        )
    return found


def plot(curve: list[Point], found: list[Generation], population: int, path: Path) -> None:
    """CMA-ES through the valley on the left, the learning curve on the right."""
    figure = Figure(figsize=(15, 6.6), layout="constrained")
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=[1.65, 1])[0]
    panels = left.subplots(2, 3, sharex=True, sharey=True)
    left.suptitle(
        "CMA-ES in Rosenbrock's valley: 8 candidates and the distribution they come from",
        color=INK,
    )
    for axes, k in zip(panels.flat, SHOWN, strict=True):
        panel(axes, found, k)
    right.suptitle(f"Digits without a backward pass: openai_es, {population} candidates", color=INK)
    learning(right.subplots(), curve)
    figure.savefig(path, dpi=130)


def panel(axes: Axes, found: list[Generation], k: int) -> None:
    """One generation over the contours of the function."""
    a, b = np.meshgrid(np.linspace(-2.1, 2.1, 240), np.linspace(-1.1, 3.3, 240))
    heights = np.log10(rosenbrock(torch.tensor(np.stack([a, b], -1))).numpy() + 0.1)
    axes.contourf(a, b, heights, levels=14, cmap="Blues_r", alpha=0.75)
    axes.contour(a, b, heights, levels=14, colors="white", linewidths=0.5, alpha=0.8)
    path = torch.stack([one.mean for one in found[: k + 1]]).numpy()
    axes.plot(*path.T, color=INK, linewidth=1.2)
    now = found[k]
    values, vectors = np.linalg.eigh(now.covariance.numpy())
    angle = np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1]))
    for times in (1, 2):
        width, height = 2 * times * np.sqrt(values[::-1])
        ellipse = Ellipse(
            tuple(now.mean.tolist()), width, height, angle=angle, fill=False, color=SHAPE, lw=1.6
        )
        axes.add_patch(ellipse)
    axes.scatter(*now.candidates.numpy().T, s=22, color=POINTS, edgecolor="white", lw=0.6, zorder=3)
    axes.plot(1, 1, "*", color="#f1c40f", markeredgecolor=INK, markersize=13, zorder=2)
    best = "" if k == 0 else f", best loss {now.best:.1g}"
    axes.set_title(f"generation {k}{best}", fontsize=10, color=INK)
    axes.set_xlim(-2.1, 2.1)
    axes.set_ylim(-1.1, 3.3)
    axes.tick_params(labelsize=8)


def learning(axes: Axes, curve: list[Point]) -> None:
    """The accuracy over generations."""
    generations = [point.generation for point in curve]
    right = [100 * point.accuracy for point in curve]
    axes.plot(generations, right, color=POINTS, linewidth=2)
    axes.axhline(90, color=INK, linewidth=1, linestyle=(0, (5, 4)))
    axes.annotate(
        "90 %",
        (generations[-1], 90),
        (0, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        color=INK,
    )
    for point in curve:
        if point.accuracy >= 0.9:
            axes.plot(point.generation, 100 * point.accuracy, "o", color=POINTS)
            axes.annotate(
                f"{point.generation} generations",
                (point.generation, 100 * point.accuracy),
                (10, -22),
                textcoords="offset points",
                color=POINTS,
            )
            break
    axes.set_title("64-32-10 network, 2,410 numbers", fontsize=10, color=INK)
    axes.set_xlabel("generation")
    axes.set_ylabel("test accuracy [%]")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
