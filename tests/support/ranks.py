"""Two processes on one machine that run parts of tests together, started once for all modules.

A file of such tests has `parts(mesh, folder)`: functions by name. Both processes call all of them
in one order; what each returns, or how it failed, goes into the process's file.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

WORLD = 2
MODULES = ("test_distributed", "test_distributed_training", "test_sharded_over")
MODULES += ("test_distributed_torch", "test_distributed_links", "test_distributed_packed")
MODULES += ("test_distributed_rows",)

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)


def whole(x: Any) -> Any:
    """A tensor as one process would have it; anything else as it is."""
    if isinstance(x, DTensor):
        x = x.full_tensor()
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def work(rank: int, folder: str, modules: Sequence[str]) -> dict[str, Any]:
    """What one process does."""
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    found: dict[str, Any] = {}
    for module in modules:
        found |= processes.attempt_all(importlib.import_module(module).parts(mesh, folder))
    return found


def run_both(folder: Path, modules: Sequence[str]) -> list[dict[str, Any]]:
    """The results of the two processes; they have run already, if their files are there."""
    if (folder / f"{WORLD - 1}.pt").exists():
        return processes.results(WORLD, folder)
    return processes.collect(WORLD, work, str(folder), modules, folder=folder)


def results(both: list[dict[str, Any]], name: str) -> list[Any]:
    """What each process returned for a part; fails with its traceback if one did."""
    for mine in both:
        assert not isinstance(mine[name], str), mine[name]
    return [mine[name] for mine in both]
