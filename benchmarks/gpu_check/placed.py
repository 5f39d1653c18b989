"""Slots in host memory, and parameters that FSDP2 has divided: next to plain steps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters
from gpu_check.platform import NotHere, Platform
from gpu_check.recipes import clipped
from gpu_check.results import Check, Figures, expect
from gpu_check.training import check_close, parameters, tensors_of

SHAPES = [(512, 130), (67,), (130, 64)]
STEPS = 4

SHARDED: dict[str, Callable[..., fo.GradientTransformation]] = {
    "adamw": fo.adamw,
    "clip": partial(clipped, max_norm=0.5, decay=0.9),
    "lamb": fo.lamb,
    "adafactor": fo.adafactor,
    "int8": lambda lr: fo.stored(fo.adamw(lr), "int8"),
}


def checks(quick: bool) -> list[Check]:
    names = list(SHARDED)[: 2 if quick else None]
    sharded = [Check(f"placed/fsdp2-{name}", partial(divided, name)) for name in names]
    return [Check("placed/offload", offloaded), *sharded]


def walked(params: list[Tensor], recipe: Callable[..., Any]) -> torch.optim.Optimizer:
    opt = adapters.Optimizer(params, recipe, lr=0.01)
    for _ in range(STEPS):
        opt.step()
    return opt


def offloaded(platform: Platform, figures: Figures) -> None:
    """Large slots stay in host memory, and the steps are the same."""
    if platform.device.type == "cpu":
        raise platform.not_here()
    plain, moved = (parameters(SHAPES, platform.device) for _ in range(2))
    walked(plain, fo.adamw)
    opt = walked(moved, lambda lr: fo.offload(fo.adamw(lr), "cpu"))
    for i, (x, y) in enumerate(zip(moved, plain, strict=True)):
        check_close(x, y, f"parameter {i}")
    large = [x for x in tensors_of(opt).values() if x.numel() >= 4096]
    figures["slots in host memory"] = len(large)
    expect(len(large) == 4, f"{len(large)} slots are large, instead of 4.")
    expect(all(x.device.type == "cpu" for x in large), "a large slot is on the device.")


def divided(name: str, platform: Platform, figures: Figures) -> None:
    """Steps of DTensors in one process, with the collectives of the device."""
    dist = torch.distributed
    if not dist.is_available():
        raise NotHere("this torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    plain = parameters(SHAPES, platform.device)
    walked(plain, SHARDED[name])
    model = torch.nn.Module()
    start = parameters(SHAPES, platform.device)
    model.tensors = torch.nn.ParameterList([p.detach().clone() for p in start])
    backend = "nccl" if platform.device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        dist.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
        try:
            fully_shard(model, mesh=init_device_mesh(platform.device.type, (1,)))
            params: list[Any] = list(model.parameters())
            grads: list[Any] = [p.grad for p in start]
            for p, g in zip(params, grads, strict=True):
                p.grad = DTensor.from_local(g, p.device_mesh, p.placements, run_check=False)
            walked(params, SHARDED[name])
            for i, (x, y) in enumerate(zip(params, plain, strict=True)):
                check_close(x.full_tensor(), y, f"parameter {i}")
        finally:
            dist.destroy_process_group()
