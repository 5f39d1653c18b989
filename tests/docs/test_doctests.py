"""Every example in a docstring runs, and every name on the pages of the API has one."""

import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from snippets import ROOT

import functional_optim as fo
from functional_optim import adapters

DIRECTIVE = re.compile(
    r"^\.\. (currentmodule|auto(?:function|class|module)):: *(\S+)\n((?: +:.*\n)*)", re.MULTILINE
)
PAGES = sorted([*(ROOT / "docs").rglob("*.rst"), *(ROOT / "docs" / "algorithms").glob("*.md")])

EXEMPT = {"functional_optim.cache": "a command: the lines for a shell are its example"}


def modules():
    names = [fo.__name__, adapters.__name__]
    for package in (fo, adapters):
        names += [m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return sorted(set(names))


@pytest.mark.parametrize("name", modules())
def test_the_examples_of_a_module_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def documented(pages: list[Path] = PAGES) -> Iterator[tuple[str, str]]:
    """The functions, classes and modules on the pages, by full name, each with the module that is
    shown as a whole with it; "" for a function or class that has a directive of its own."""
    for page in pages:
        home = ""
        for kind, name, options in DIRECTIVE.findall(page.read_text()):
            if kind == "currentmodule":
                home = name
            elif kind == "automodule":
                yield name, name
                if ":members:" in options:
                    shown = members(importlib.import_module(name))
                    yield from [(f"{name}.{member}", name) for member in shown]
            else:
                yield (name if name.startswith(fo.__name__) else f"{home}.{name}"), ""


def members(module: ModuleType) -> list[str]:
    """The functions and classes that autodoc shows of a module."""
    return [
        name
        for name, thing in vars(module).items()
        if name in getattr(module, "__all__", [name]) and not name.startswith("_")
        if inspect.isroutine(thing) or inspect.isclass(thing)
        if thing.__module__ == module.__name__
    ]


def look_up(name: str, module: str) -> Any:
    """What has a full name: a function, even where the module that it is in has the same."""
    if name == module:
        return importlib.import_module(name)
    home, _, last = name.rpartition(".")
    return getattr(importlib.import_module(home), last)


def has_example(doc: str) -> bool:
    return "Example::" in doc and ">>> " in doc


DOCUMENTED = sorted({*documented()})


def test_documented_names_have_docstrings_with_an_example():
    assert [name for name, module in DOCUMENTED if not is_shown(name, module)] == []


def is_shown(name: str, module: str) -> bool:
    """Whether a docstring has an example, or that of its module has one for it."""
    doc = inspect.getdoc(look_up(name, module))
    if doc and (name in EXEMPT or has_example(doc)):
        return True
    whole = (doc and module and inspect.getdoc(importlib.import_module(module))) or ""
    used = f"{name.removeprefix(fo.__name__ + '.')}("
    return any(used in line for line in whole.splitlines() if line.lstrip()[:3] in (">>>", "..."))


def test_there_are_examples_and_names_to_check():
    names = {name for name, _ in DOCUMENTED}
    assert len(names) > 350
    assert {"functional_optim.search.snes", "functional_optim.adapters.AdamW"} <= names
    assert {"functional_optim.tree", "functional_optim.tree.rows"} <= names
    assert "functional_optim.tree.optree" not in names
    assert EXEMPT.keys() <= names
    assert "functional_optim.adapters.drop_ins" in modules()
    assert "functional_optim.algorithms.adam" in modules()


def test_names_are_read_from_every_kind_of_directive(tmp_path):
    page = tmp_path / "page.rst"
    page.write_text(
        ".. currentmodule:: functional_optim.search\n\n.. autofunction:: snes\n"
        ".. autoclass:: functional_optim.State\n   :members: step\n\n"
        ".. automodule:: functional_optim.cache\n\n"
        ".. automodule:: functional_optim.warmup\n   :members:\n"
    )
    names = [name.removeprefix("functional_optim.") for name, _ in documented([page])]
    inside = ["warmup.Warmed", "warmup.warm", "warmup.known", "warmup.main"]
    assert names == ["search.snes", "State", "cache", "warmup", *inside]
