"""The recorded scalars of a training run as series over steps, and findings in sentences."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from functional_optim import measures
from functional_optim.core.factory import Reconstructible

NORMS = ("grad_norm", "update_norm", "param_norm")
MODEL = "the model"
"""The path of a measurement of all parameters together."""
MEASURED = (*measures.diagnostics, "changed", "clip_share")
"""The names of measurements; with a path, those of one parameter."""


class Series(NamedTuple):
    """A scalar over the steps in which it was recorded."""

    steps: tuple[float, ...]
    values: tuple[float, ...]

    def finite(self) -> Series:
        """The steps with finite values."""
        pairs = zip(self.steps, self.values, strict=True)
        return Series.of([pair for pair in pairs if math.isfinite(pair[1])])

    def later(self) -> Series:
        """The second half of the steps."""
        start = len(self.values) // 2
        return Series(self.steps[start:], self.values[start:])

    def median(self) -> float:
        """The median of the finite values; NaN if there are none."""
        return median(self.finite().values)

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, float]]) -> Series:
        """A series from pairs of step and value."""
        found = list(pairs)
        return cls(tuple([step for step, _ in found]), tuple([x for _, x in found]))


def median(values: Sequence[float]) -> float:
    """The median; NaN if there are no values."""
    return statistics.median(values) if values else math.nan


def measure_of(key: str) -> str:
    """The measure of a scalar: its name without parts, groups and parameters."""
    return key.partition("/")[0].rpartition(".")[2]


class History:
    """The records of a training run, sorted.

    count: of the records. whole: series of the whole model by name. parts: by measure and
    parameter, in the order in which they were first recorded.
    """

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        check_records(records)
        self.count = len(records)
        pairs: dict[str, list[tuple[float, float]]] = {}
        for i, record in enumerate(records):
            step = float(record.get("step", i + 1))
            for key, x in record.items():
                if key != "step":
                    pairs.setdefault(key, []).append((step, float(x)))
        self.whole: dict[str, Series] = {}
        self.parts: dict[str, dict[str, Series]] = {}
        for key, found in pairs.items():
            name, _, path = key.partition("/")
            prefix, _, measure = name.rpartition(".")
            if measure in MEASURED and path:
                label = f"{path} ({prefix})" if prefix else path
                self.parts.setdefault(measure, {})[label] = Series.of(found)
            else:
                self.whole[key] = Series.of(found)
        for measure in NORMS:
            for name, norms in _norms_by_name(measure, pairs).items():
                self.whole.setdefault(name, _norm_of_all(norms))

    def each(self, measure: str) -> dict[str, Series]:
        """A measure of each parameter, or of all parameters together if only that was recorded."""
        if measure in self.parts:
            return self.parts[measure]
        return {MODEL: self.whole[measure]} if measure in self.whole else {}

    def broken(self) -> dict[str, float]:
        """The first step with a NaN or an infinity of each scalar that had one."""
        each = [(f"{name} of {path}", x) for name, y in self.parts.items() for path, x in y.items()]
        found: dict[str, float] = {}
        for name, series in (*self.whole.items(), *each):
            seen = [step for step, x in zip(*series, strict=True) if not math.isfinite(x)]
            if seen:
                found[name] = min(seen)
        return found

    def clipped(self) -> Series | None:
        """The share of clipped steps: that of the model, or of the parameter clipped most."""
        for measure in ("clip_share", "changed"):
            found = list(self.each(measure).values())
            if found:
                return max(found, key=lambda x: sum(x.finite().values))
        return None


def _norms_by_name(
    measure: str, pairs: Mapping[str, Sequence[tuple[float, float]]]
) -> dict[str, list[Series]]:
    """The norms of parameters that form a global norm, by its name: all of them, or those of each
    monitor if several monitors measure the same parameter."""
    monitors: dict[str, dict[str, Series]] = {}
    for key, found in pairs.items():
        name, _, path = key.partition("/")
        if path and measure_of(key) == measure:
            monitors.setdefault(name, {})[path] = Series.of(found)
    paths = [path for own in monitors.values() for path in own]
    if len(set(paths)) < len(paths):
        return {name: [*own.values()] for name, own in monitors.items()}
    return {measure: [x for own in monitors.values() for x in own.values()]} if paths else {}


def _norm_of_all(norms: Iterable[Series]) -> Series:
    """The global norm of several parameters, from their norms; a step may be recorded again."""
    squares: dict[tuple[float, int], float] = {}
    for series in norms:
        times: Counter[float] = Counter()
        for step, x in zip(*series, strict=True):
            at = (step, times[step])
            squares[at] = squares.get(at, 0.0) + x * x
            times[step] += 1
    return Series.of([(step, math.sqrt(x)) for (step, _), x in squares.items()])


def check_records(records: Any) -> None:
    """Raise an error unless these are records of numbers."""
    advice = "append a dict at each step that is recorded, e.g. {'loss': loss.item(), ...}"
    if isinstance(records, (str, bytes, Mapping, Reconstructible)) or not isinstance(
        records, Sequence
    ):
        raise TypeError(
            f"report takes a list of dicts, but got a {type(records).__name__}; {advice}."
        )
    if not records:
        raise ValueError(f"report got an empty history; {advice}.")
    for i, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise TypeError(f"history[{i}] is a {type(record).__name__}; {advice}.")
        for key, x in record.items():
            if not isinstance(key, str):
                raise TypeError(f"history[{i}] has the key {key!r}, which is not a name; {advice}.")
            try:
                float(x)
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(
                    f"history[{i}][{key!r}] is a {type(x).__name__}, not a scalar; "
                    "record numbers only."
                ) from None


USUAL = 1e-3
"""The usual ratio of update to weight, by Karpathy's rule of thumb,
https://cs231n.github.io/neural-networks-3/#ratio."""
HIGH, LOW = 10 * USUAL, USUAL / 10
"""Ratios that are ten times as large, and a tenth."""
OFTEN = 0.9
"""The share of clipped steps above which the clip determines the length of nearly all steps."""
NAMED = 3
"""Number of parameters that a sentence names."""


def findings(history: History) -> list[str]:
    """The findings in sentences, the worst first."""
    looks = (_not_finite, _rising_loss, _dead, _ratios, _clipped, _uphill)
    return [sentence for look in looks for sentence in look(history)]


def _not_finite(history: History) -> Iterator[str]:
    """The first NaN and infinity."""
    if broken := history.broken():
        step = min(broken.values())
        names = [name for name, first in broken.items() if first == step]
        norms = {x for x in names if x in history.whole and measure_of(x) in NORMS}
        single = [x for x in names if x not in norms or measure_of(x) not in history.parts]
        yield (
            f"NaN or infinity was first recorded at step {step:g}, in {_listed(single)}. Look at "
            "the batch and at the loss of that step; a clip by norm spreads a NaN to all "
            "parameters, and fo.apply_if_finite skips such steps."
        )


def _rising_loss(history: History) -> Iterator[str]:
    """Whether the loss ends above its start."""
    loss = history.whole.get("loss", Series((), ())).finite().values
    last = loss[-max(1, len(loss) // 4) :]
    if len(loss) > 1 and min(last) > loss[0]:
        yield (
            "The loss rose: all of the last quarter of the records, with a median of "
            f"{median(last):.3g}, is above the first, {loss[0]:.3g}. Lower the learning rate."
        )


def _dead_in(history: History) -> list[str]:
    """The parameters whose gradients are 0 in the second half of the records."""
    each = history.each("grad_norm").items()
    return [path for path, x in each if x.later().values and not any(x.later().values)]


def _dead(history: History) -> Iterator[str]:
    """Parameters whose gradients are zero."""
    if dead := _dead_in(history):
        yield (
            "The gradient was exactly 0 in the second half of the records "
            f"{_where(dead, history.each('grad_norm'))}. No gradient arrives: the parameter is "
            "not used, or its units are never active."
        )


def _ratios(history: History) -> Iterator[str]:
    """Parameters that move too fast or too slowly."""
    each = history.each("update_ratio")
    medians = {path: x.later().median() for path, x in each.items()}
    still = {path for path in each if medians[path] == 0} | set(_dead_in(history))
    high = [path for path in each if medians[path] > HIGH]
    low = [path for path in each if medians[path] < LOW and path not in still]
    for found, sign, bound, advice in (
        (high, -1, f"above {HIGH:.0e}", "lower the learning rate there"),
        (low, 1, f"below {LOW:.0e}", "raise the learning rate there"),
    ):
        if found:
            worst = sorted(found, key=lambda path, sign=sign: sign * medians[path])
            yield (
                f"update/weight has a median {bound} in the second half of the records "
                f"{_where(worst, each, medians, '.1e')}. About {USUAL:.0e} is usual: {advice}."
            )


def _clipped(history: History) -> Iterator[str]:
    """Whether nearly all steps are clipped."""
    share = history.clipped()
    later = share.later().finite().values if share else ()
    mean = sum(later) / len(later) if later else 0.0
    if mean > OFTEN:
        norm = history.whole.get("grad_norm")
        seen = f" (here {norm.median():.2g})" if norm else ""
        yield (
            f"{100 * mean:.0f} % of the steps were clipped: the bound sets their length. "
            f"Bounds from half to ten times the average norm of the gradients{seen} are usual; "
            "raise the bound, or lower the learning rate if the norm grows."
        )


def _uphill(history: History) -> Iterator[str]:
    """Parameters most of whose steps lead uphill."""
    each = history.each("cosine")
    found = {path: x.later().median() for path, x in each.items()}
    if uphill := sorted([path for path, x in found.items() if x < 0], key=found.__getitem__):
        yield (
            "Most steps in the second half of the records lead uphill (the cosine of -update and "
            f"gradient is below 0) {_where(uphill, each, found, '.2f')}. The steps overshoot: "
            "lower the learning rate, or the momentum."
        )


def _where(
    found: Sequence[str],
    each: Mapping[str, Series],
    values: Mapping[str, float] | None = None,
    form: str = "",
) -> str:
    """The parameters of a finding. values: the values to show, in this format."""
    shown = [f"{path} ({values[path]:{form}})" if values else path for path in found]
    if list(each) == [MODEL]:
        return f"in {shown[0]}"
    return f"in {len(found)} of {len(each)} parameters: {_listed(shown)}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
