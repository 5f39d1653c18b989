"""The directive `loss-curve`: shows the losses of a small model in training.

    ```{loss-curve} adam
    ```

draws the entry "adam" of `trainings.CURVES` or `searches.SEARCHES`: three runs, of which the second
is the suggested start, and usually a baseline in grey. Trained curves are stored
(`curve_store`); the build of the site trains the rest.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import curve_store
import curves
import matplotlib as mpl
import quasi_newton_curves
import residual_curves
import searches
import trainings
from docutils import nodes
from docutils.parsers.rst import Directive
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sphinx.application import Sphinx

import functional_optim as fo

CURVES: dict[str, trainings.Curve | searches.SearchCurve | residual_curves.FitCurve]
CURVES = {**curves.CURVES, **searches.SEARCHES, **residual_curves.FITS}
CURVES |= quasi_newton_curves.DENSE
FOLDER = Path("build", "loss_curves")
GREY, SUGGESTED, OTHERS = "#8c8c8c", "#3a8fd9", ("#e08a2e", "#35a97c")
"""Legible on white and on black."""
STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.grid": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "font.size": 9,
    "legend.frameon": False,
    "legend.labelcolor": GREY,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "functional_optim",
    "text.color": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def known(name: str) -> str:
    """A digest of what a curve depends on."""
    search = name in searches.SEARCHES
    home = inspect.getsourcefile(inspect.unwrap(getattr(fo.search if search else fo, name)))
    assert home is not None
    if name in residual_curves.FITS:
        says = [residual_curves]
    elif name in quasi_newton_curves.DENSE:
        says = [trainings, quasi_newton_curves]
    else:
        says = [searches] if search else [trainings, *([curves] if name in curves.SPECIAL else [])]
    needs = curve_store.sources(Path(home)) | {Path(str(module.__file__)) for module in says}
    return curve_store.digest(needs, *CURVES[name].runs)


def trained(name: str) -> dict[str, trainings.Losses]:
    """The losses of all runs of a curve, and last those of the reference."""
    curve = CURVES[name]
    runs = {label: curve.follow(recipe) for label, recipe in curve.runs.items()}
    reference = curve.reference()
    return runs if reference is None else {**runs, reference[0]: reference[1]}


def draw(name: str, path: Path, *, small: bool = False) -> None:
    """Train runs that are not stored, and write the picture; a small one has curves only."""
    curve = CURVES[name]
    found = curve_store.recall(name, known(name), lambda: trained(name))
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE}):
        figure = Figure(figsize=(2.4, 1.1) if small else (6.4, 3.0))
        # as a constrained layout would leave it, which takes twice as long to draw
        figure.subplots_adjust(*((0.02, 0.03, 0.98, 0.97) if small else (0.1, 0.145, 0.97, 0.97)))
        panel = figure.subplots()
        for i, (label, losses) in enumerate(found.items()):
            if label not in curve.runs:
                panel.plot(*losses, color=GREY, label=label, zorder=2, linewidth=1.2)
                continue
            colour = SUGGESTED if i == 1 else OTHERS[i // 2]
            wide = 2.4 if i == 1 else 1.4
            panel.plot(*losses, color=colour, label=label, linewidth=wide, zorder=4 - i % 2)
        panel.set(yscale="log", xlim=(0, curve.steps))
        low, high = panel.get_ylim()
        panel.set_ylim(max(low, 1e-6), min(high, 3 * losses_at_first(panel)))
        if small:
            panel.minorticks_off()
            panel.set(xticks=[], yticks=[])
        else:
            panel.set(xlabel=curve.axis, ylabel="loss")
            panel.legend(loc="best", fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def losses_at_first(panel: Axes) -> float:
    """The largest value with which a curve begins."""
    return max(line.get_ydata()[0] for line in panel.get_lines())


class LossCurve(Directive):
    """The picture of one algorithm."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        (name,) = self.arguments
        env = self.state.document.settings.env
        if name not in CURVES:
            raise self.error(
                f"loss-curve has no curve {name!r}; add a curve to its page, or add it to "
                "curves.py or searches.py"
            )
        for module in (curves, trainings, searches):
            env.note_dependency(module.__file__)
        path = FOLDER / f"{name}.svg"
        draw(name, Path(env.srcdir, path))
        says = f"{CURVES[name].what} Blue: suggested start."
        image = nodes.image(uri=f"/{path.as_posix()}", alt=f"Loss curves of {name}", width="100%")
        caption = nodes.caption(says, "", nodes.Text(says))
        return [nodes.figure("", image, caption, classes=["loss-curve"])]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("loss-curve", LossCurve)
    return {"parallel_read_safe": True}
