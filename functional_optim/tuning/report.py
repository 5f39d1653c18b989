"""`report`: what the recorded numbers of a training say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from functional_optim.tuning.findings import USUAL, findings
from functional_optim.tuning.history import History, Series, measure_of, median
from functional_optim.tuning.picture import picture
from functional_optim.tuning.tables import Table, drawn

MOST = 30
"""How many parameters the text shows."""
SHOWN = ("loss", "lr", "grad_norm", "update_norm", "param_norm", "effective_lr")
"""Numbers of the model that the text shows even if they never change."""


class Report:
    """What a training's numbers say. `print` shows tables and, below them, what stands out.

    findings: the sentences on what stands out; empty where nothing does.

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
        of clipped steps and learning rates over the steps, as far as they were recorded. A dotted
        line is where the first NaN or infinity was recorded; a gray band goes from a tenth to ten
        times the usual update/weight of 1e-3.

        Save it with `figure.savefig("training.png")`.

        Raises:
            ImportError: without matplotlib.
            ValueError: if nothing was recorded that it shows.
        """
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
    """A text and a picture of what was recorded in a training, and what stands out in it.

    Args:
        history: a dict of numbers for each step that was recorded: Python numbers or 0-dim tensors,
            by the names of `fo.numbers`, with "loss" and "step" as you like. Measurements are known
            by the names that `fo.measures.diagnostics` gives them, and "clip_share". Without
            "step", records are counted from 1.

    These stand out:

    * NaN or infinity: the step and the places where they were recorded first;
    * a loss that is above its first value in all of the last quarter;
    * gradients that are exactly 0 in the second half of the records;
    * update/weight with a median above 1e-2 or below 1e-4 in the second half: about 1e-3 is usual,
      by Karpathy's rule of thumb, https://cs231n.github.io/neural-networks-3/#ratio; small
      parameters, such as biases that start at 0, are above it for long without harm;
    * clips in more than 90 % of the steps of the second half: bounds from half to ten times the
      average norm work, by Pascanu, Mikolov, Bengio, https://arxiv.org/abs/1211.5063, section 3.2;
    * a cosine of −update and gradient with a median below 0 in the second half: steps lead uphill.

    The factors of ten and the 90 % are this package's.

    Raises:
        TypeError: for something else than a list of dicts of numbers.
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
    """The numbers of the whole model that change, or that are known."""
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
    """The numbers of each parameter; of many, those whose ratios are furthest from the usual."""
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
    """How many powers of ten a ratio is from the usual one; infinite where it is not finite."""
    if ratio is None:
        return 0.0
    if len(ratio.finite().values) < len(ratio.values):
        return math.inf
    median = ratio.median()
    return abs(math.log10(median / USUAL)) if median > 0 else math.inf
