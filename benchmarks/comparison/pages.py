"""Writes what was found: benchmarks/COMPARISON.md with its pictures, and best rates on the pages of
algorithms."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from comparison import pictures, rates
from comparison.measures import NEAR, REFERENCE, Cell, Comparison, median
from comparison.store import Store
from comparison.tasks import Task, all_tasks

HOME = Path(__file__).parents[1]
DOCS = HOME.parent / "docs"
MARKS = re.compile(
    r"(<!-- begin: (versions|summary|profile|valleys|rates|(?:task|measured) [\w-]+) -->)\n.*?"
    r"(<!-- end: \2 -->)",
    re.DOTALL,
)
SIGNS = {"better": "**better**", "worse": "worse", "same": "no difference", "diverged": "diverged"}


def number(x: float | None, digits: int = 3) -> str:
    """For a table; – if there is none."""
    return "–" if x is None or not math.isfinite(x) else f"{x:.{digits}g}"


def table(head: str, rows: Sequence[Sequence[str]]) -> str:
    names = [name.strip() for name in head.split("|")]
    lines = [names, ["---"] * len(names), *rows]
    return "".join(["| " + " | ".join(line) + " |\n" for line in lines])


def linked(cell: Cell) -> str:
    """The name of an optimizer, as a link to its page."""
    return f"[{cell.contender.title}](../docs/algorithms/{cell.contender.page}.md)"


def rate(cell: Cell) -> str:
    """The learning rate, with AdamW's where it has one; a mark if the range may be too narrow."""
    if cell.contender.exact:
        return "line search"
    other = cell.numbers.other_lr
    beside = "" if other is None else f", {number(other, 2)}"
    return number(cell.numbers.lr, 2) + beside + (" ◊" if cell.at_edge else "")


def one_task(comparison: Comparison, task: Task) -> str:
    """The table of a task."""
    verdicts, target = comparison.verdicts(task), comparison.target(task)
    rows = []
    for name, cell in comparison.of(task).items():
        scores = [math.inf if x is None else x for x in cell.scores]
        steps, each = cell.steps_to(target), cell.step_ms
        seconds = None if steps is None or each is None else steps * each / 1e3
        row = [
            linked(cell), rate(cell), *([number(cell.numbers.decay, 2)] if task.decay else []),
            number(median(cell.scores)), f"{number(min(scores))} to {number(max(scores))}",
            SIGNS[verdicts[name]] if name in verdicts else "",
            "–" if steps is None else f"{steps:.0f}", number(seconds), number(each),
            "" if cell.contender.exact else number(cell.default),
        ]  # fmt: skip
        rows.append(row)
    decay = "decay | " if task.decay else ""
    head = (
        f"optimizer | lr | {decay}median | range | against AdamW | steps to AdamW's | seconds | "
        "ms a step | with defaults"
    )
    return table(head, rows)


def zoo(comparison: Comparison, valleys: Sequence[Task]) -> str:
    """Which valleys are passed, and by how many of all trials."""
    rows = []
    for contender in comparison.contenders:
        cells = {cell.task.name: cell for cell in comparison.by(contender.name)}
        own = [cells.get(task.name) for task in valleys]
        if any(own):
            shown, passed = [], 0
            for cell in own:
                if cell is None:
                    shown.append("")
                    continue
                good, count = cell.passed("final")
                tried, trials = cell.passed("search")
                share = "" if not trials else f", {100 * tried / trials:.0f} %"
                passed += good == count
                shown.append(f"{good}/{count}{share}")
            some = next(cell for cell in own if cell is not None)
            rows.append((passed, [linked(some), str(passed), *shown]))
    rows.sort(key=lambda row: -row[0])
    names = " | ".join([task.name for task in valleys])
    return table(f"optimizer | all seeds | {names}", [row for _, row in rows])


def summary(comparison: Comparison, tasks: Sequence[Task], valleys: Sequence[Task]) -> str:
    """A row for each optimizer: where it wins and loses."""
    verdicts = {task.name: comparison.verdicts(task) for task in tasks}
    rows = []
    for contender in comparison.contenders:
        name, own = contender.name, comparison.by(contender.name)
        if not own or contender.only:  # a task is no mean of tasks
            continue
        named = {
            what: [task for task, found in verdicts.items() if found.get(name) == what]
            for what in ("better", "worse", "diverged")
        }
        worse = [*named["worse"], *[f"{task} (diverged)" for task in named["diverged"]]]
        good = sum([c.passed("final")[0] == len(c.scores) for c in own if c.task in valleys])
        place = pictures.overall(comparison, tasks, name)
        gpt = comparison.cells.get(("gpt", name))
        time = gpt.parts.get("time") if gpt else None
        row = [
            linked(own[0]), number(place, 2), ", ".join(named["better"]), ", ".join(worse),
            str(good) if any(c.task in valleys for c in own) else "",
            number(time["update_ms"]) if time else "",
            number(time["state_bytes"] / time["parameters"], 2) if time else "",
        ]  # fmt: skip
        rows.append((place, row))
    rows.sort(key=lambda row: (math.isnan(row[0]), row[0]))
    head = (
        "optimizer | mean place, 0 to 1 | better than AdamW on | worse on | valleys passed | "
        "ms an update, gpt | bytes a parameter, gpt"
    )
    return table(head, [row for _, row in rows])


def between(numbers: Sequence[float]) -> str:
    """The least and the largest."""
    ends = [number(min(numbers), 2), number(max(numbers), 2)]
    return " to ".join(dict.fromkeys(ends))


def measured(comparison: Comparison, name: str) -> str:
    """What the page of an algorithm says: its best rates, and where it differs from AdamW."""
    said, own = [], comparison.by(name)
    cells = [c for c in rates.networks(comparison, name) if not c.contender.exact]
    if cells:
        others = [c.numbers.other_lr for c in cells if c.numbers.other_lr is not None]
        other = f" (AdamW's: {between(others)})" if others else ""
        count = f"{len(cells)} network{'s' * (len(cells) > 1)}"
        best = between([c.numbers.lr for c in cells])
        said.append(f"Its best learning rate was {best}{other} on {count}.")
    if (width := rates.width(cells)) is not None:
        near = f"Rates up to a factor of {number(width, 2)} apart gave scores of at most"
        alone = "Twice or half the best rate gave a score of more than"
        said.append(f"{near if width > 1 else alone} {NEAR} times the best (median).")
    scored = [c.task for c in own if c.task.passes is None]
    verdicts = {task.name: comparison.verdicts(task).get(name) for task in scored}
    if name != REFERENCE and own:
        better, worse = [
            ", ".join([task for task, found in verdicts.items() if found in which]) or "no task"
            for which in (("better",), ("worse", "diverged"))
        ]
        it = "It" if own[0].contender.exact else "With equal tuning, it"
        said.append(f"{it} was better than AdamW on {better}, and worse on {worse}.")
    return "".join([f"{line}\n" for line in textwrap.wrap(" ".join(said), 130)])


def block(comparison: Comparison, name: str) -> str:
    """What stands between the marks of this name."""
    tasks = [task for task in comparison.tasks if task.passes is None]
    valleys = [task for task in comparison.tasks if task.passes is not None]
    kind, _, task_name = name.partition(" ")
    if not comparison.cells:
        return "Not run yet.\n" if kind in ("summary", "valleys", "task") else ""
    if kind == "versions":
        rows = [row for cell in comparison.cells.values() for row in cell.parts.values()]
        return "".join([f"* {x}\n" for x in sorted({row["versions"] for row in rows})])
    if kind == "summary":
        return summary(comparison, tasks, valleys)
    if kind == "profile":
        return "![Performance profiles](comparison/pictures/profile.png)\n"
    if kind == "valleys":
        return zoo(comparison, valleys)
    if kind == "rates":
        return rates.table(comparison)
    if kind == "measured":
        return measured(comparison, task_name)
    task = next(task for task in comparison.tasks if task.name == task_name)
    if not comparison.of(task):
        return "Not run yet.\n"
    searches = [cell.parts.get("search") for cell in comparison.of(task).values()]
    counts = {len(found["runs"]) for found in searches if found is not None}
    tried = "".join([f"{count} trials; " for count in sorted(counts)])
    said = (
        f"{task.steps} steps; {tried}the score is the {task.measure}.\n\n"
        f"{one_task(comparison, task)}\n"
    )
    return said + f"![Scores over learning rates](comparison/pictures/{task.name}.png)\n"


def filled(page: str, comparison: Comparison) -> str:
    """A page whose blocks are written again."""

    def anew(found: re.Match[str]) -> str:
        return f"{found[1]}\n{block(comparison, found[2])}{found[3]}"

    return MARKS.sub(anew, page)


def pages_of_docs() -> list[Path]:
    """The pages of the documentation that have blocks of the comparison, or may."""
    return [DOCS / "choosing.md", *sorted((DOCS / "algorithms").glob("*.md"))]


def published() -> Comparison:
    """Of the rows that belong to the page."""
    return Comparison(Store(HOME / "comparison" / "results"), [*all_tasks().values()])


def write(rows: Store, tasks: Sequence[Task], home: Path) -> None:
    """Draw the pictures and write the blocks. home: the folder of the page; the words are those of
    the page that is there for all. The pages of algorithms are written only together with that
    one."""
    comparison = Comparison(rows, tasks)
    folder = home / "comparison" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        if task.passes is None and comparison.of(task):
            pictures.sensitivity(comparison, task, folder / f"{task.name}.png")
    if comparison.cells:
        pictures.profile(comparison, tasks, folder / "profile.png")
    words = (HOME / "COMPARISON.md").read_text(encoding="utf-8")
    (home / "COMPARISON.md").write_text(filled(words, comparison), encoding="utf-8")
    for path in pages_of_docs() if home == HOME else ():
        words = path.read_text(encoding="utf-8")
        path.write_text(filled(words, comparison), encoding="utf-8")
