"""The pages on algorithms, as data: what stands between two lines of `---` at their head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / "algorithms"

GROUPS = (
    "SGD and averages",
    "Adam and variants",
    "Signs, little memory",
    "Large batches",
    "Without a learning rate",
    "Matrices",
    "Special gradients",
)
"""The groups of the table to choose from, in its order."""

KEYS = {"group", "optimizer", "when", "memory", "try", "paper", "curve"}
"""group: one of GROUPS. optimizer: the class in `functional_optim.adapters`, if there is one. when,
memory, try, paper: cells of the table to choose from. curve: an argument and three values of it,
the second of which is to begin with; if there is none, `curves.SPECIAL` has the runs."""


class Page(dict[str, str]):
    """What a page says of its algorithm, by KEYS; without some of them."""

    def __init__(self, path: Path) -> None:
        head, line, _ = path.read_text().removeprefix("---\n").partition("\n---\n")
        found: Any = yaml.safe_load(head) if line else None
        if not isinstance(found, dict):
            raise ValueError(f"{path} must begin with lines on its algorithm, between two of ---")
        super().__init__({key: str(value) for key, value in found.items()})
        if self.keys() - KEYS or not KEYS - {"optimizer", "curve"} <= self.keys():
            raise ValueError(f"{path} has {sorted(self)}; it must have {sorted(KEYS)}")
        if self["group"] not in GROUPS:
            raise ValueError(f"{path} names no group of {GROUPS}")


def pages() -> dict[str, Page]:
    """Those of all algorithms, in the order of the groups, then of their names."""
    others = {"estimators", "index", "search"}
    found = {p.stem: Page(p) for p in sorted(FOLDER.glob("*.md")) if p.stem not in others}
    return dict(sorted(found.items(), key=lambda item: GROUPS.index(item[1]["group"])))
