"""`report`: a text and a picture of the recorded scalars of a training run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from functional_optim.tuning.history import (
    HIGH,
    LOW,
    NORMS,
    USUAL,
    History,
    Series,
    findings,
    measure_of,
    median,
)
from functional_optim.tuning.tables import Table, drawn

MOST = 30
"""Number of parameters that the text shows."""
SHOWN = ("loss", "lr", "grad_norm", "update_norm", "param_norm", "effective_lr")
"""Scalars of the model that the text shows even if they never change."""


class Report:
    """A report on the recorded scalars of a training run. `print` shows tables and, below them, the
    findings.

    findings: sentences on problems; empty if there are none.

    Example::

        >>> import functional_optim as fo
        >>> falling = fo.report([{"loss": 1 / step, "grad_norm": 1.0} for step in range(1, 9)])
        >>> falling.findings
        []
        >>> broken = fo.report([{"loss": 2.0}, {"loss": float("nan")}])
        >>> print(broken.findings[0].partition(".")[0])
        NaN or infinity was first recorded at step 2, in loss
    """

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._history = History(records)
        self.findings: list[str] = findings(self._history)

    def plot(self) -> Any:
        """A matplotlib figure: loss, norms, update/weight and cosine of each parameter, the share
        of clipped steps and learning rates over the steps, if they were recorded. A dotted line
        marks the first NaN or infinity; a gray band extends from a tenth to ten times the usual
        update/weight of 1e-3.

        Save it with `figure.savefig("training.png")`.

        Raises:
            ImportError: without matplotlib.
            ValueError: if nothing was recorded that it shows."""
        return picture(self._history)

    def __str__(self) -> str:
        history = self._history
        tables = [table for table in (_of_model(history), _of_parameters(history)) if table.rows]
        count = f"{history.count} record{'s' * (history.count != 1)}"
        notes = [f"- {sentence}" for sentence in self.findings] or [
            f"Nothing stands out in {count}."
        ]
        return drawn([[table] for table in tables], notes)

    def __repr__(self) -> str:
        return f"<Report of {self._history.count} records, {len(self.findings)} findings>"


def report(history: Sequence[Mapping[str, Any]]) -> Report:
    """A text and a picture of the records of a training run, with findings on problems.

    Args:
        history: a dict of numbers for each step that was recorded: Python numbers or 0-dim tensors,
            by the names of `fo.numbers`, optionally with "loss" and "step". Measurements have the
            names of `fo.measures.diagnostics`, and "clip_share". Without "step", records are
            counted from 1.

    Findings:

    * NaN or infinity: the step and the places where they were recorded first;
    * a loss that is above its first value in all of the last quarter;
    * gradients that are exactly 0 in the second half of the records;
    * update/weight with a median above 1e-2 or below 1e-4 in the second half: about 1e-3 is usual,
      by Karpathy's rule of thumb, https://cs231n.github.io/neural-networks-3/#ratio; small
      parameters, such as biases that start at 0, may be above it for long without harm;
    * clips in more than 90 % of the steps of the second half: bounds from half to ten times the
      average norm work, by Pascanu, Mikolov, Bengio, https://arxiv.org/abs/1211.5063, section 3.2;
    * a cosine of −update and gradient with a median below 0 in the second half: steps point uphill.

    The factors of ten and the 90 % are choices of this package.

    Raises:
        TypeError: for anything but a list of dicts of numbers.
        ValueError: for an empty list.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.monitor(fo.measures.diagnostics, around=fo.sgd(lr=3.0), per_tensor=True)
        >>> w, history = {"w": torch.ones(2)}, []
        >>> state = tx.init(w)
        >>> for step in range(1, 5):  # of w²/2: too fast
        ...     u, state = tx.update(w, state, w)
        ...     history.append({"loss": (w["w"] ** 2).sum() / 2, **fo.numbers(state)})
        ...     w = fo.apply_updates(w, u)
        >>> for sentence in fo.report(history).findings:
        ...     print(sentence.split(" in ")[0].split(": ")[0])
        The loss rose
        update/weight has a median above 1e-02
    """
    return Report(history)


def _of_model(history: History) -> Table:
    """The scalars of the whole model that change, or that are in `KNOWN`."""
    rows = []
    share = history.clipped()
    whole = {**history.whole, **({"share of clipped steps": share} if share else {})}
    for name, series in whole.items():
        if measure_of(name) in SHOWN or len(set(series.values)) > 1:
            values = series.finite().values
            edges = (min(values), max(values)) if values else (math.nan, math.nan)
            cells = (series.values[0], series.values[-1], series.median(), *edges)
            rows.append((name, *[f"{x:.3g}" for x in cells]))
    head = ("model", "first", "last", "median", "least", "most")
    return Table(head, tuple(rows), right=(1, 2, 3, 4, 5))


def _of_parameters(history: History) -> Table:
    """The scalars of each parameter; if there are many, those whose ratios are furthest from the
    usual."""
    paths = list(dict.fromkeys([path for each in history.parts.values() for path in each]))
    ratios, title = history.parts.get("update_ratio", {}), ()
    if len(paths) > MOST:
        kept = set(sorted(paths, key=lambda path: -_distance(ratios.get(path)))[:MOST])
        title = (
            f"{MOST} of {len(paths)} parameters, with update/weight furthest from {USUAL:.0e}",
        )
        paths = [path for path in paths if path in kept]
    rows = []
    for path in paths:
        ratio = ratios.get(path, Series((), ())).finite().values
        spread = (ratio[-1], median(ratio), min(ratio), max(ratio)) if ratio else ()
        cells = [f"{x:.1e}" for x in spread] or [""] * 4
        for measure, form in (("cosine", ".2f"), ("grad_norm", ".1e")):
            series = history.parts.get(measure, {}).get(path)
            cells.append("" if series is None else format(series.median(), form))
        rows.append((path, *cells))
    head = ("update/weight", "last", "median", "least", "most", "cosine", "|gradient|")
    return Table(head, tuple(rows), title, right=(1, 2, 3, 4, 5, 6))


def _distance(ratio: Series | None) -> float:
    """The distance of a ratio from the usual one in powers of ten; infinite if it is not finite."""
    if ratio is None:
        return 0.0
    if len(ratio.finite().values) < len(ratio.values):
        return math.inf
    median = ratio.median()
    return abs(math.log10(median / USUAL)) if median > 0 else math.inf


LEGEND = 8
"""Number of lines that a panel names; with more lines, only colors distinguish them."""
SIZE = (5.2, 3.2)
"""Size of a panel in inches."""


def picture(history: History) -> Any:
    """A figure of the records, in panels. A dotted line marks the first NaN, a dashed line in a
    gray band the usual update/weight.

    Raises:
        ImportError: without matplotlib.
        ValueError: if nothing was recorded that it shows."""
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
            "there is nothing to plot: the history has no loss and no known measurement; "
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
    """The function that draws each panel, by its title."""
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
    """A line for each series; on a logarithmic axis only values above 0."""
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
