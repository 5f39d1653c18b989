"""The page of devices says what the code says: the sections of the check, and the warnings."""

from __future__ import annotations

import re

import snippets
from gpu_check import command

PAGE = (snippets.ROOT / "docs" / "devices.md").read_text()
SOURCES = [snippets.ROOT / "functional_optim" / name for name in ("engine", "kernels")]


def rows(head: str) -> list[list[str]]:
    """The cells of the table that begins with these names of columns."""
    _, _, rest = PAGE.partition(f"| {head} |\n")
    lines = rest.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_all_sections_of_the_check_are_named():
    named = [name for first, _ in rows("section | what it shows") for name in first.split(", ")]
    sections = dict.fromkeys(check.section for check in command.listed(quick=True))
    assert sorted(named) == sorted(f"`{name}`" for name in sections)


def test_each_warning_is_one_of_the_code():
    text = "".join(path.read_text() for folder in SOURCES for path in sorted(folder.glob("*.py")))
    warnings = [cell for _, cell in rows("reason | the warning begins")]
    assert len(warnings) == 6
    for warning in warnings:
        begin, _, inside = re.fullmatch(r"`(.*?)( \((.*)\)| …)?`", warning).groups()
        assert begin in text
        assert inside in (None, "…") or f'"{inside}"' in text


def test_the_page_says_that_no_gpu_was_used():
    """To be changed, with the figures, by whoever has run the check on one."""
    assert "**Nothing in this package has been tested on GPU hardware yet.**" in PAGE
    assert all(cells[-1].startswith("no") for cells in rows(COLUMNS)[1:])


COLUMNS = (
    "device | element-wise rules | rules with products of matrices | all other rules | run on one"
)
