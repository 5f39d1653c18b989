"""A training as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from functional_optim.tuning.findings import HIGH, LOW, USUAL
from functional_optim.tuning.history import NORMS, History, Series, measure_of

LEGEND = 8
"""How many lines a panel names; more are told apart by color alone."""
SIZE = (5.2, 3.2)
"""Inches of a panel."""


def picture(history: History) -> Any:
    """A figure of what was recorded, in panels. A dotted line is where the first NaN was recorded,
    a dashed one in a gray band the usual update/weight.

    Raises:
        ImportError: without matplotlib.
        ValueError: if nothing was recorded that it shows.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "plot draws with matplotlib, which is not installed; install it with "
            "`pip install matplotlib`, or print the report."
        ) from None
    panels = _panels(history)
    if not panels:
        raise ValueError(
            "there is nothing to plot: the history has no loss and no measurement that plot knows; "
            "record fo.numbers(state) of a monitor with fo.measures.diagnostics."
        )
    steps = [step for x in history.whole.values() for step in x.steps]
    steps += [step for each in history.parts.values() for x in each.values() for step in x.steps]
    room = 0.03 * (max(steps) - min(steps)) or 0.5
    broken = history.broken().values()
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(SIZE[0] * columns, SIZE[1] * rows), layout="constrained")
    for i, (title, draw) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        draw(axes)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.set_xlim(min(steps) - room, max(steps) + room)
        if broken:
            axes.axvline(min(broken), color="crimson", linewidth=1, linestyle=":")
        axes.grid(alpha=0.3)
        if 1 < len(axes.get_legend_handles_labels()[1]) <= LEGEND:
            axes.legend(fontsize=7)
    return figure


def _panels(history: History) -> dict[str, Callable[[Any], None]]:
    """What draws each panel, by its title."""
    found: dict[str, Callable[[Any], None]] = {}
    whole, several = history.whole, len(history.parts.get("update_ratio", ())) > 1
    order = ", first parameter dark, last light" if several else ""
    if "loss" in whole:
        found["loss"] = lambda axes: _lines(axes, {"loss": whole["loss"]})
    norms = {name: whole[name] for name in NORMS if name in whole}
    if norms:
        found["norms of the model"] = lambda axes: _lines(axes, norms, log=True)
    if ratios := history.each("update_ratio"):
        found[f"update/weight{order}"] = lambda axes: _draw_ratios(axes, ratios)
    if cosines := history.each("cosine"):
        found[f"cosine of −update and gradient{order}"] = lambda axes: _draw_cosines(axes, cosines)
    clipped = history.clipped()
    if clipped:
        found["share of clipped steps"] = lambda axes: _draw_share(axes, clipped)
    rates = {name: x for name, x in whole.items() if measure_of(name) in ("lr", "effective_lr")}
    if rates:
        found["learning rate"] = lambda axes: _lines(axes, rates, log=True)
    return found


def _draw_ratios(axes: Any, ratios: Mapping[str, Series]) -> None:
    axes.axhspan(LOW, HIGH, color="0.93", zorder=0)
    axes.axhline(USUAL, color="0.5", linewidth=1, linestyle="--", zorder=1)
    _lines(axes, ratios, log=True)


def _draw_cosines(axes: Any, cosines: Mapping[str, Series]) -> None:
    axes.axhline(0.0, color="0.5", linewidth=1, linestyle="--", zorder=1)
    _lines(axes, cosines)


def _draw_share(axes: Any, share: Series) -> None:
    _lines(axes, {"clipped": share})
    axes.set_ylim(-0.05, 1.05)


def _lines(axes: Any, each: Mapping[str, Series], *, log: bool = False) -> None:
    """A line for each series; on a logarithmic axis of what is above 0."""
    from matplotlib import colormaps

    shades = colormaps["viridis"]
    for i, (name, series) in enumerate(each.items()):
        pairs = zip(*series.finite(), strict=True)
        shown = Series.of([pair for pair in pairs if pair[1] > 0 or not log])
        color = shades(0.9 * i / max(len(each) - 1, 1))
        marker = "." if len(shown.steps) == 1 else ""
        axes.plot(shown.steps, shown.values, label=name, color=color, linewidth=1.2, marker=marker)
    if log:
        axes.set_yscale("log")
