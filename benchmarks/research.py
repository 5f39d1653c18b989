"""Sixteen models in one compiled step against a loop, and steps inside the backward pass.

make bench ARGS="--only ensemble,backward"
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pairs import Step, race
from rows import Effort, Measured, NotHere, Row
from torch import Tensor

import functional_optim as fo
from functional_optim import adapters

sys.path.append(str(Path(__file__).parent.parent / "examples"))

MEMBERS = 16


def together(example: Any, lrs: Tensor, x: Tensor, y: Tensor) -> Step:
    """The example's step: all members in one compiled graph, in place."""
    params, state = example.start(lrs)
    step = torch.compile(example.ensemble_step, fullgraph=True)
    return lambda: step(params, state, lrs, x, y)


def compiled_loop(example: Any, lrs: Tensor, x: Tensor, y: Tensor) -> Step:
    """The same step of one member, compiled once for all of them, called for one after another."""

    def one(params: Any, state: Any, lr: Tensor, x: Tensor, y: Tensor) -> Tensor:
        *new, loss = example.member_step(params, state, lr, x, y)
        fo.tree.map(Tensor.copy_, (params, state), tuple(new))
        return loss

    params, state = example.start(lrs)
    own = [fo.tree.map(lambda x, i=i: x[i].clone(), (params, state)) for i in range(len(lrs))]
    rates = list(lrs.clone().unbind())
    step = torch.compile(one, fullgraph=True)

    def loop() -> None:
        for (params, state), lr in zip(own, rates, strict=True):
            step(params, state, lr, x, y)

    return loop


def object_loop(
    make: Callable[..., torch.optim.Optimizer], example: Any, lrs: Tensor, x: Tensor, y: Tensor
) -> Step:
    """Modules with optimizer objects, as in a usual loop: eager forward and backward."""
    models = [example.digits.network(seed).requires_grad_() for seed in range(len(lrs))]
    opts = [make(m.parameters(), lr=lr) for m, lr in zip(models, lrs.tolist(), strict=True)]

    def loop() -> None:
        for model, opt in zip(models, opts, strict=True):
            opt.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            opt.step()

    return loop


LOOPS: dict[str, Callable[..., Step]] = {
    "a loop over one compiled step": compiled_loop,
    "an eager loop over torch's fused AdamW": partial(
        object_loop, partial(torch.optim.AdamW, fused=True)
    ),
    "an eager loop over our AdamW": partial(object_loop, adapters.AdamW),
}


def compare(rival: str, effort: Effort) -> Measured:
    """All at once and one by one, alternately."""
    if importlib.util.find_spec("sklearn") is None:
        raise NotHere("scikit-learn cannot be imported here.")
    example = importlib.import_module("ensemble")
    lrs = example.rates(2 if effort.quick else MEMBERS)
    data = example.digits.load()
    x, y = data.x[: example.BATCH], data.y[: example.BATCH]
    made = LOOPS[rival](example, lrs, x, y)
    return race(together(example, lrs, x, y), {rival: made}, effort)


def memory(effort: Effort) -> Measured:
    """The peak of a train step above its start: it has no spread, so it is taken once."""
    example = importlib.import_module("in_backward")
    layers, width = (2, 16) if effort.quick else (example.LAYERS, example.WIDTH)
    sizes = example.compare(layers, width)
    note = f"All gradients are {sizes['gradients'] / 1e6:.2f} MB."
    return Measured([sizes["in backward"] / 1e6], [sizes["usual"] / 1e6], "a usual step", note)


def rows() -> list[Row]:
    """The ensemble against each loop, and the memory of steps inside the backward pass."""
    what = f"{MEMBERS} models, {MEMBERS} learning rates: one vmapped, compiled step"
    found = [
        Row(f"ensemble-{key}", what, "MLP, digits, batch of 32", partial(compare, rival), (0.25,))
        for key, rival in zip(("compiled", "torch", "object"), LOOPS, strict=True)
    ]
    model = "16 layers of 256 × 256"
    name = "AdamW inside the backward pass: peak of a train step"
    return [*found, Row("backward-memory", name, model, memory, (0.25,), unit="MB")]
