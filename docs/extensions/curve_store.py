"""Trained curves, kept in docs/curves.json until something changes that they depend on.

A curve depends on the source of its algorithm and of what that imports, but for the machinery below
the rules, and on the file that says what is trained.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STORE = ROOT / "docs" / "curves.json"
MACHINERY = ("adapters", "checkpoint", "core", "engine", "kernels")
"""Packages that bring rules to tensors, and have tests that they change no numbers."""

Losses = tuple[list[int], list[float]]


def sources(path: Path, seen: set[Path] | None = None) -> set[Path]:
    """The files of this package that one of its files needs, itself included."""
    seen = set() if seen is None else seen
    if path not in seen:
        seen.add(path)
        for found in _needed(path):
            sources(found, seen)
    return seen


@cache
def _needed(path: Path) -> list[Path]:
    """The files that a file imports from."""
    return list(dict.fromkeys(file for x in _imports(path.read_text()) for file in _files(*x)))


@cache
def _imports(text: str) -> list[tuple[str, str]]:
    """What a file imports from this package, each name with the module that it says."""
    nodes = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.ImportFrom)]
    return [(x.module or "", alias.name) for x in nodes for alias in x.names]


def _files(home: str, name: str) -> list[Path]:
    """Where a name of a module is defined; a package has it from one of its files."""
    package, *inside = home.split(".")
    if package != "functional_optim" or [*inside, name][0] in MACHINERY:
        return []
    place = ROOT.joinpath(package, *inside)
    if place.with_suffix(".py").exists():
        return [place.with_suffix(".py")]
    if (place / f"{name}.py").exists():
        return [place / f"{name}.py"]
    if (place / name / "__init__.py").exists():
        return [place / name / "__init__.py"]
    own = [home for home, known in _imports((place / "__init__.py").read_text()) if known == name]
    return [file for home in own for file in _files(home, name)]


def digest(needs: set[Path], *says: str) -> str:
    """Of files, and of what else a curve depends on."""
    texts = [path.relative_to(ROOT).as_posix() + _code(path.read_text()) for path in sorted(needs)]
    return hashlib.sha256("\0".join([*texts, *says]).encode()).hexdigest()[:16]


@cache
def _code(text: str) -> str:
    """Source without docstrings, which change no curve."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(filter(str.strip, lines))


def kept() -> dict[str, dict[str, Any]]:
    """What is stored, by name: a digest, and the losses of each run by its label."""
    return json.loads(STORE.read_text()) if STORE.exists() else {}


def recall(name: str, known: str, train: Callable[[], dict[str, Losses]]) -> dict[str, Losses]:
    """The losses of each run: those that are stored with this digest, or trained and stored."""
    stored = kept().get(name)
    if stored is None or stored["digest"] != known:
        runs = {label: _short(losses) for label, losses in train().items()}
        stored = {"digest": known, "runs": runs}
        every = dict(sorted({**kept(), name: stored}.items()))
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in every.items()]
        STORE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return {label: (counts, losses) for label, (counts, losses) in stored["runs"].items()}


def _short(losses: Losses) -> Losses:
    return list(losses[0]), [float(f"{x:.4g}") for x in losses[1]]
