"""Writes every list of algorithms: `make lists`.

The algorithms are what `functional_optim/algorithms/` defines and decorates with `factory`; their
descriptions are in the front matter of their pages in docs/algorithms/. Everything between two
marks `begin: algorithms` and `end: algorithms` is made of these, but for the names of optax, which
the package has for its errors. The table of files in ARCHITECTURE.md is made of their docstrings,
and drop_ins.pyi of torch's signatures. `--check` writes nothing, and names the files that are not
as they would be written.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent / "extensions"))

from pages import GROUPS, Page, pages  # noqa: E402

from functional_optim.adapters import drop_ins  # noqa: E402
from functional_optim.adapters.ready_made import base_of  # noqa: E402
from functional_optim.core.other_names import TABLE  # noqa: E402

ALGORITHMS = ROOT / "functional_optim" / "algorithms"
ADAPTERS = ROOT / "adapters"
MARK = re.compile(
    r"(# begin: algorithms[^\n]*\n|<!-- begin: (?:algorithms|files) -->\n?)(.*?)"
    r"( *# end: algorithms|<!-- end: (?:algorithms|files) -->)",
    re.DOTALL,
)

CLASS = '''
class {head}:
    """{text}"""

    def __init__(
{signature}
    ) -> None: ...
'''


def made_by_factories() -> dict[str, dict[str, ast.FunctionDef]]:
    """The public factories of each module, by its name."""
    found = {}
    for path in sorted(ALGORITHMS.rglob("*.py")):
        functions = {
            node.name: node
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
            if any(isinstance(x, ast.Name) and x.id == "factory" for x in node.decorator_list)
        }
        if functions:
            home = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[home] = dict(sorted(functions.items()))
    return found


def classes() -> dict[str, list[str]]:
    """The public classes of each module of optimizer objects that is written by hand."""
    return {
        f"functional_optim.adapters.{path.stem}": [
            node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
        ]
        for path in sorted(ADAPTERS.glob("*.py"))
        if path.stem not in ("__init__", "ready_made")
    }


def made(found: dict[str, Page]) -> dict[str, str]:
    """The algorithms whose optimizer objects are made of their functions, by these."""
    by_hand = {name for names in classes().values() for name in names}
    own = {page["optimizer"]: name for name, page in found.items() if "optimizer" in page}
    return {x: own[x] for x in sorted(own) if x not in by_hand}


def imports(homes: dict[str, list[str]]) -> str:
    """The lines of a package's stub that say from which modules it has names."""
    lines = []
    for home, names in sorted(homes.items()):
        for name in sorted(names, key=_like_ruff):
            line = f"from {home} import {name} as {name}\n"
            if len(line) > 101:
                line = f"from {home} import (\n    {name} as {name},\n)\n"
            lines.append(line)
    return "".join([*lines, "\n"])


def _like_ruff(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, each without regard to capitals."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name.lower())


def stub(optimizer: str, function: ast.FunctionDef) -> str:
    """What type checkers read of an algorithm's optimizer object."""
    base = base_of(optimizer)
    text = f"`functional_optim.{function.name}` as an optimizer object."
    takes_model = "views" in [x.arg for x in function.args.kwonlyargs]
    params = "params: ParamsT | torch.nn.Module" if takes_model else "params: ParamsT"
    arguments = signature(function, ("self", params), base.how)
    return CLASS.format(head=f"{optimizer}({base.__name__})", text=text, signature=arguments)


def drop_in(node: ast.ClassDef) -> str:
    """What type checkers read of a drop-in: the arguments in torch's source, and ours."""
    theirs = getattr(torch.optim, node.name).__init__
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(theirs)))).body
    assert isinstance(function, ast.FunctionDef)
    known, given = inspect.signature(theirs).parameters, function.args
    plain = [known[x.arg].default for x in given.args[-len(given.defaults) :]]
    given.defaults = [ast.Constant(x) for x in plain]  # torch has names for some
    bases = ", ".join(map(ast.unparse, node.bases))
    text = (ast.get_docstring(node) or "").partition(" State:")[0]
    arguments = signature(function, (), getattr(drop_ins, node.name).how)
    return CLASS.format(head=f"{node.name}({bases})", text=text, signature=arguments)


def drop_ins_stub() -> str:
    """What type checkers read of all drop-ins."""
    body = ast.parse((ADAPTERS / "drop_ins.py").read_text()).body
    nodes = [x for x in body if isinstance(x, ast.ClassDef) and x.name != "DropIn"]
    return "".join([*map(drop_in, nodes), "\n"])


HOW = {
    "compile": "compile: Compile = True",
    "stored": "stored: Stored | None = None",
    "capturable": "capturable: bool = False",
}


def signature(function: ast.FunctionDef, first: Iterable[str], how: Iterable[str]) -> str:
    """The arguments of a function, as the lines of a constructor.

    first: those before. how: the names of those that say how an algorithm is run.
    """
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    words = [*first, *map(_argument, plain, defaults), "*"]
    words += map(_argument, given.kwonlyargs, given.kw_defaults)
    words += [HOW[name] for name in how]
    return "\n".join([f"        {word},".replace("'", '"') for word in words])


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    return f"{argument.arg}{kind}" + ("" if default is None else f" = {ast.unparse(default)}")


def table(found: dict[str, Page]) -> str:
    """The table to choose from."""
    lines = ["| algorithm | when | memory | try | paper |", "| --- | --- | --- | --- | --- |"]
    for group in GROUPS:
        rows = {name: page for name, page in found.items() if page["group"] == group}
        lines += [f"| **{group}** | | | | |"] if rows else []
        lines += [
            f"| [`{name}`](algorithms/{name}.md) | {page['when']} | {page['memory']} | "
            f"{page['try']} | {page['paper']} |"
            for name, page in rows.items()
        ]
    return "\n".join(lines) + "\n"


def contents(found: dict[str, Page]) -> str:
    """The page of everything: each public name with a link and the first sentence about it."""
    lines = ["# Everything in the package", "", "`make lists` writes this page.", ""]

    def add(title: str, rows: dict[str, tuple[str, str]]) -> None:
        lines.extend((f"## {title}", "", "| | |", "| --- | --- |"))
        for name, (link, thing) in rows.items():
            told = _first_sentence(thing).replace("|", "\\|")
            lines.append(f"| [`{name}`]({link}) | {told} |")
        lines.append("")

    package = importlib.import_module("functional_optim")
    add(
        "Algorithms",
        {x: (f"algorithms/{x}.md", inspect.getdoc(getattr(package, x)) or "") for x in found},
    )
    for path in sorted((ROOT / "docs" / "api").glob("*.rst")):
        text, rows, module = path.read_text(), {}, "functional_optim"
        title = text.splitlines()[0]
        for line in text.splitlines():
            directive, _, told = line.strip().partition(":: ")
            if directive == ".. currentmodule":
                module = told
            elif directive in (".. autofunction", ".. autoclass", ".. autodata"):
                full = told if told.startswith("functional_optim") else f"{module}.{told}"
                home, _, name = full.rpartition(".")
                shown = full.removeprefix("functional_optim.")
                rows[shown] = (f"api/{path.name}", _docstring(home, name))
        if rows:
            add(title, rows)
    return "\n".join(lines)


def _docstring(home: str, name: str) -> str:
    """What is said of a public name; of a value, the string below its assignment."""
    module = importlib.import_module(home)
    thing = getattr(module, name)
    if inspect.isclass(thing) or inspect.isroutine(thing):
        return inspect.getdoc(thing) or ""
    body = ast.parse(inspect.getsource(module)).body
    for node, below in itertools.pairwise(body):
        target = getattr(node, "targets", [getattr(node, "target", None)])[0]
        if getattr(target, "id", "") == name and isinstance(below, ast.Expr):
            return ast.literal_eval(below.value)
    raise ValueError(f"{home}.{name} has no docstring")


def _first_sentence(told: str) -> str:
    paragraph = told.partition("\n\n")[0].replace("\n", " ")
    sentence = re.split(r"(?<=\.)\s", paragraph, maxsplit=1)[0]
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", sentence)


def files() -> str:
    """The table of the package's files: the first sentence of each. Algorithms have their pages."""
    lines = ["| file | contents |", "| --- | --- |"]
    for top in (ROOT / "functional_optim", ADAPTERS):
        for path in sorted(top.rglob("*.py"), key=lambda x: (x.parent, x.name != "__init__.py", x)):
            if ALGORITHMS in path.parents and path.name != "__init__.py":
                continue
            sentence = _first_sentence(ast.get_docstring(ast.parse(path.read_text())) or "")
            folder = path.name == "__init__.py"
            name = path.parent if folder else path
            shown = f"`{name.relative_to(ROOT)}{'/' if folder else ''}`"
            lines.append(f"| {f'**{shown}**' if folder else shown} | {sentence} |")
    return "\n".join(lines) + "\n"


def written() -> dict[Path, list[str]]:
    """What stands between the marks of each file, in their order."""
    modules, found = made_by_factories(), pages()
    functions = {name: f for these in modules.values() for name, f in these.items()}
    own = made(found)
    return {
        ALGORITHMS.parent / "__init__.pyi": [imports({x: [*y] for x, y in modules.items()})],
        ADAPTERS / "__init__.pyi": [imports({"functional_optim.adapters.ready_made": [*own]})],
        ADAPTERS / "ready_made.pyi": [
            "".join([*[stub(x, functions[name]) for x, name in own.items()], "\n"])
        ],
        ADAPTERS / "drop_ins.pyi": [drop_ins_stub()],
        ROOT / "docs" / "choosing.md": [table(found)],
        ROOT / "docs" / "from_optax.md": [f"{TABLE}\n"],
        ROOT / "ARCHITECTURE.md": [files()],
    }


def fill(text: str, parts: list[str]) -> str:
    """A file's text with other parts between its marks."""
    given = iter(parts)
    filled = MARK.sub(lambda m: m[1] + next(given) + m[3], text)
    if next(given, None) is not None:
        raise ValueError(f"{len(parts)} parts need as many pairs of marks")
    return filled


def stale() -> dict[Path, str]:
    """The files that are not as they would be written, with what would be."""
    now = {path: fill(path.read_text(), parts) for path, parts in written().items()}
    now[ROOT / "docs" / "contents.md"] = contents(pages())
    return {path: text for path, text in now.items() if _read(path) != text}


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    found = stale()
    for path, text in found.items():
        print(path.relative_to(ROOT))  # noqa: T201
        if "--check" not in sys.argv:
            path.write_text(text)
    sys.exit(bool(found) and "--check" in sys.argv)
