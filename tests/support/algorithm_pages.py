"""What the pages on algorithms say, read from their Markdown."""

import re
import sys

from snippets import ROOT

sys.path.append(str(ROOT / "docs" / "extensions"))

from pages import pages

PAGES = pages()
"""What the page of each algorithm says of it, by the algorithm's name."""

ALGORITHMS = sorted(PAGES)

CLASSES = {name: page["optimizer"] for name, page in PAGES.items() if "optimizer" in page}
"""The names of the optimizer objects of algorithms."""

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
