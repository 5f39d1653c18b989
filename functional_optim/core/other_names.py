"""Names in other libraries, for hints in errors, and for docs/from_optax.md.

Imported only after an unknown name was used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files

TABLE = (files("functional_optim.core") / "other_names.md").read_text("utf-8")
"""The tables of names in the documentation: first the names in the other library, then ours."""

ROW = re.compile(r"^\| (`[^|]*?) \| ([^|]*)", re.MULTILINE)


def hint_for(name: str) -> str:
    """Our name for a name of optax, as the end of a sentence; "" if unknown."""
    names, _, _ = TABLE.partition("### Arguments")
    for theirs, ours in _rows(names):
        if name in [x.rpartition(".")[2] for x in theirs]:
            here = _in_marks(ours)
            if len(theirs) == len(here) > 1:
                pairs = zip(theirs, here, strict=True)
                ours = next(y for x, y in pairs if x.rpartition(".")[2] == name)
            return _full(ours.strip())
    return ""


def hint_for_argument(name: str) -> str:
    """Our name for an argument, as the end of a sentence; "" if unknown."""
    _, _, arguments = TABLE.partition("### Arguments")
    return next((_full(ours.strip()) for theirs, ours in _rows(arguments) if name in theirs), "")


def _rows(text: str) -> Iterator[tuple[list[str], str]]:
    for theirs, ours in ROW.findall(text):
        yield _in_marks(theirs), ours


def _in_marks(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def _full(text: str) -> str:
    return re.sub(r"\bfo\.", "functional_optim.", text.replace("`", ""))
