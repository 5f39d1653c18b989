"""Steps on a machine whose cores other programs use, too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from rows import Effort, Measured, Row
from steps import forms, measure, ours
from workloads import BIG, GPT, MLP, Workload

BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:
    sum(range(100_000))
"""
"""It ends if the benchmark does."""


@contextmanager
def neighbours() -> Iterator[None]:
    """Inside, as many other programs as torch has threads compute at the same time."""
    running = [
        subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(torch.get_num_threads())
    ]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def beside(run: Callable[[Effort], Measured], effort: Effort) -> Measured:
    """A row's measurement with neighbours."""
    with neighbours():
        return run(effort)


def rows() -> list[Row]:
    """AdamW: one parallel region a step against one for each tensor."""
    what = "AdamW, with a busy program on each core"
    found: list[tuple[Workload, tuple[float, ...]]] = [(MLP, ()), (GPT, (1.0,)), (BIG, (1.0,))]
    return [
        Row(
            f"load-{workload.key}",
            what,
            workload.words,
            partial(beside, partial(measure, workload, ours("AdamW"), forms("AdamW"), False)),
            bars,
        )
        for workload, bars in found
    ]
