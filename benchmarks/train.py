"""A train step of the example's GPT, compiled in three ways."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value

import functional_optim as fo
from functional_optim.adapters import AdamW

sys.path.append(str(Path(__file__).parent.parent / "examples"))

from gpt import GPT, VOCABULARY, Shape, next_byte_loss

FULL = Shape(layers=4, heads=4, width=160, context=64)
QUICK = Shape(layers=1, heads=2, width=16, context=8)

TrainStep = Callable[[Tensor, Tensor], Tensor]
"""From inputs and targets to the loss."""


def model_of(quick: bool, layers: int | None = None) -> GPT:
    """The model that the example trains, or one of more layers; the same at every call."""
    torch.manual_seed(0)
    shape = QUICK if quick else FULL
    return GPT(shape if layers is None else replace(shape, layers=layers))


def batch(quick: bool) -> tuple[Tensor, Tensor]:
    """Random bytes in the shape of the example's batches, with the next bytes."""
    size, context = (2, QUICK.context) if quick else (16, FULL.context)
    tokens = torch.randint(VOCABULARY, (size, context + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(model: GPT) -> Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]:
    """The loss as a function of the parameters."""

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return next_byte_loss(functional_call(model, params, (x,)), y)

    return loss


def running(step: Callable[..., Any], tx: Any, model: GPT) -> TrainStep:
    """A functional step with its parameters and state."""
    params: Any = {name: p.detach() for name, p in model.named_parameters()}
    state: Any = tx.init(params)

    def run(x: Tensor, y: Tensor) -> Tensor:
        nonlocal params, state
        params, state, value = step(params, state, x, y)
        return value

    return run


def ours(model: GPT) -> TrainStep:
    """The loss compiled, and the update by our kernels."""
    tx = fo.adamw(1e-3)
    return running(fo.compile_train_step(loss_of(model), tx, strict=True), tx, model)


def graph(model: GPT) -> TrainStep:
    """Forward, backward and the pure transform in one graph."""
    tx, loss = fo.adamw(1e-3), loss_of(model)

    @torch.compile(fullgraph=True, options={"realize_reads_threshold": 1})
    def step(params: dict[str, Tensor], state: fo.State, x: Tensor, y: Tensor) -> Any:
        grads, value = grad_and_value(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return fo.apply_updates(params, updates), state, value

    return running(step, tx, model)


def theirs(model: GPT) -> TrainStep:
    """Forward and backward compiled, and torch's fused AdamW outside."""
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return torchs_loop(opt, torch.compile(lambda x, y: next_byte_loss(model(x), y), fullgraph=True))


def stepped(model: GPT, *, compiled: bool) -> TrainStep:
    """Our optimizer object in a plain loop."""
    opt = AdamW(model.parameters(), lr=1e-3)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return next_byte_loss(model(x), y)

    return torchs_loop(opt, torch.compile(loss, fullgraph=True) if compiled else loss)


def torchs_loop(opt: torch.optim.Optimizer, loss: TrainStep) -> TrainStep:
    """A step of a loop as it is written with torch."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        value = loss(x, y)
        value.backward()
        opt.step()
        return value.detach()

    return run


SIDES: dict[str, Callable[[GPT], TrainStep]] = {
    "ours": ours,
    "graph": graph,
    "eager": partial(stepped, compiled=False),
    "object": partial(stepped, compiled=True),
    "theirs": theirs,
}
