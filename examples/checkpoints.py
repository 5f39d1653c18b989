"""Distributed checkpoints of which the newest complete one is always there.

    python examples/checkpoints.py [folder]
    torchrun --nproc-per-node 2 examples/checkpoints.py [folder]

trains a small model and saves every second step. Kill it whenever you like and start it again, with
as many processes as you like: it goes on where its newest complete checkpoint is.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp

import functional_optim as fo

STEPS = 20


def save(folder: Path, step: int, state: dict[str, Any], keep: int = 2) -> Path:
    """Save under a name that says "not yet", and give the folder its own name at the end.

    Args:
        folder: the folder of a run, which has a subfolder for each checkpoint.
        step: names it, with at most eight digits.
        state: what `torch.distributed.checkpoint.save` takes.
        keep: how many of the newest stay, ≥ 1.

    Returns:
        The checkpoint.
    """
    final = folder / f"step-{step:08d}"
    part = final.with_suffix(".part")
    if first():
        shutil.rmtree(part, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    meet()
    dcp.save(state, checkpoint_id=part)  # pyright: ignore[reportPrivateImportUsage]
    if first():
        discard(final)
        part.rename(final)
        for old in complete(folder)[:-keep]:
            discard(old)
    meet()
    return final


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, the newest last."""
    return sorted(path for path in folder.glob("step-*") if not path.suffix)


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run; None if there is none yet."""
    return next(reversed(complete(folder)), None)


def discard(path: Path) -> None:
    """Delete a checkpoint; one that is half deleted does not count as complete."""
    old = path.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
        shutil.rmtree(old)


def first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def train(folder: Path) -> dict[str, Any]:
    """Train from the newest complete checkpoint to the end; the parameters."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 3), torch.randn(64)
    params = {"w": torch.zeros(3), "b": torch.zeros(())}
    tx = fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(1e-1), fo.params_ema(0.9))
    state = tx.init(params)

    found = newest(folder)
    if found is not None:
        saved = {"model": params, "optimizer": fo.state_dict(state, params)}
        dcp.load(saved, checkpoint_id=found)  # pyright: ignore[reportPrivateImportUsage]
        params = saved["model"]
        state = fo.load_state_dict(state, saved["optimizer"], params)
    if first():
        print(f"goes on with {found.name}" if found else "starts")

    def loss_fn(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return ((x @ params["w"] + params["b"] - y) ** 2).mean()

    while state.step < STEPS:
        grads = torch.func.grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        params = fo.apply_updates(params, updates)
        if state.step % 2 == 0:
            held = {"model": params, "optimizer": fo.state_dict(state, params)}
            save(folder, int(state.step), held)
    if first():
        print(f"loss {loss_fn(params):.4f} after {int(state.step)} steps")
    return params


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    train(Path(sys.argv[1] if len(sys.argv) > 1 else "build/checkpoints"))
    if dist.is_initialized():
        dist.destroy_process_group()
