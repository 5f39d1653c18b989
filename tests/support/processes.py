"""Several processes that work together, started and collected by a test."""

import datetime
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import distributed as dist

MEETING = 300  # seconds until all processes of a group are there, and for one collective
LIMIT = 500  # seconds for all that the processes of one call do, where others compute, too


def start(world: int, work: Callable[..., Any], *args: Any, folder: Path, meet: bool = True) -> Any:
    """Start processes that call `work(rank, *args)`, in a gloo group of their own if they meet."""
    context = mp.get_context("spawn")
    ranks = [
        context.Process(target=_run, args=(rank, world, work, args, str(folder), meet), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    return ranks


def join(ranks: Any, limit: float = LIMIT) -> list[int | None]:
    """Wait for processes to end; their exit codes, None for one that did not."""
    end = time.monotonic() + limit
    try:
        for process in ranks:
            process.join(max(0, end - time.monotonic()))
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def collect(world: int, work: Callable[..., Any], *args: Any, folder: Path) -> list[Any]:
    """What each process returned: tensors and plain containers."""
    folder.mkdir(parents=True, exist_ok=True)
    codes = join(start(world, work, *args, folder=folder))
    assert codes == [0] * world, f"the processes ended with {codes}; None: not within {LIMIT} s"
    return results(world, folder)


def results(world: int, folder: Path) -> list[Any]:
    """What processes that have ended left behind."""
    found = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]
    for mine in found:
        assert not isinstance(mine, str), mine
    return found


def attempt_all(parts: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What each of several parts returns, or how it failed."""
    found: dict[str, Any] = {}
    for name, part in parts.items():
        try:
            found[name] = part()
        except BaseException:  # such is CheckpointException
            found[name] = traceback.format_exc()
    return found


def _run(rank: int, world: int, work: Any, args: Any, folder: str, meet: bool) -> None:
    torch.set_num_threads(1)
    if meet:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=MEETING),
        )
    try:
        result = work(rank, *args)
    except BaseException:  # such is CheckpointException
        result = traceback.format_exc()
    torch.save(result, f"{folder}/{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()
