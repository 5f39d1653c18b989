"""Six measured ratios for the first page: read from the pages that hold them, never typed again.

    ```{speed-table}
    ```

is their table. `docs/diagrams.py` draws the same rows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
DEVICES = ROOT / "docs" / "devices.md"
GPT = "GPT, 12 layers, 148 tensors"
SQUARES = "24 matrices of 64 × 64"
COMPOSED = "Clip by global norm, AdamW, average"
COUNT = 6
NO_BREAK = "\N{NO-BREAK SPACE}"


class Speed(NamedTuple):
    """A step of ours compared with one of theirs. ratio: ours / theirs."""

    what: str
    where: str
    ours: str
    theirs: str
    ratio: float


ON_CPU = (
    ("AdamW", "AdamW", GPT, "torch, fused", "torch.optim, fused"),
    (f"{COMPOSED}: one recipe", COMPOSED, GPT, "torch", "torch: clip_grad_norm_, fused, lerp"),
    ("AdamW", "AdamW", GPT, "optax", "optax"),
    ("`soap`", "SOAP", SQUARES, "pytorch_optimizer", "pytorch_optimizer"),
    ("NAdam", "NAdam", GPT, "torch, for-loop", "torch.optim, for-loop"),
)
"""A row of RESULTS.md, what to call it, its workload, how the rival's cell begins, and what to call
that. The first ones that were measured are shown."""

ON_GPU = (
    ("AdamW, 1 B", "AdamW", "1 B parameters", "torch.optim, fused"),
    (
        "clip by global norm, AdamW, average of the parameters",
        COMPOSED,
        "GPT-2, 148 tensors",
        "torch: clip_grad_norm_, foreach",
    ),
)
"""A row of devices.md, what to call it, its tensors, and what to call the rival."""


def cells(path: Path) -> list[list[str]]:
    """The rows of all tables of a page."""
    lines = path.read_text().splitlines()
    return [[x.strip() for x in line.strip("|").split("|")] for line in lines if line[:2] == "| "]


def measured() -> list[Speed]:
    """On the CPU, then on a GPU.

    Raises:
        ValueError: if the pages lack so many of the rows that fewer than six are left.
    """
    on_cpu, found = cells(RESULTS), list[Speed]()
    for row, what, workload, begin, rival in ON_CPU:
        for cell in on_cpu:
            if cell[:2] == [row, workload] and cell[3].partition("), ")[2].startswith(begin):
                version = re.search(rf"{begin} ([\d.]+)", cell[3])
                theirs = f"{rival} {version[1]}" if version else rival
                found.append(Speed(what, f"CPU, {workload}", *times(cell, theirs)))
                break
    found = found[: COUNT - len(ON_GPU)]
    for row, what, workload, rival in ON_GPU:
        found += [
            Speed(what, f"H100, {workload}", *times(cell, rival))
            for cell in cells(DEVICES)
            if cell[0] == row
        ]
    if len(found) != COUNT:
        raise ValueError(
            f"{RESULTS.name} and {DEVICES.name} have {len(found)} of the {COUNT} rows of the speed "
            f"table; correct ON_CPU and ON_GPU in {Path(__file__).name}."
        )
    return found


def times(cell: list[str], rival: str) -> tuple[str, str, float]:
    """Ours, theirs with its name, and the ratio; of the minima where there are medians."""
    ours, theirs = cell[-6:-4] if len(cell) > 5 else cell[1:3]
    ratio = cell[-4] if len(cell) > 5 else cell[3]
    first = re.compile(r"[\d.,]+ \S+?(?=,? |,|$)")
    mine, other = first.match(ours), first.match(theirs)
    if mine is None or other is None:
        raise ValueError(f"the row {' | '.join(cell)} has no two times")
    return mine[0], f"{other[0]}, {rival}", float(ratio)


def setup_of_cpu() -> str:
    """What the rows on the CPU were measured with, in a line."""
    said = dict(re.findall(r"^\* (\w+): (.*)$", RESULTS.read_text(), re.MULTILINE))
    versions = dict(re.findall(r"(\w+) ([\d.]+(?:\+\w+)?)", said["Versions"]))
    own, torch = versions["functional_optim"], versions["torch"]
    processor = said["Processor"].replace("(R)", "")
    return f"CPU: {processor}; torch {torch}, functional_optim {own}, {said['Date']}"


def setup_of_gpu() -> str:
    """The same of the rows on a GPU."""
    text = DEVICES.read_text()
    named = (
        r"\d{4}-\d\d-\d\d",
        r"NVIDIA H100 [^,]+",
        r"(?<=torch )[\d.]+\+cu\d+",
        r"(?<=Triton )[\d.]+\d",
    )
    day, gpu, torch, triton = [x[0] for what in named if (x := re.search(what, text))]
    return f"GPU: {gpu}; torch {torch}, Triton {triton}, {day}"


class SpeedTable(Directive):
    """The rows as a table."""

    def run(self) -> list[nodes.Node]:
        env = self.state.document.settings.env
        for path in (RESULTS, DEVICES, Path(__file__)):
            env.note_dependency(str(path))
        lines = ["| a step of | on | ours | theirs | ratio |", "|" + " --- |" * 5]
        for x in measured():
            ours = x.ours.replace(" ", NO_BREAK)
            lines.append(f"| {x.what} | {x.where} | {ours} | {x.theirs} | {x.ratio:.2f} |")
        lines += ["", f"{setup_of_cpu()}. {setup_of_gpu()}."]
        holder = nodes.container()
        self.state.nested_parse(StringList(lines), self.content_offset, holder)
        return holder.children


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("speed-table", SpeedTable)
    return {"parallel_read_safe": True}
