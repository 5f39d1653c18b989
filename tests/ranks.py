"""Two processes on one machine that run parts of tests together, started once for all modules.

A module of parts has `parts(mesh, folder)`: functions by name. Both processes call all of them in
one order; what each returns, or how it failed, goes into the process's file.
"""

from __future__ import annotations

import datetime
import importlib
import os
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed as dist
from torch.distributed.tensor import DTensor

WORLD = 2
START_LIMIT = 300  # seconds for one meeting of the processes
LIMIT = 500  # seconds for all that they do: 35, where nobody else computes
MODULES = ("ranks_tensors", "ranks_models", "ranks_parts", "ranks_torch")

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)


def whole(x: Any) -> Any:
    """A tensor as one process would have it; anything else as it is."""
    if isinstance(x, DTensor):
        x = x.full_tensor()
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def work(rank: int, folder: str, modules: tuple[str, ...]) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=START_LIMIT),
    )
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    results: dict[str, Any] = {}
    for module in modules:
        for name, part in importlib.import_module(module).parts(mesh, folder).items():
            start = time.monotonic()
            try:
                results[name] = part()
            except BaseException:  # such is CheckpointException
                results[name] = traceback.format_exc()
            if "RANKS_TIMES" in os.environ and rank == 0:
                with Path(os.environ["RANKS_TIMES"]).open("a") as file:
                    file.write(f"{time.monotonic() - start:7.3f} {name}\n")
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def run_both(folder: Path, modules: tuple[str, ...] = MODULES) -> list[dict[str, Any]]:
    """The results of the two processes."""
    context = mp.get_context("spawn")
    ranks = [
        context.Process(target=work, args=(r, str(folder), modules), daemon=True)
        for r in range(WORLD)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + LIMIT
    try:
        for process in ranks:
            process.join(max(0, end - time.monotonic()))
        codes = [process.exitcode for process in ranks]
        assert codes == [0] * WORLD, f"the processes ended with {codes}; None: not within {LIMIT} s"
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]


def results(both: list[dict[str, Any]], name: str) -> list[Any]:
    """What each process returned for a part; fails with its traceback if one did."""
    for mine in both:
        assert not isinstance(mine[name], str), mine[name]
    return [mine[name] for mine in both]
