"""Running the Python examples of a Markdown page.

Blocks that begin with ```` ```python ```` run in order, in one namespace; those with another word
behind it, as in ```` ```python optax ````, do not. Where a statement's last line ends in
`# → text`, its value must print as that text, or what it raises must: `ValueError: message`. `…`
stands for any characters.
"""

import ast
import fnmatch
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
ANY_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
ARROW = "# → "


def blocks(page: str) -> list[str]:
    """The blocks to run, each behind as many empty lines as precede it: so lines are the page's."""
    return ["\n" * page.count("\n", 0, m.start(1)) + m[1] for m in BLOCK.finditer(page)]


def prose(page: str) -> str:
    """The page without its blocks."""
    return ANY_BLOCK.sub("", page)


def run_page(name: str, page: str) -> dict[str, Any]:
    """Run a page's examples, compare what they print, and return their names."""
    home = ModuleType(f"page_{re.sub(r'[^a-z0-9]', '_', name.lower())}")
    sys.modules[home.__name__] = home  # torch.compile looks up there what functions mention
    names, compared, path = vars(home), 0, list(sys.path)
    try:
        for block in blocks(page):
            compared += run_block(name, block, names)
    finally:
        sys.path[:] = path
        del sys.modules[home.__name__]
    promised = sum(block.count(ARROW.strip()) for block in blocks(page))
    assert compared == promised, f"{name}: {promised - compared} outputs stand within a statement"
    return dict(names)


def run_block(name: str, source: str, names: dict[str, Any]) -> int:
    """Run one block; how many outputs were compared."""
    lines = source.splitlines()
    compared = 0
    for statement in ast.parse(source).body:
        at = statement.end_lineno or statement.lineno
        _, arrow, wanted = lines[at - 1].partition(ARROW)
        if not arrow:
            _run(statement, name, names)
            continue
        compared += 1
        try:
            printed = repr(_run(statement, name, names))
        except Exception as error:
            text = error.args[0] if error.args else ""
            printed = f"{type(error).__name__}: {text}"
        assert _fits(wanted.strip(), printed), f"{name}, line {at}: {printed!r}, not {wanted!r}"
    return compared


def _run(statement: ast.stmt, name: str, names: dict[str, Any]) -> Any:
    if isinstance(statement, ast.Expr):
        return eval(compile(ast.Expression(statement.value), name, "eval"), names)
    exec(compile(ast.Module([statement], []), name, "exec"), names)
    return None


def _fits(wanted: str, printed: str) -> bool:
    pattern = "".join("*" if c == "…" else f"[{c}]" if c in "*?[" else c for c in wanted)
    return fnmatch.fnmatchcase(" ".join(printed.split()), pattern)
