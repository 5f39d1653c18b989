"""Builds that nobody waits for, or that are interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BEGUN = """
import torch, functional_optim as fo
def failing(params):
    raise ValueError("mine")
def begin(tx):
    params = {"w": torch.ones(3)}
    try:
        fo.compile_train_step(failing, tx)(params, tx.init(params))
    except ValueError:
        pass
"""


def run(code: str, folder: Any) -> tuple[str, list[str]]:
    """What a process printed that had built nothing before, and what it left."""
    scratch, kept = folder / "scratch", folder / "kept"
    scratch.mkdir()
    told = {"TMPDIR": str(scratch), "FUNCTIONAL_OPTIM_CACHE": str(kept)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BEGUN + code],
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        check=True,
    )
    time.sleep(0.5)  # a compiler that outlives its process would still write
    left = [x.name for x in scratch.iterdir() if not x.name.startswith("torchinductor_")]
    return done.stdout, left


def running(groups: set[int]) -> list[int]:
    """The processes of these groups that still run; one that nobody has waited for does not."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it ended while we looked
            continue
        if int(group) in groups and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def test_a_process_that_ends_leaves_neither_folders_nor_compilers(tmp_path):
    code = """
begin(fo.adamw(0.1))
from functional_optim import kernels
(run,) = {x.build for x in kernels._begun.values()}
print(run.process.pid, run.beside.process.pid)
"""
    said, left = run(code, tmp_path)
    assert left == []
    groups, until = set(map(int, said.split())), time.monotonic() + 30
    while running(groups) and time.monotonic() < until:
        time.sleep(0.1)  # who is killed on a busy machine may need a while to go
    assert running(groups) == []


def test_a_rule_with_the_code_of_one_that_is_being_built_does_not_wait_for_itself(tmp_path):
    code = """
text = '''
def rule(u, slots, p, lr):
    return -1.2345 * lr * u, slots
'''
from functional_optim.kernels import disk_cache
disk_cache.PATIENCE = 0.0
def made(line):
    names = {}
    exec(compile(line * chr(10) + text, "<cell>", "exec"), names)
    return fo.leafwise(None, names["rule"], lambda t, *, lr: (lr,), hyper={"lr": 0.1}, name="own")
begin(made(0))
from functional_optim.kernels import building
starts, real = [], building.start
building.start = lambda *args: starts.append(1) or real(*args)
tx, params = made(1), {"w": torch.ones(3)}
params, _ = fo.compile(tx, strict=True)({"w": torch.ones(3)}, tx.init(params), params)
print(len(starts), params["w"][0].item())
"""
    said, _ = run(code, tmp_path)
    count, value = said.split()
    assert (count, round(float(value), 5)) == ("0", 0.87655)
