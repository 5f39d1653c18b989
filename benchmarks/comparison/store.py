"""Results as rows of JSON: one for each part of an optimizer's runs on a task."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from comparison.contenders import Contender, Numbers
from comparison.tasks import Task
from comparison.trials import Ended, Run


class Effort(NamedTuple):
    """How much is tried. trials: of the search. factors: by which the winner's rate is multiplied
    to see how sensitive it is. seeds: of the runs that are reported. share: of a task's steps."""

    trials: int
    factors: tuple[float, ...]
    seeds: int
    share: float


FULL = Effort(96, tuple(2.0**k for k in range(-5, 6)), 5, 1.0)
QUICK = Effort(4, (0.25, 1.0, 4.0), 2, 0.05)
FIRST_REPORTED_SEED = 100
DIGITS = 4
"""Of the scores of a curve."""


def versions(task: Task) -> str:
    """What numbers may depend on."""
    parts = [f"{name} {version(name)}" for name in ("torch", "functional_optim")]
    parts.append(f"Python {platform.python_version()}")
    return ", ".join([*parts, *([f"data {task.data}"] if task.data else [])])


def rounded(x: float | None, digits: int = 6) -> float | None:
    """A score for JSON: None where the run diverged."""
    return None if x is None or not math.isfinite(x) else float(f"{x:.{digits}g}")


def counts(contender: Contender, effort: Effort) -> dict[str, int]:
    """How many runs each part has. A line search has no rate to search for."""
    if contender.exact:
        return {"final": effort.seeds}
    factors = len(effort.factors)
    each = {"search": effort.trials, "sweep": factors, "final": effort.seeds}
    return {**each, "default": effort.seeds}


def planned(
    task: Task, contender: Contender, part: str, effort: Effort, winner: Numbers | None
) -> list[Run]:
    """The runs of a part; sweep and final need the winner of the search."""
    if part == "search":
        return [Run(x, 0) for x in contender.trials(effort.trials, task)]
    seeds = range(FIRST_REPORTED_SEED, FIRST_REPORTED_SEED + effort.seeds)
    if part == "default":
        decay = contender.default.decay if task.decay else 0.0
        return [Run(contender.default._replace(decay=decay), seed) for seed in seeds]
    assert winner is not None
    if part == "sweep":
        return [Run(winner._replace(lr=winner.lr * x), 0) for x in effort.factors]
    return [Run(winner, seed) for seed in seeds]


def row(
    task: Task, contender: Contender, part: str, runs: list[Run], ended: list[Ended]
) -> dict[str, Any]:
    """What is kept of the runs of a part; curves of the reported ones alone."""
    found: dict[str, Any] = {
        "task": task.name,
        "optimizer": contender.name,
        "part": part,
        "steps": task.steps,
        "versions": versions(task),
        "runs": [
            [*run.numbers, run.seed, rounded(e.score)] for run, e in zip(runs, ended, strict=True)
        ],
    }
    if part == "final":
        found["curves"] = [[[k, rounded(x, DIGITS)] for k, x in e.curve] for e in ended]
    return found


class Store:
    """The rows of a folder, a file for each task. A row that is written again replaces the first;
    one that was cut off by an interrupt counts for nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[tuple[str, str, str], dict[str, Any]] = {}
        for path in sorted(folder.glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    found = json.loads(line)
                except json.JSONDecodeError:
                    continue
                self.rows[key(found)] = found

    def find(self, task: Task, name: str, part: str, count: int | None) -> dict[str, Any] | None:
        """The row of a part, if it is of this task as it is now, and of so many runs."""
        found = self.rows.get((task.name, name, part))
        if found is None or found["steps"] != task.steps:
            return None
        if checksum(found) != task.data:
            return None
        return found if count in (None, len(found.get("runs", ()))) else None

    def data_of(self, task: Task, name: str) -> str:
        """The data of an optimizer's reported runs; before there are any, those of this machine."""
        found = self.rows.get((task.name, name, "final"))
        return task.data if found is None else checksum(found)

    def add(self, found: dict[str, Any]) -> None:
        """Keep a row, on disk as well."""
        self.rows[key(found)] = found
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{found['task']}.jsonl").open("a", encoding="utf-8") as file:
            file.write("\n" * self._cut_off(found["task"]) + line(found))

    def _cut_off(self, task: str) -> bool:
        """Whether the last line of a file was not finished."""
        path = self.folder / f"{task}.jsonl"
        if not path.exists() or not path.stat().st_size:
            return False
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"

    def tidy(self) -> None:
        """Write every file again, in order, without rows that were replaced."""
        for name in {task for task, _, _ in self.rows}:
            path = self.folder / f"{name}.jsonl"
            mine = sorted(k for k in self.rows if k[0] == name)
            text = "".join([line(self.rows[k]) for k in mine])
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                partial = path.with_suffix(".partial")
                partial.write_text(text, encoding="utf-8")
                partial.replace(path)


def key(found: dict[str, Any]) -> tuple[str, str, str]:
    return found["task"], found["optimizer"], found["part"]


def checksum(found: dict[str, Any]) -> str:
    """Of the data that a row was made of; empty where machines cannot differ."""
    data = re.search("data (.*)", found["versions"])
    return data.group(1) if data else ""


def line(found: dict[str, Any]) -> str:
    return json.dumps(found, separators=(",", ":")) + "\n"


def winner(found: dict[str, Any]) -> Numbers | None:
    """The trial with the least score; None if all diverged."""
    ended = [run for run in found["runs"] if run[-1] is not None]
    return Numbers(*min(ended, key=lambda run: run[-1])[:3]) if ended else None
