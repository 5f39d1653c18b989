"""Rows that need a CUDA device; each runs in a separate process, so that it cannot affect
others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import fresh
import torch
from pairs import Step, race
from rows import Effort, Measured, NotHere, Row
from steps import composed, functional, parts
from torch import Tensor
from workloads import gpt_shapes, parameters

from functional_optim import adapters

BILLION = 10**9
SIDE = 4096
BYTES = {"held": 16, "moved": 28}
"""Of a float32 parameter under AdamW: with gradient and slots; read and written in a step."""


def large(quick: bool) -> list[Tensor]:
    """A billion parameters with gradients, or as many as fill two fifths of the free memory.

    Two optimizers step them alternately, and both need slots.
    """
    free, _ = torch.cuda.mem_get_info()
    count = 10**6 if quick else min(BILLION, int(0.4 * free / BYTES["held"]))
    return parameters([(SIDE, SIDE)] * max(1, count // SIDE**2), "cuda")


def model(quick: bool) -> list[Tensor]:
    """The tensors of the 148-tensor GPT."""
    return parameters(gpt_shapes(1, 8, 16) if quick else gpt_shapes(), "cuda")


def fused(params: list[Tensor]) -> Step:
    return torch.optim.AdamW(params, fused=True).step


def samples(ours: Step, theirs: Step, effort: Effort) -> dict[str, Any]:
    found = race(ours, {"theirs": theirs}, effort, torch.cuda.synchronize)
    return {"ours": found.ours, "theirs": found.theirs}


def large_step(effort: Effort) -> dict[str, Any]:
    """Our step against torch's fused one, over the same tensors."""
    params = large(effort.quick)
    found = samples(adapters.AdamW(params).step, fused(params), effort)
    return found | {"note": f"{sum([p.numel() for p in params]):,} parameters."}


def bandwidth(effort: Effort) -> dict[str, Any]:
    """Our step against a copy that moves as many bytes."""
    params = large(effort.quick)
    step = adapters.AdamW(params).step
    step()
    total = sum([p.numel() for p in params])
    elements = BYTES["moved"] * total // 8  # a copy reads four bytes of each, and writes four
    source = torch.empty(min(elements, BILLION // 2), device="cuda")
    target = torch.empty_like(source)
    times = elements / source.numel()
    found = samples(step, lambda: target.copy_(source), effort)
    copying = [times * x for x in found["theirs"]]
    share = min(copying) / min(found["ours"])
    return {
        "ours": found["ours"],
        "theirs": copying,
        "note": f"{total:,} parameters, {share:.0%} of the bandwidth of a copy.",
    }


def launches(effort: Effort) -> dict[str, Any]:
    """Kernels that one step launches: the driver's calls, as the profiler counts them."""

    def count(step: Step) -> float:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=both) as profiler:
            step()
            torch.cuda.synchronize()
        return float(sum(["LaunchKernel" in event.name for event in profiler.events() or []]))

    ours = count(adapters.AdamW(model(effort.quick)).step)
    return {"ours": [ours], "theirs": [count(fused(model(effort.quick)))]}


def captured(step: Step) -> Step:
    """The replay of a step that was captured in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def capturable(cls: Callable[..., torch.optim.Optimizer], params: list[Tensor]) -> Step:
    return captured(cls(params, capturable=True).step)


def graph_object(effort: Effort) -> dict[str, Any]:
    """The object's captured step against torch's."""
    ours = capturable(adapters.AdamW, model(effort.quick))
    theirs = partial(torch.optim.AdamW, fused=True)
    return samples(ours, capturable(theirs, model(effort.quick)), effort)


def graph_functional(effort: Effort) -> dict[str, Any]:
    """The functional captured step against torch's."""
    ours = captured(functional(model(effort.quick)))
    theirs = partial(torch.optim.AdamW, fused=True)
    return samples(ours, capturable(theirs, model(effort.quick)), effort)


def recipe(effort: Effort) -> dict[str, Any]:
    """Clip, AdamW and average as one recipe against torch's parts."""
    return samples(composed(model(effort.quick)), parts(model(effort.quick)), effort)


PROGRAMS: dict[str, Callable[[Effort], dict[str, Any]]] = {
    "large": large_step,
    "bandwidth": bandwidth,
    "launches": launches,
    "graph-object": graph_object,
    "graph-functional": graph_functional,
    "composed": recipe,
}


def measure(name: str, rival: str, effort: Effort) -> Measured:
    if not torch.cuda.is_available():
        raise NotHere("torch sees no CUDA device here.")
    found = fresh.fresh("gpu", name=name, effort=asdict(effort))
    return Measured(found["ours"], found["theirs"], rival, found.get("note", ""))


def rows() -> list[Row]:
    """All that needs a CUDA device."""
    many, gpt, torchs = "up to 1 billion parameters", "GPT, 148 tensors", "torch, fused"
    words = {
        "large": ("AdamW", many, torchs, "s"),
        "bandwidth": ("AdamW / copying as many bytes", many, "copy", "s"),
        "launches": ("Launches in a step of AdamW", gpt, torchs, "launches"),
        "graph-object": ("AdamW in a CUDA graph", gpt, f"{torchs}, in a graph", "s"),
        "graph-functional": ("Functional step in a CUDA graph", gpt, f"{torchs}, in a graph", "s"),
        "composed": ("Clip by global norm, AdamW, average", gpt, "torch's parts", "s"),
    }
    return [
        Row(f"gpu-{name}", f"CUDA: {what}", where, partial(measure, name, rival), unit=unit)
        for name, (what, where, rival, unit) in words.items()
    ]
