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
QUICK = {"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True}
"""Options of Inductor that spare a first compilation headers, trials and processes which pay off
from the tenth kernel on: half of its time."""

_steps: OrderedDict[Any, Callable[..., Any]] = OrderedDict()


def compiled_step(rules: loop.Rules, problem: Problem) -> loop.Step:
    """`loop.advance` as one graph, for a fixed number of problems."""
    key = (problem.fun, problem.one.layout, problem.m, rules)
    if key not in _steps:

        def advance(s: loop.Progress, data: loop.Data) -> loop.Progress:
            return loop.advance(rules, problem, s, data)

        _steps[key] = _compiled(advance)
        while len(_steps) > KEPT:
            _steps.popitem(last=False)
    _steps.move_to_end(key)
    return _steps[key]


def _compiled(advance: Callable[..., Any]) -> Callable[..., Any]:
    try:
        return torch.compile(advance, fullgraph=True, dynamic=False, options=QUICK)
    except RuntimeError:  # a torch without one of these options
        return torch.compile(advance, fullgraph=True, dynamic=False)
