"""The tables that the user sees and `RESULTS.md` keeps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from reasons import reason
from rich.table import Table
from rows import SMALL, Result
from traffic import ADAMW

HEADINGS = ("what", "workload", "ours", "theirs", "minima", "medians", "bar", "met")


def number(value: float) -> str:
    """Three digits, for a reader."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def quantity(value: float, unit: str) -> str:
    """A sample in a unit of fitting size."""
    if unit != "s":
        return f"{number(value)} {unit}"
    for factor, small in ((1e6, "µs"), (1e3, "ms")):
        if value * factor < 1000:
            return f"{number(value * factor)} {small}"
    return f"{value:.2f} s"


def decimals(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if value >= SMALL else f"{value:.2g}"


def bars(result: Result) -> str:
    """What is allowed: "≤ 1.00, then 0.95"."""
    unit = result.row.unit if result.row.judged == "ours" else ""
    texts = [f"{bar:g} {unit}" if unit else decimals(bar) for bar in result.row.bars]
    return f"≤ {', then '.join(texts)}" if texts else "–"


def verdict(result: Result) -> str:
    """Whether the bars are met; each of them where they disagree."""
    met = result.met()
    if not met:
        return "–"
    if len(set(met)) == 1:
        return "yes" if met[0] else "**no**"
    pairs = zip(result.row.bars, met, strict=True)
    return ", ".join([f"{decimals(bar)} {'yes' if good else '**no**'}" for bar, good in pairs])


def cells(result: Result) -> list[str]:
    """One line of the table; the minimum of each side, its median in parentheses."""
    row, found = result.row, result.measured
    if found is None:
        return [row.what, row.workload, "not run", "–", "–", "–", bars(result), "–"]

    def side(samples: list[float]) -> str:
        least, middle = min(samples), statistics.median(samples)
        median = f" ({quantity(middle, row.unit)})" if len(samples) > 1 else ""
        return quantity(least, row.unit) + median

    theirs = f"{side(found.theirs)}, {found.rival}".strip(", ") if found.theirs else "–"
    ratios = [decimals(result.ratio()), decimals(result.medians())]
    return [
        row.what,
        row.workload,
        side(found.ours),
        theirs,
        *ratios,
        bars(result),
        verdict(result),
    ]


def line(result: Result) -> str:
    """A row in one line of plain text, for a log."""
    if result.measured is None:
        return f"{result.row.name}: {result.error}"
    _, _, ours, theirs, minima, _, bar, met = cells(result)
    text = f"{result.row.name}: {ours} / {theirs} = {minima}, bar {bar}, met {met}"
    return text.replace("**", "")


def summary(results: list[Result]) -> str:
    """How many targets are met, in a sentence."""
    judged = [met[-1] for met in [result.met() for result in results] if met]
    if not judged:
        return "No row with a target was measured."
    return f"{sum(judged)} of {len(judged)} rows meet their target (the last, if they have two)."


def missed(results: list[Result]) -> list[str]:
    """The targets that are missed, by the reason."""
    found: dict[str, list[str]] = {}
    for result in results:
        if result.met() and not result.met()[-1]:
            text = f"`{result.row.name}` {decimals(result.value())} ({bars(result)})"
            found.setdefault(reason(result), []).append(text)
    lines = [f"* {why} {', '.join(rows)}." for why, rows in found.items()]
    return ["", "## Missed targets, and why", "", *lines] if lines else []


def console(results: list[Result]) -> Table:
    """The table for the terminal."""
    table = Table()
    for heading in HEADINGS:
        narrow = heading in ("minima", "medians")
        table.add_column(heading, justify="right" if narrow else "left")
    for result in results:
        table.add_row(*[cell.replace("**", "") for cell in cells(result)])
    return table


PREAMBLE = """\
# Results

Written by `{command}`. Ours and theirs took turns in one process, A B A B …, or in fresh processes
where a row is about compiling, importing or memory. A cell has the minimum and, in parentheses, the
median. The ratios are ours / theirs, of the minima and of the medians; that of the minima decides:
medians swing by tens of percent on a busy machine. Theirs is the best form of torch.optim unless
the cell says something else.
"""

QUICK = """
**These are tiny tensors and too few repeats: the figures say that everything runs, no more.**
"""


def markdown(
    results: list[Result],
    machine: dict[str, str],
    command: str,
    *,
    quick: bool,
    missing: Sequence[str],
) -> str:
    """The whole of RESULTS.md. missing: names of the rows that were not reached."""
    peers = [r for r in results if r.row.name.startswith("peer-")]
    traffic = [r for r in results if r.row.words]
    main = [r for r in results if not r.row.name.startswith("peer-") and not r.row.words]
    head = PREAMBLE.format(command=command) + (QUICK if quick else "")
    lines = [head, *[f"* {key}: {value}" for key, value in machine.items()]]
    lines += ["", summary(results), *missed(results), "", "![The ratios of all rows](RESULTS.png)"]
    lines += section("The bars", [r for r in main if r.row.bars])
    lines += section("Without a bar", [r for r in main if not r.row.bars])
    lines += against_traffic(traffic)
    lines += section("Other libraries", peers)
    lines += listed("Notes", results, lambda r: r.measured.note if r.measured else "")
    lines += listed("What was not run, and why", results, lambda r: r.error)
    if missing:
        lines += ["", f"The run did not come to {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def section(title: str, results: list[Result]) -> list[str]:
    """A heading and a table, if there is anything to put in it."""
    if not results:
        return []
    rows = [HEADINGS, ["---"] * len(HEADINGS), *[cells(result) for result in results]]
    return ["", f"## {title}", "", *[f"| {' | '.join(row)} |" for row in rows]]


TRAFFIC = """
A step moves memory: torch's fused AdamW seven words of each element, the gradient, and the
parameter and two slots in and out. The table has each algorithm's words, those that it reads twice
for a sum included, what they are of AdamW's (the limit), its time as a part of fused AdamW's
(minima), and that over the limit.

![Time over the limit](TRAFFIC.png)
"""


def against_traffic(results: list[Result]) -> list[str]:
    """The table of algorithms and their words, if any was measured."""
    if not results:
        return []
    headings = ("algorithm", "workload", "words", "limit", "time", "over the limit", "bar", "met")
    found = ["", "## Every algorithm against its memory traffic", TRAFFIC]
    for row in (headings, ["---"] * len(headings), *map(traffic_cells, results)):
        found.append(f"| {' | '.join(row)} |")
    return found


def traffic_cells(result: Result) -> list[str]:
    """A line of that table."""
    row, limit, ratio = result.row, result.row.words / ADAMW, result.ratio()
    over = decimals(None if ratio is None else ratio / limit)
    time = decimals(ratio)
    return [
        row.what,
        row.workload,
        str(row.words),
        f"{limit:.2f}",
        time,
        over,
        bars(result),
        verdict(result),
    ]


def listed(title: str, results: list[Result], text: Callable[[Result], str]) -> list[str]:
    """A heading and what there is to say about each row, if there is anything."""
    said = [(r.row, text(r)) for r in results if text(r)]
    found = [f"* {row.what}, {row.workload} (`{row.name}`): {words}" for row, words in said]
    return ["", f"## {title}", "", *found] if found else []
