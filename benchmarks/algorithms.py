"""A step of every algorithm, compared with torch's fused AdamW and the memory that it must move."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pairs import Step
from rows import Effort, Measured, Row
from steps import forms, measure
from torch import Tensor
from traffic import ADAMW, words
from workloads import BIG, GPT, Workload

import functional_optim as fo
from functional_optim import adapters

sys.path.append(str(Path(__file__).parents[1] / "docs" / "extensions"))

from pages import pages

MARGIN, LEAST = 1.15, 0.5
"""A step may take this many times what its words are of AdamW's; less than `LEAST` of AdamW's time
is never asked for."""

ELSEWHERE = ("dpsgd",)
"""Algorithms with per-example gradients, which no workload has."""


PROJECTING = ("apollo", "galore")
"""Algorithms that multiply gradients by matrices: products take the time, so there is no bar."""


def stepping(name: str, params: list[Tensor]) -> Step:
    """The step of an algorithm as an optimizer object; one that asks for the loss gets a number."""
    opt: Any = adapters.Optimizer(params, getattr(fo, name))
    if "value" in opt.transform(opt.param_groups[0]).required:
        return partial(opt.step, partial(torch.tensor, 1.0))
    return opt.step


def measured() -> list[str]:
    """All that need no arguments, but those of matrices, and those that evaluate functions."""
    found = [name for name, page in pages().items() if page["group"] != "Matrices"]
    arguments = {name: inspect.signature(getattr(fo, name)).parameters.values() for name in found}
    return [
        name
        for name in found
        if name not in ELSEWHERE and all(x.default is not x.empty for x in arguments[name])
        if not {"residual_fn", "value_and_grad"} & {*getattr(fo, name)().extra}
    ]


def in_threads(threads: int, workload: Workload, name: str, effort: Effort) -> Measured:
    """A race with torch's fused AdamW, in some threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rival = {"torch's AdamW, fused": forms("AdamW")["torch, fused"]}
        return measure(workload, partial(stepping, name), rival, False, effort)
    finally:
        torch.set_num_threads(before)


def rows() -> list[Row]:
    """Each algorithm on a GPT and on big tensors, in one thread and in two."""
    return [
        Row(
            f"algorithm-{name}-{workload.key}-{threads}",
            f"`{name}`",
            f"{workload.words}, {threads} thread{'s' * (threads > 1)}",
            partial(in_threads, threads, workload, name),
            () if name in PROJECTING else (max(round(MARGIN * moved / ADAMW, 2), LEAST),),
            words=moved,
        )
        for name in measured()
        for moved in (words(name),)
        for workload in (GPT, BIG)
        for threads in (1, 2)
    ]
