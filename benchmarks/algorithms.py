"""A step of every algorithm that torch.optim lacks, beside our AdamW's."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from pathlib import Path
from typing import Any

import optree
import torch
from pairs import Step
from rows import Row
from steps import ours, row
from torch import Tensor
from workloads import GPT

import functional_optim as fo
from functional_optim import adapters

sys.path.append(str(Path(__file__).parents[1] / "docs" / "extensions"))

from pages import pages

MARGIN = 1.3
"""A step may take this many times what its state's share of AdamW's would make it take."""

ELSEWHERE = ("lbfgs", "dpsgd")
"""Rows of its own, and gradients of single examples, which no workload has."""


def stepping(name: str, params: list[Tensor]) -> Step:
    """The step of an algorithm as an optimizer object; one that asks for the loss gets a number."""
    opt: Any = adapters.Optimizer(params, getattr(fo, name))
    if "value" in opt.transform(opt.param_groups[0]).required:
        return partial(opt.step, partial(torch.tensor, 1.0))
    return opt.step


def entries(name: str) -> float:
    """Entries of state for each entry of a matrix."""
    p = torch.zeros(64, 64)
    state: Any = getattr(fo, name)().init(p)
    kept: Any = (state.slots, state.carry) if isinstance(state, fo.State) else state
    return sum(x.numel() for x in optree.tree_leaves(kept)) / p.numel()


def bars(name: str) -> tuple[float, ...]:
    """What its state allows; none for one that has no state."""
    share = entries(name) / entries("adamw")
    return (round(MARGIN * share, 2),) if share > 0.4 else ()


def measured() -> list[str]:
    """Those that torch.optim lacks, need no arguments, and are not those in `matrices`."""
    found = [
        name
        for name, page in pages().items()
        if page.get("optimizer") not in dir(torch.optim) and page["group"] != "Matrices"
    ]
    arguments = {name: inspect.signature(getattr(fo, name)).parameters.values() for name in found}
    return [
        name
        for name in found
        if name not in ELSEWHERE and all(x.default is not x.empty for x in arguments[name])
    ]


def rows() -> list[Row]:
    """One for each, on the GPT."""
    rivals = {"our AdamW": ours("AdamW")}
    return [
        row(f"algorithm-{name}", f"`{name}`", GPT, partial(stepping, name), rivals, bars(name))
        for name in measured()
    ]
