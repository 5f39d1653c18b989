"""Counts lines of code without docstrings, comments and blank lines: make lines

Prints them by folder, and the raw lines of the tests. A docstring is any string that stands alone
as a statement, as those do that document the fields of a class.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]

SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """How many lines of a Python source hold code."""
    told: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        text = node.value if isinstance(node, ast.Expr) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            told.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - told)


def by_folder(root: Path) -> Counter[str]:
    """The lines of code in each folder of the package."""
    found: Counter[str] = Counter()
    for top in ("functional_optim", "adapters"):
        for path in sorted((root / top).rglob("*.py")):
            parts = path.relative_to(root).parts
            folder = "adapters" if top == "adapters" else parts[1] if len(parts) > 2 else "."
            found[folder] += code_lines(path.read_text())
    return found


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    found = by_folder(root)
    for folder, count in found.most_common():
        print(f"{count:7,}  {folder}")
    print(f"{sum(found.values()):7,}  package")
    inner = sum(found[folder] for folder in ("core", "engine", "kernels"))
    print(f"{inner:7,}  core, engine and kernels")
    tests = sum(len(path.read_text().splitlines()) for path in (root / "tests").rglob("*.py"))
    print(f"{tests:7,}  tests, raw")


if __name__ == "__main__":
    main()
