"""What compiling a whole train step costs, and the steps."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fresh import fresh, processes, run, seconds
from rows import Effort, Measured, Row

OUTSIDE = "compiled, fused AdamW outside"


def compiling(side: str, effort: Effort, layers: int | None = None) -> Measured:
    """Seconds of the first step, nothing cached."""
    ours, theirs = [], []
    given: dict[str, Any] = {"quick": effort.quick, "layers": layers}
    for _ in processes(effort):
        ours.append(seconds("train_compile", side=side, **given))
        theirs.append(seconds("train_compile", side="theirs", **given))
    return Measured(ours, theirs, OUTSIDE)


def compiling_kept(effort: Effort) -> Measured:
    """The same where an earlier process has kept the kernels, and nothing else."""
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as first:
        run("first_step", first)
        for _ in processes(effort):
            with tempfile.TemporaryDirectory() as folder:
                kept = "functional_optim"
                shutil.copytree(Path(first) / kept, Path(folder) / kept)
                found = run("train_compile", folder, side="ours", quick=effort.quick)
            ours.append(found["seconds"])
            theirs.append(seconds("train_compile", side="theirs", quick=effort.quick))
    return Measured(ours, theirs, OUTSIDE)


def steps(side: str, effort: Effort) -> Measured:
    """Steps alternately."""
    found = fresh("train_steps", side=side, effort=asdict(effort))
    return Measured(found["ours"], found["theirs"], OUTSIDE)


def memory(effort: Effort) -> Measured:
    """Megabytes at most, while some steps were taken."""
    found = {
        side: [
            fresh("train_memory", side=side, quick=effort.quick)["megabytes"]
            for _ in processes(effort)
        ]
        for side in ("ours", "theirs")
    }
    return Measured(found["ours"], found["theirs"], OUTSIDE)


def rows() -> list[Row]:
    """Of `compile_train_step`, and of everything in one graph."""
    example = "the example's GPT"
    own, one = "Train step, loss and update compiled", "Train step in one graph"
    return [
        Row("train-step", own, example, partial(steps, "ours"), (0.99,)),
        Row("train-compile", f"Compiling: {own}", example, partial(compiling, "ours"), (1.15,)),
        Row(
            "train-compile-kept",
            f"Compiling: {own}, kernels kept",
            example,
            compiling_kept,
            (1.08,),
        ),
        Row(
            "train-compile-deep",
            f"Compiling: {own}",
            "the same with 16 layers",
            partial(compiling, "ours", layers=16),
            (1.2,),
        ),
        Row("train-memory", f"Peak memory: {own}", example, memory, (1.02,), unit="MB"),
        Row("train-graph", one, example, partial(steps, "graph"), (1.0,)),
        Row(
            "train-graph-compile",
            f"Compiling: {one}",
            example,
            partial(compiling, "graph"),
            (1.65,),
        ),
    ]
