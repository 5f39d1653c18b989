"""Steps compiled with torch.compile, kept for the functions that they evaluate."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from functional_optim.solvers import loop
from functional_optim.solvers.problems import Problem

KEPT = 16
"""Compiled steps that are kept: those used last."""

_steps: OrderedDict[Any, Callable[..., Any]] = OrderedDict()


def compiled_step(rules: loop.Rules, problem: Problem) -> loop.Step:
    """`loop.advance` as one graph, for a fixed number of problems."""
    key = (problem.fun, problem.one.layout, problem.m, rules)
    if key not in _steps:

        def advance(s: loop.Progress, data: loop.Data) -> loop.Progress:
            return loop.advance(rules, problem, s, data)

        _steps[key] = torch.compile(advance, fullgraph=True, dynamic=False)
        while len(_steps) > KEPT:
            _steps.popitem(last=False)
    _steps.move_to_end(key)
    return _steps[key]
