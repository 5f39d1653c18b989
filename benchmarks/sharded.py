"""Steps over parameters that FSDP2 has divided between two processes, ours and torch's.

make bench ARGS="--only sharded"
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

import fresh
import torch
from pairs import Step, timed
from rows import Effort, Measured, Row
from steps import composed, parts
from torch import Tensor
from workloads import gpt_shapes, parameters

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
    """The seconds of both steps, taken in turns by all processes together."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD
    )
    ours, theirs = [build(shards(quick)) for build in PAIRS[name]]
    for _ in range(3):
        ours()
        theirs()
    samples = [(together(ours), together(theirs)) for _ in range(repeats)]
    torch.distributed.destroy_process_group()
    return {"ours": [a for a, _ in samples], "theirs": [b for _, b in samples]}


def measure(name: str, effort: Effort) -> Measured:
    """Start the processes, and take what the first one has measured."""
    repeats = effort.repeats or (3 if effort.quick else 100)
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
    return Measured(found["ours"], found["theirs"], rival[name])


def rows() -> list[Row]:
    """AdamW, and the composed recipe."""
    words = {"adamw": "AdamW", "composed": "Clip by global norm, AdamW, average: one recipe"}
    model = "GPT, 148 tensors, FSDP2, two processes"
    return [
        Row(f"sharded-{name}", what, model, partial(measure, name), (1.0,))
        for name, what in words.items()
    ]
