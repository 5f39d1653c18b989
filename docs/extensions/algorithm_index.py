"""The directive `algorithm-index`: all algorithms in the groups of the table to choose from, each
with a small picture of its loss curve.

    ```{algorithm-index}
    ```
"""

from __future__ import annotations

from pathlib import Path

import loss_curves
import pages
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

BREAK = "\N{ZERO WIDTH SPACE}"
OTHERS = {"search": ("Search methods", "cma_es"), "estimators": ("Gradient estimators", None)}
"""Pages of several methods: how to call them, and the picture to show."""


class AlgorithmIndex(Directive):
    """A section for each group, and a tile for each algorithm."""

    def run(self) -> list[nodes.Node]:
        env = self.state.document.settings.env
        env.note_dependency(__file__)
        env.note_dependency(str(loss_curves.__file__))
        found, sections = pages.pages(), list[nodes.Node]()
        for group in pages.GROUPS:
            own = {name: page["when"] for name, page in found.items() if page["group"] == group}
            sections.append(section(group, [tile(env, name, name, name) for name in own]))
        tiles = [tile(env, page, title, name) for page, (title, name) in OTHERS.items()]
        return [*sections, section("Without gradients", tiles)]


def section(title: str, tiles: list[nodes.Node]) -> nodes.Node:
    """A heading and the tiles below it."""
    held = nodes.container("", *tiles, classes=["tiles"])
    return nodes.section("", nodes.title(title, title), held, ids=[nodes.make_id(title)])


def tile(env: BuildEnvironment, page: str, title: str, curve: str | None) -> nodes.Node:
    """A link to a page, with a picture and a name."""
    inner = nodes.inline("", "", nodes.Text(title.replace("_", f"_{BREAK}")), classes=["name"])
    if curve is not None:
        path = loss_curves.FOLDER / f"{curve}-small.svg"
        loss_curves.draw(curve, Path(env.srcdir, path), small=True)
        inner.insert(0, nodes.image(uri=f"/{path.as_posix()}", alt=""))
    link = nodes.reference("", "", inner, internal=True, refuri=f"{page}.html")
    return nodes.paragraph("", "", link, classes=["tile"])


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("algorithm-index", AlgorithmIndex)
    return {"parallel_read_safe": True}
