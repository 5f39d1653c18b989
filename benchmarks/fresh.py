"""What a new process costs: compiling with nothing cached, the first step, memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from recipes import FIRST, WHOLE
from rows import Effort, Measured, Row
from workloads import MLP

CHILD = Path(__file__).parent / "child.py"
PATIENCE = 1200
"""Seconds after which a process is given up."""


def environment(folder: str) -> dict[str, str]:
    """The environment of a process that keeps everything in a folder.

    Bytecode is written next to the sources, as torch's was when it was installed.
    """
    here = {
        "TMPDIR": folder,
        "XDG_CACHE_HOME": f"{folder}/cache",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "FUNCTIONAL_OPTIM_CACHE": f"{folder}/functional_optim",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    return {**os.environ, **here}


def run(program: str, folder: str, **arguments: Any) -> dict[str, Any]:
    """What a program of `child.py` measures in a new process that keeps everything in a folder."""
    done = subprocess.run(
        [sys.executable, str(CHILD), program, json.dumps(arguments)],
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"the process for {program} failed: {said[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def fresh(program: str, **arguments: Any) -> dict[str, Any]:
    """The same with nothing cached anywhere."""
    with tempfile.TemporaryDirectory() as folder:
        return run(program, folder, **arguments)


def seconds(program: str, **arguments: Any) -> float:
    return fresh(program, **arguments)["seconds"]


def processes(effort: Effort) -> range:
    return range(1 if effort.quick else effort.repeats or effort.processes)


def compile_once(effort: Effort) -> Measured:
    quick = effort.quick
    return Measured(
        [seconds("cold_compile", layers=12, quick=quick) for _ in processes(effort)], []
    )


def compile_rule(rule: str, effort: Effort) -> Measured:
    ours, theirs, kernels = [], [], 0
    for _ in processes(effort):
        found = fresh("cold_compile", layers=12, quick=effort.quick, rule=rule)
        ours.append(found["seconds"])
        kernels = found["model"]
        theirs.append(seconds("cold_compile", layers=12, quick=effort.quick))
    return Measured(ours, theirs, "AdamW", note=f"{kernels} new kernels for an MLP after it.")


def compile_deeper(effort: Effort) -> Measured:
    ours, theirs = [], []
    for _ in processes(effort):
        ours.append(seconds("cold_compile", layers=48, quick=effort.quick))
        theirs.append(seconds("cold_compile", layers=12, quick=effort.quick))
    return Measured(ours, theirs, "12 layers")


def import_time(effort: Effort) -> Measured:
    """Importing the package with its adapters, in a second process on a machine.

    The first one writes the bytecode, which installing writes for torch.
    """
    once = partial(fresh, "import_both")
    once()
    found = [once() for _ in processes(effort)]
    return Measured([x["ours"] for x in found], [x["theirs"] for x in found], "import torch")


def first_step(kind: str, kept: bool, effort: Effort) -> Measured:
    """Import to first step, compared with torch.optim.AdamW.

    kept: in a second process, which finds the kernels of the first.
    """
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        if kept:
            run("first_step", folder, kind=kind)
        for _ in processes(effort):
            mine = partial(run, "first_step", folder) if kept else partial(fresh, "first_step")
            ours.append(mine(kind=kind)["seconds"])
            theirs.append(seconds("first_step", kind="torch"))
    return Measured(ours, theirs, "torch.optim.AdamW, same")


def new_kernels(which: str, effort: Effort) -> Measured:
    steps = 20 if effort.quick else 1000
    found = fresh("kernels", steps=steps, quick=effort.quick)
    note = f"{found['different']} pairs of lr and betas, after {found['first']} kernel(s) at first."
    return Measured([found[which]], [], note=note)


def peak_memory(kept: bool, effort: Effort) -> Measured:
    """Ours with the compiler in the process, or with kernels that another process has kept."""
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        if kept:
            run("memory", folder, side="ours", quick=True)
        for _ in processes(effort):
            mine = partial(run, "memory", folder) if kept else partial(fresh, "memory")
            ours.append(mine(side="ours", quick=effort.quick)["megabytes"])
            theirs.append(fresh("memory", side="theirs", quick=effort.quick)["megabytes"])
    return Measured(ours, theirs, "torch, fused")


def rows() -> list[Row]:
    """The rows that need separate processes."""
    gpt, mlp = "a GPT of width 64, 148 tensors", MLP.words
    sixty = "60 million parameters"
    return [
        Row(
            "compile-cold",
            "Cold compile of AdamW, nothing cached",
            gpt,
            compile_once,
            (2.5,),
            "ours",
        ),
        *[
            Row(
                f"compile-{key}", f"Cold compile of {what}", gpt, partial(compile_rule, key), (1.5,)
            )
            for key, (what, _) in WHOLE.items()
        ],
        Row(
            "compile-depth",
            "Cold compile of AdamW, 48 layers / 12 layers",
            "GPT of width 64, 580 and 148 tensors",
            compile_deeper,
            (1.1,),
        ),
        Row(
            "import",
            "Import of the package with its adapters, after torch's",
            "second process on a machine",
            import_time,
            (0.13,),
        ),
        Row(
            "first-cold",
            "Import to first step of AdamW, nothing cached anywhere",
            mlp,
            partial(first_step, "adamw", False),
            (1.0,),
        ),
        Row(
            "first-kept",
            "Import to first step of AdamW, second process on a machine",
            mlp,
            partial(first_step, "adamw", True),
            (0.7,),
        ),
        *[
            Row(
                f"first-{key}",
                f"Import to first step, nothing cached: {what}",
                mlp,
                partial(first_step, key, False),
                (1.25,),
            )
            for key, (what, _) in FIRST.items()
        ],
        Row(
            "count-numbers",
            "New kernels in 1,000 steps of OneCycleLR",
            mlp,
            partial(new_kernels, "numbers"),
            (0,),
            "ours",
            "kernels",
        ),
        Row(
            "count-model",
            "New kernels for a second model of other shapes",
            "MLP, then GPT",
            partial(new_kernels, "model"),
            (0,),
            "ours",
            "kernels",
        ),
        Row(
            "memory-cold",
            "Peak memory, a process that compiles",
            sixty,
            partial(peak_memory, False),
            (1.05,),
            unit="MB",
        ),
        Row(
            "memory-kept",
            "Peak memory, kernels kept by another process",
            sixty,
            partial(peak_memory, True),
            (1.05,),
            unit="MB",
        ),
    ]
