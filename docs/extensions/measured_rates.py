"""The directive `measured-rates`: shows an optimizer's final scores over its learning rate.

    ```{measured-rates} soap
    ```

draws the rows of `benchmarks/comparison/results` for the contender "soap" on all tasks but the
valleys, with AdamW's. Nothing is trained: `make compare` makes the rows. Without rows there is no
picture.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import matplotlib as mpl
from docutils import nodes
from docutils.parsers.rst import Directive
from loss_curves import STYLE
from sphinx.application import Sphinx

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from comparison import pages, pictures
from comparison.contenders import all_contenders
from comparison.measures import Comparison

FOLDER = Path("build", "measured_rates")


@cache
def published() -> Comparison:
    return pages.published()


def draw(name: str, path: Path) -> bool:
    """Write the picture; whether there is anything to show."""
    tasks = [cell.task for cell in published().by(name) if cell.task.passes is None]
    if tasks:
        path.parent.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context({**mpl.rcParamsDefault, **STYLE, "savefig.transparent": True}):
            pictures.single(published(), name, tasks, path)
    return bool(tasks)


class MeasuredRates(Directive):
    """The picture of one optimizer."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        (name,) = self.arguments
        env = self.state.document.settings.env
        if name not in all_contenders():
            raise self.error(
                f"measured-rates has no {name!r}; add it to benchmarks/comparison/contenders.py, "
                "and run make compare"
            )
        for file in (pages.HOME / "comparison" / "results").glob("*.jsonl"):
            env.note_dependency(str(file))
        path = FOLDER / f"{name}.svg"
        if not draw(name, Path(env.srcdir, path)):
            return []
        alt = f"Final scores of {name} over its learning rate"
        image = nodes.image(uri=f"/{path.as_posix()}", alt=alt, width="100%")
        return [nodes.figure("", image, classes=["loss-curve"])]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("measured-rates", MeasuredRates)
    return {"parallel_read_safe": True}
