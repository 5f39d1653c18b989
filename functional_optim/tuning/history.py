"""The numbers of a training, as series over its steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from functional_optim import measures
from functional_optim.core.factory import Made

NORMS = ("grad_norm", "update_norm", "param_norm")
MODEL = "the model"
"""Stands for all parameters together where a measurement is of these."""
MEASURED = (*measures.diagnostics, "changed", "clip_share")
"""The names under which measurements are looked for; with a path, those of one parameter."""


class Series(NamedTuple):
    """A number over the steps in which it was recorded."""

    steps: tuple[float, ...]
    values: tuple[float, ...]

    def finite(self) -> Series:
        """The steps in which it is finite."""
        pairs = zip(self.steps, self.values, strict=True)
        return Series.of([pair for pair in pairs if math.isfinite(pair[1])])

    def later(self) -> Series:
        """The second half of the steps."""
        start = len(self.values) // 2
        return Series(self.steps[start:], self.values[start:])

    def median(self) -> float:
        """The median of what is finite; NaN if nothing is."""
        return median(self.finite().values)

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, float]]) -> Series:
        """A series from pairs of step and value."""
        found = list(pairs)
        return cls(tuple([step for step, _ in found]), tuple([x for _, x in found]))


def median(values: Sequence[float]) -> float:
    """The median of numbers; NaN of none."""
    return statistics.median(values) if values else math.nan


def measure_of(key: str) -> str:
    """What a number measures: its name without those of parts, groups and parameters."""
    return key.partition("/")[0].rpartition(".")[2]


class History:
    """The records of a training, sorted.

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
        for name in NORMS:
            if name in self.parts:
                self.whole.setdefault(name, _norm_of_all(self.parts[name].values()))

    def each(self, measure: str) -> dict[str, Series]:
        """A measure of each parameter; where it is known of all together only, that."""
        if measure in self.parts:
            return self.parts[measure]
        return {MODEL: self.whole[measure]} if measure in self.whole else {}

    def broken(self) -> dict[str, float]:
        """The first step with a NaN or an infinity of each number that had one."""
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


def _norm_of_all(norms: Iterable[Series]) -> Series:
    """The norm of several parameters together, from those of each."""
    squares: dict[float, float] = {}
    for series in norms:
        for step, x in zip(*series, strict=True):
            squares[step] = squares.get(step, 0.0) + x * x
    return Series.of([(step, math.sqrt(x)) for step, x in squares.items()])


def check_records(records: Any) -> None:
    """Raise unless these are records of numbers."""
    advice = "append a dict at each step that is recorded, e.g. {'loss': loss.item(), ...}"
    if isinstance(records, (str, bytes, Mapping, Made)) or not isinstance(records, Sequence):
        raise TypeError(
            f"report takes a list of dicts, but got a {type(records).__name__}; {advice}."
        )
    if not records:
        raise ValueError(f"report got an empty history; {advice}.")
    for i, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise TypeError(f"history[{i}] is a {type(record).__name__}; {advice}.")
        for key, x in record.items():
            try:
                float(x)
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(
                    f"history[{i}][{key!r}] is a {type(x).__name__}, which is no single number; "
                    "record numbers only."
                ) from None
