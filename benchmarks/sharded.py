"""Steps over parameters that FSDP2 has divided between two processes, ours and torch's.

make bench ARGS="--only sharded"
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import fresh
import torch
from pairs import Step, timed
from rows import Effort, Measured, Row
from steps import Build, composed, ours, parts
from torch import Tensor
from workloads import gpt_shapes, parameters

import functional_optim as fo
from functional_optim import adapters

WORLD = 2
PAIRS = {
    "adamw": (
        lambda params: adapters.AdamW(params).step,
        lambda params: torch.optim.AdamW(params, fused=True).step,
    ),
    "composed": (composed, parts),
}
"""Ours and torch's, by the name of the row: from parameters with gradients to a step."""


def spread(lr: float = 1e-3) -> fo.GradientTransformation:
    """Muon, each of whose matrices is computed by one process."""
    return fo.matrix_owners(fo.muon(lr))


def muon(recipe: Callable[..., fo.GradientTransformation]) -> Build:
    """The step of a recipe over matrices."""
    return lambda params: adapters.Optimizer([p for p in params if p.dim() == 2], recipe).step


ALONE: dict[str, tuple[Build, Build]] = {
    "lamb": (ours("LAMB"), ours("LAMB")),
    "adafactor": (ours("Adafactor"), ours("Adafactor")),
    "muon": (muon(spread), muon(fo.muon)),
}
"""Ours that need more of a tensor than a shard has, over shards and over tensors that are not
divided. Both run in each of the processes, and the second one's time counts for the elements that a
process has of the first one's."""


class Model(torch.nn.Module):
    """The tensors of a GPT, as a module that can be divided."""

    def __init__(self, quick: bool) -> None:
        super().__init__()
        made = parameters(gpt_shapes(1, 8, 16) if quick else gpt_shapes())
        self.tensors = torch.nn.ParameterList([p.detach() for p in made])


def shards(quick: bool) -> list[Tensor]:
    """This process's parameters (DTensors) with gradients."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = Model(quick)
    fully_shard(model)
    params: list[Any] = list(model.parameters())
    for p in params:
        own = 0.01 * torch.randn(p.to_local().shape)
        p.grad = DTensor.from_local(own, p.device_mesh, p.placements, run_check=False)
    return params


def together(step: Step) -> float:
    """Seconds of a step that all processes begin at once."""
    torch.distributed.barrier()
    return timed(step)


def turns(name: str, rank: int, meeting: str, repeats: int, quick: bool) -> dict[str, Any]:
    """The seconds of both steps, taken alternately by all processes together."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD
    )
    if name in ALONE:
        whole = parameters(gpt_shapes(1, 8, 16) if quick else gpt_shapes())
        mine, alone = ALONE[name]
        steps, share = [mine(shards(quick)), alone(whole)], 1 / WORLD
    else:
        steps, share = [build(shards(quick)) for build in PAIRS[name]], 1.0
    for _ in range(3):
        for step in steps:
            step()
    first, second = steps
    samples = [(together(first), share * together(second)) for _ in range(repeats)]
    torch.distributed.destroy_process_group()
    return {"ours": [a for a, _ in samples], "theirs": [b for _, b in samples]}


def measure(name: str, effort: Effort) -> Measured:
    """Start the processes, and take what the first one has measured."""
    often = 10 if name == "muon" else 100
    repeats = effort.repeats or (3 if effort.quick else often)
    with tempfile.TemporaryDirectory() as folder:
        given = {"name": name, "meeting": f"{folder}/meeting", "repeats": repeats}
        command = [sys.executable, str(fresh.CHILD), "sharded"]
        others = [
            subprocess.Popen(
                [*command, json.dumps({**given, "rank": rank, "quick": effort.quick})],
                stdout=subprocess.DEVNULL,
                env=fresh.environment(folder),
            )
            for rank in range(1, WORLD)
        ]
        try:
            found = fresh.run("sharded", folder, **given, rank=0, quick=effort.quick)
            for process in others:
                process.wait(fresh.PATIENCE)
        finally:
            for process in others:
                process.kill()
    rival = {"adamw": "torch, fused", "composed": "torch: clip_grad_norm_, fused, foreach lerp"}
    return Measured(found["ours"], found["theirs"], rival.get(name, "undivided, per element"))


def rows() -> list[Row]:
    """AdamW and the composed recipe compared with torch's; other rules with their own eager
    forms."""
    words = {
        "adamw": ("AdamW", 0.7),
        "composed": ("Clip by global norm, AdamW, average: one recipe", 0.5),
        "lamb": ("LAMB", 1.3),
        "adafactor": ("Adafactor", 1.3),
        "muon": ("Muon, its matrices", 1.3),
    }
    model = "GPT, 148 tensors, FSDP2, two processes"
    return [
        Row(f"sharded-{name}", what, model, partial(measure, name), (bar,))
        for name, (what, bar) in words.items()
    ]
