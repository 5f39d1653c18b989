"""What one line of the benchmark is, before and after it was measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

SMALL = 0.1
"""Ratios and bars below are printed to two digits."""


@dataclass(frozen=True)
class Effort:
    """How much time goes into a row.

    seconds: of one pair of contenders that take turns in one process.
    repeats: timed calls of each of them; None: as many as fit into the seconds.
    processes: how often a fresh process is started.
    quick: tiny tensors, to see that everything runs.
    """

    seconds: float = 4.0
    repeats: int | None = None
    processes: int = 5
    quick: bool = False


@dataclass
class Measured:
    """The samples of both sides, in the unit of their row.

    theirs: empty where there is nothing to compare with. rival: which of the other side's forms
    they are. note: what a reader should know.
    """

    ours: list[float]
    theirs: list[float]
    rival: str = ""
    note: str = ""


class NotHere(Exception):
    """A row cannot be measured on this machine; the sentence says what is missing."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    name: what `--only` matches. what: the contenders. workload: what they work on.
    measure: gets the samples. bars: the largest values that are good enough, the last one the best.
    judged: what the bars are about, the ratio of the minima, or the minimum of ours alone.
    unit: of the samples: "s", "MB" or a plural noun.
    words: those that a step must move of each element, where the row is about that; else 0.
    """

    name: str
    what: str
    workload: str
    measure: Callable[[Effort], Measured]
    bars: tuple[float, ...] = ()
    judged: Literal["ratio", "ours"] = "ratio"
    unit: str = "s"
    words: int = 0


@dataclass
class Result:
    """A row after it was measured; `error` says in words why it has no samples."""

    row: Row
    measured: Measured | None = None
    error: str = ""

    def ratio(self, of: Callable[[list[float]], float] = min) -> float | None:
        """Ours over theirs, of the minima unless `of` says otherwise."""
        if self.measured is None or not self.measured.theirs:
            return None
        below = of(self.measured.theirs)
        return of(self.measured.ours) / below if below else None

    def medians(self) -> float | None:
        return self.ratio(statistics.median)

    def met(self) -> list[bool]:
        """Whether each of the bars is met, as printed."""
        if self.measured is None:
            return []
        value = self.value()
        return [value is not None and value <= bar for bar in self.row.bars]

    def value(self) -> float | None:
        """What the bars are about, as printed."""
        if self.measured is None:
            return None
        value = self.ratio() if self.row.judged == "ratio" else min(self.measured.ours)
        return None if value is None else rounded(value)


def rounded(value: float) -> float:
    """As printed: to two decimals, small values to two digits."""
    return round(value, 2) if value >= SMALL else float(f"{value:.2g}")


def attempt(row: Row, effort: Effort) -> Result:
    """Measure a row; what goes wrong becomes the row's error, so that the others still run."""
    try:
        return Result(row, row.measure(effort))
    except NotHere as missing:
        return Result(row, error=str(missing))
    except Exception as error:
        text = str(error).strip().splitlines()
        return Result(row, error=f"{type(error).__name__}: {text[0][:300] if text else ''}")


def write(file: Path, known: dict[str, Measured], results: Sequence[Result]) -> None:
    """Store the samples of the rows that were measured, together with those of an earlier run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    now = {r.row.name: r.measured for r in results if r.measured is not None}
    written = file.with_suffix(".new")
    written.write_text(json.dumps({name: asdict(m) for name, m in (known | now).items()}))
    written.replace(file)


def read(file: Path) -> dict[str, Measured]:
    """What is stored, by the rows' names; empty if there is no file."""
    if not file.exists():
        return {}
    return {name: Measured(**m) for name, m in json.loads(file.read_text()).items()}
