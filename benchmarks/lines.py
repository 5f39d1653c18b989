"""Counts lines of code without docstrings, comments and blank lines: make lines

Prints them by folder, those of the package without least squares and minimizers, and the raw lines
of the tests. A docstring is any string that stands alone
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

SOLVING = (
    "functional_optim/solvers/",
    "functional_optim/kernels/lane",
    "functional_optim/algorithms/gauss_newton",
    "functional_optim/algorithms/levenberg_marquardt",
    "functional_optim/algorithms/dogleg",
    "functional_optim/algorithms/self_scaled",
    "adapters/least_squares",
    "adapters/self_scaled",
)
"""Least squares and minimizers: how their files' paths begin."""

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


def by_file(root: Path) -> dict[str, int]:
    """The lines of code in each file of the package."""
    found: dict[str, int] = {}
    for top in ("functional_optim", "adapters"):
        for path in sorted((root / top).rglob("*.py")):
            found[path.relative_to(root).as_posix()] = code_lines(path.read_text())
    return found


def folder_of(path: str) -> str:
    """The folder of a file inside the package."""
    first, *rest = path.split("/")
    return first if first == "adapters" else rest[0] if len(rest) > 1 else "."


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    files, found = by_file(root), Counter[str]()
    for path, count in files.items():
        found[folder_of(path)] += count
    for folder, count in found.most_common():
        print(f"{count:7,}  {folder}")
    print(f"{sum(files.values()):7,}  package")
    others = sum(count for path, count in files.items() if not path.startswith(SOLVING))
    print(f"{others:7,}  package without least squares and minimizers")
    inner = sum(found[folder] for folder in ("core", "engine", "kernels"))
    print(f"{inner:7,}  core, engine and kernels")
    tests = sum(len(path.read_text().splitlines()) for path in (root / "tests").rglob("*.py"))
    print(f"{tests:7,}  tests, raw")


if __name__ == "__main__":
    main()
