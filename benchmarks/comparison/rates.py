"""Learning rates and decays that did best on networks, for docs/choosing.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from comparison.measures import Cell, Comparison, logarithm, median


def networks(comparison: Comparison, name: str) -> list[Cell]:
    """The cells of an optimizer whose parameters are those of networks."""
    return [cell for cell in comparison.by(name) if cell.task.reach == 1.0]


def middle(values: Sequence[float]) -> float:
    """The median, on a logarithmic scale."""
    return math.exp(statistics.median([math.log(x) for x in values]))


def short(x: float) -> str:
    """Two digits at most, without an exponent where that is short."""
    return f"{x:.1g}" if x < 1 else f"{x:.2g}"


def ends(values: Sequence[float]) -> str:
    return f"{short(min(values))} to {short(max(values))}"


def width(cells: Sequence[Cell]) -> float | None:
    """The median, over tasks, of the highest good rate over the lowest."""
    ranges = [found for cell in cells if (found := cell.good_rates) is not None]
    return statistics.median_low([high / low for low, high in ranges]) if ranges else None


def behind(cells: Sequence[Cell]) -> str:
    """The median, over tasks, of the score with default numbers over that of the best trial."""
    logs = [logarithm(cell.default) - logarithm(median(cell.scores)) for cell in cells]
    found = statistics.median(logs)
    return f"{10**found:.2g}" if math.isfinite(found) else "diverged"


def table(comparison: Comparison) -> str:
    """A row for each optimizer with a learning rate."""
    lines = [
        "| optimizer | best `lr` on the networks | median | rates as good, highest over lowest | "
        "best `weight_decay` | score with defaults / best |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for contender in comparison.contenders:
        cells = networks(comparison, contender.name)
        if not cells or contender.exact:
            continue
        best = [cell.numbers.lr for cell in cells]
        decays = [cell.numbers.decay for cell in cells if cell.task.decay]
        wide = width(cells)
        said = [
            f"[{contender.title}](algorithms/{contender.page}.md)", ends(best), short(middle(best)),
            "" if wide is None else f"{wide:.2g}", ends(decays) if decays else "", behind(cells),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(said)} |")
    return "\n".join(lines) + "\n"
