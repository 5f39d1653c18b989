"""What Accelerate's own launcher starts twice: each process leaves what it found in a file.

A process of its own, because the launcher forks: `python accelerate_ranks.py folder`.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

import accelerate
import cases
import loops
import torch
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader

import functional_optim as fo

WORLD = 2
BATCH = 3
EVERY = 2  # local steps between two averages


def parted(lr: float) -> fo.GradientTransformation:
    """By the names of the parameters, which Accelerate may replace."""
    parts = {"matrices": fo.adamw(lr), "vectors": fo.sgd(lr)}
    return fo.partition(parts, {"*.weight": "matrices", "*.bias": "vectors"})


CASES = [loops.row(name) for name in ("sgd-momentum", "adamw", "adafactor", "composed")]
CASES += [cases.row("parted", parted, lr=0.1)]


def make(case: cases.Case, model: torch.nn.Module) -> Any:
    kind = loops.drop_in if case.stock else loops.general
    return kind(case, model.named_parameters())


def data() -> torch.Tensor:
    return torch.cat(loops.batches(6))


def forget() -> None:
    accelerate.state.AcceleratorState._reset_state()
    accelerate.state.GradientState._reset_state()


def train(here: Any, objects: Any) -> Any:
    """Through a prepared loader, in which every process has its own batches."""
    model, opt, scheduler, loader = objects
    for x in loader:
        here.backward(loops.loss_of(model, x))
        here.clip_grad_norm_(model.parameters(), 0.05)
        opt.step()
        scheduler.step()
        opt.zero_grad()
    return {n.removeprefix("module."): whole(p) for n, p in model.named_parameters()}


def whole(p: torch.Tensor) -> torch.Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


def prepared(here: Any, case: cases.Case) -> Any:
    model = loops.make_model(case)
    opt = make(case, model)
    scheduler = lrs.StepLR(opt, 1, 0.7)
    return here.prepare(model, opt, scheduler, DataLoader(data(), batch_size=BATCH))


def replicated(case: cases.Case, folder: str) -> Any:
    """DDP: where it goes, and where it goes on from what it saved."""
    forget()
    here = accelerate.Accelerator(cpu=True)
    assert here.num_processes == WORLD
    objects = prepared(here, case)
    ended = train(here, objects)
    here.save_state(f"{folder}/{case.name}")
    further = train(here, objects)
    forget()
    there = accelerate.Accelerator(cpu=True)
    others = prepared(there, case)
    there.load_state(f"{folder}/{case.name}")
    return {"ended": ended, "further": further, "resumed": train(there, others)}


def sharded(case: cases.Case) -> Any:
    """FSDP2, whose parameters the optimizer gets when it is prepared.

    Accelerate leaves the plugin out on CPUs. Its preparation works there, too, once it is asked.
    """
    forget()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    here = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    here.state.distributed_type, here.state.fsdp_plugin = DistributedType.FSDP, plugin
    objects = prepared(here, case)
    assert all(isinstance(p, DTensor) for p in objects[0].parameters())
    return {"ended": train(here, objects)}


def local(case: cases.Case) -> Any:
    """LocalSGD: parameters are averaged after every second step."""
    forget()
    here = accelerate.Accelerator(cpu=True)
    model, opt, _, loader = prepared(here, case)
    with LocalSGD(accelerator=here, model=model, local_sgd_steps=EVERY) as average:
        for x in loader:
            here.backward(loops.loss_of(model, x))
            opt.step()
            opt.zero_grad()
            average.step()
    return {"ended": {n.removeprefix("module."): whole(p) for n, p in model.named_parameters()}}


def work(folder: str) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    parts = {"replicated": lambda case: replicated(case, folder), "sharded": sharded}
    for name, part in {**parts, "local": local}.items():
        for case in CASES:
            try:
                found[f"{name}-{case.name}"] = part(case)
            except BaseException:
                found[f"{name}-{case.name}"] = traceback.format_exc()
    torch.save(found, f"{folder}/{accelerate.PartialState().process_index}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    accelerate.debug_launcher(work, args=(sys.argv[1],), num_processes=WORLD)
