"""Medians of losses as tables, and what their sampling error allows to say."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

RESAMPLINGS, CONFIDENCE = 10_000, 0.9

Found = dict[tuple[str, int], list[float]]
"""The losses of all starts, by function and budget."""


def number(x: float) -> str:
    return f"{x:.2g}" if x >= 1e-3 else f"{x:.0e}"


def verdict(mine: list[float], other: list[float]) -> str:
    """better, equal or worse: by a bootstrap interval of the ratio of the two medians.

    Starts are drawn again with replacement, the same for both; where the middle 90 % of the
    ratios so found lie on both sides of 1, the medians are equal as far as these starts can tell.
    Computed in logarithms: losses must be above 0.
    """
    g = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(mine), (RESAMPLINGS, len(mine)), generator=g)
    a, b = (torch.tensor(x, dtype=torch.float64).log()[drawn] for x in (mine, other))
    ratios = a.quantile(0.5, dim=1) - b.quantile(0.5, dim=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = ratios.quantile(tail).item(), ratios.quantile(1 - tail).item()
    return "better" if high < 0 else "worse" if low > 0 else "equal"


def header(first: str, functions: Sequence[str]) -> list[str]:
    return [
        f"| {first} | evaluations | {' | '.join(functions)} |",
        f"| --- | --: | {' | '.join(['--:'] * len(functions))} |",
    ]


def compared(
    pairs: Sequence[tuple[str, str, Found, Found]], functions: Sequence[str], budgets: Sequence[int]
) -> str:
    """Both medians and the verdict, a line for each pair and budget; and how often it was which."""
    lines = header("ours : theirs", functions)
    seen: dict[str, int] = dict.fromkeys(("better", "equal", "worse"), 0)
    for name, peer, mine, other in pairs:
        for budget in budgets:
            cells = []
            for f in functions:
                a, b = mine[f, budget], other[f, budget]
                word = verdict(a, b)
                seen[word] += 1
                medians = f"{number(statistics.median(a))} : {number(statistics.median(b))}"
                cells.append(f"{medians} {'**worse**' if word == 'worse' else word}")
            lines.append(f"| `{name}` : {peer} | {budget} | {' | '.join(cells)} |")
    count = ", ".join([f"{n} {word}" for word, n in seen.items()])
    return "\n".join(lines) + f"\n\nOf {sum(seen.values())} pairs of medians: {count}."


def alone(
    rows: Sequence[tuple[str, Found]], functions: Sequence[str], budgets: Sequence[int]
) -> str:
    """The medians of methods without a peer."""
    lines = header("method", functions)
    for name, found in rows:
        for budget in budgets:
            cells = [number(statistics.median(found[f, budget])) for f in functions]
            lines.append(f"| `{name}` | {budget} | {' | '.join(cells)} |")
    return "\n".join(lines)
