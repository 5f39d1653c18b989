"""What is read from the rows: medians, steps to a target, and what differs beyond noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from scipy.stats import ttest_rel

from comparison import store
from comparison.contenders import Contender, Numbers, all_contenders
from comparison.store import Store
from comparison.tasks import Task

FLOOR = 1e-9
"""Scores below are the same: rounding decides them."""
LEVEL = 0.05
REFERENCE = "adamw"
NEAR = 1.2
"""A rate does as well as the best of a sweep if its score is at most this many times as large."""
EDGE = 1.5
"""A best rate within this factor of an end of its range may lie beyond."""


def logarithm(score: float | None) -> float:
    """Of a score, for differences; infinite for a run that diverged."""
    return math.inf if score is None else math.log10(max(score, FLOOR))


def median(scores: Sequence[float | None]) -> float | None:
    """None if half of the runs, or more, diverged."""
    middle = statistics.median([math.inf if x is None else x for x in scores])
    return middle if math.isfinite(middle) else None


@dataclass(frozen=True)
class Cell:
    """What an optimizer did on a task: the rows of its parts."""

    task: Task
    contender: Contender
    parts: Mapping[str, Mapping[str, Any]]

    @cached_property
    def numbers(self) -> Numbers:
        return Numbers(*self.parts["final"]["runs"][0][:3])

    @cached_property
    def scores(self) -> list[float | None]:
        """Of the reported runs, in the order of their seeds."""
        return [run[-1] for run in self.parts["final"]["runs"]]

    @property
    def default(self) -> float | None:
        """The median of the runs with default numbers."""
        runs = self.parts.get("default", self.parts["final"])["runs"]
        return median([run[-1] for run in runs])

    @property
    def at_edge(self) -> bool:
        """Whether the best rate may lie beyond the range that was searched."""
        low, high = self.contender.rates(self.task)
        return not self.contender.exact and not low * EDGE < self.numbers.lr < high / EDGE

    @property
    def sweep(self) -> list[tuple[float, float | None]]:
        """Learning rates around the best one, and their scores."""
        runs = self.parts.get("sweep", {"runs": []})["runs"]
        return sorted((run[0], run[-1]) for run in runs)

    @property
    def good_rates(self) -> tuple[float, float] | None:
        """The lowest and highest rate of the sweep that do as well as the best, without a gap."""
        scores = [math.inf if x is None else max(x, FLOOR) for _, x in self.sweep]
        if not scores or math.isinf(min(scores)):
            return None
        low = high = scores.index(min(scores))
        while low > 0 and scores[low - 1] <= NEAR * min(scores):
            low -= 1
        while high < len(scores) - 1 and scores[high + 1] <= NEAR * min(scores):
            high += 1
        return self.sweep[low][0], self.sweep[high][0]

    def passed(self, part: str) -> tuple[int, int]:
        """How many runs of a part found the minimum, and of how many."""
        runs = self.parts.get(part, {"runs": []})["runs"]
        least = self.task.passes or 0.0
        return sum([run[-1] is not None and run[-1] <= least for run in runs]), len(runs)

    def steps_to(self, target: float | None) -> float | None:
        """The median of the first steps seen with such a score; None if half never get there."""
        if target is None:
            return None
        first: list[float] = []
        enough = store.rounded(max(target, FLOOR), store.DIGITS)  # as the curves are
        assert enough is not None
        for curve in self.parts["final"]["curves"]:
            there = [step for step, x in curve if x is not None and x <= enough]
            first.append(there[0] if there else math.inf)
        middle = statistics.median(first)
        return middle if math.isfinite(middle) else None

    @property
    def step_ms(self) -> float | None:
        """Milliseconds of a step, gradient included; None before it was measured."""
        time = self.parts.get("time")
        return None if time is None else time["gradient_ms"] + time["update_ms"]


class Comparison:
    """All cells that are finished, on the data that AdamW had, whatever this machine's are.

    tasks: those to look at.
    """

    def __init__(self, rows: Store, tasks: Sequence[Task]) -> None:
        self.cells: dict[tuple[str, str], Cell] = {}
        self.tasks = list(tasks)
        self.contenders = list(all_contenders().values())
        for task in tasks:
            seen = replace(task, data=rows.data_of(task, REFERENCE))
            for contender in self.contenders:
                names = (*store.counts(contender, store.FULL), "time")
                found = {part: rows.find(seen, contender.name, part, None) for part in names}
                parts = {part: x for part, x in found.items() if x is not None}
                if "final" in parts:
                    self.cells[task.name, contender.name] = Cell(task, contender, parts)

    def of(self, task: Task) -> dict[str, Cell]:
        """The cells of a task by optimizer, the best median first."""
        own = [self.cells[key] for key in self.cells if key[0] == task.name]
        own.sort(key=lambda cell: logarithm(median(cell.scores)))
        return {cell.contender.name: cell for cell in own}

    def by(self, name: str) -> list[Cell]:
        """The cells of an optimizer, in the order of the tasks."""
        return [self.cells[key] for key in self.cells if key[1] == name]

    def target(self, task: Task) -> float | None:
        """What has to be reached: the minimum, or the median of AdamW's reported runs."""
        reference = self.cells.get((task.name, REFERENCE))
        if task.passes is not None:
            return task.passes
        return None if reference is None else median(reference.scores)

    def common(self, task: Task) -> float | None:
        """What half of the optimizers reach: the median of their medians, or the minimum."""
        scores = [median(cell.scores) for cell in self.of(task).values()]
        return task.passes if task.passes is not None or not scores else median(scores)

    def verdicts(self, task: Task) -> dict[str, str]:
        """For each optimizer "better", "worse" or "same" than AdamW, or "diverged" if a run has.

        A paired t-test of the logarithms of scores of the same seeds, on both sides, with Holm's
        correction for the optimizers of the task. Where a run of AdamW has diverged, or its seeds
        are others, there is nothing to compare with.
        """
        cells = self.of(task)
        reference = cells.pop(REFERENCE, None)
        if reference is None:
            return {}
        found, chances = dict[str, str](), dict[str, float]()
        theirs = [logarithm(x) for x in reference.scores]
        for name, cell in cells.items():
            mine = [logarithm(x) for x in cell.scores]
            if not all(map(math.isfinite, mine)):
                found[name] = "diverged"
            elif all(map(math.isfinite, theirs)) and len(mine) == len(theirs):
                found[name], chances[name] = "same", _chance(mine, theirs)
        for name in holm(chances):
            better = sum(map(logarithm, cells[name].scores)) < sum(theirs)
            found[name] = "better" if better else "worse"
        return found


def _chance(a: Sequence[float], b: Sequence[float]) -> float:
    """Of such a difference, or a larger one, if there were none."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    if len(differences) < 2 or not any(differences):
        return 1.0
    if max(differences) == min(differences):  # no spread at all
        return 0.0
    return float(ttest_rel(a, b).pvalue)


def holm(chances: Mapping[str, float]) -> list[str]:
    """Those whose chance is below the level that Holm's step-down procedure gives them."""
    found = []
    for i, name in enumerate(sorted(chances, key=lambda name: chances[name])):
        if chances[name] > LEVEL / (len(chances) - i):
            break
        found.append(name)
    return found
