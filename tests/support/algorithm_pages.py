"""What the pages on algorithms say, read from their Markdown."""

from __future__ import annotations

import inspect
import re

from snippets import ROOT

import functional_optim as fo
from functional_optim import adapters, algorithms

ALGORITHMS = sorted(
    name
    for name, thing in {**vars(algorithms), "lbfgs": fo.lbfgs}.items()
    if inspect.isfunction(thing) and not name.startswith("scale_by_") and name != "polyak_average"
)
"""The ready-made ones."""

DROP_INS = {
    name: drop_in
    for name in ALGORITHMS
    for drop_in in dir(adapters)
    if drop_in.lower() == name.replace("_", "") and inspect.isclass(getattr(adapters, drop_in))
}
"""The names of their classes."""

Row = tuple[str, ...]


def rows(text: str) -> list[Row]:
    """The rows of all tables, without their heads."""
    found = [tuple(line.strip("| ").split(" | ")) for line in text.splitlines() if line[:2] == "| "]
    return [row for i, row in enumerate(found) if not is_rule(row) and not is_head(found, i)]


def is_rule(row: Row) -> bool:
    return all(set(cell) <= set("-: ") for cell in row)


def is_head(found: list[Row], i: int) -> bool:
    return i + 1 < len(found) and is_rule(found[i + 1])


def page_of(name: str) -> str:
    """The text of an algorithm's page."""
    return (ROOT / "docs" / "algorithms" / f"{name}.md").read_text()


def section(page: str, title: str) -> str:
    """What stands under a heading of the second level."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]
