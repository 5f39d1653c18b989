"""A train step of the example's GPT: one compiled graph, against torch.optim outside of one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value

import functional_optim as fo

sys.path.append(str(Path(__file__).parent.parent / "examples"))

from gpt import GPT, VOCABULARY, Shape, next_byte_loss

FULL = Shape(layers=4, heads=4, width=160, context=64)
QUICK = Shape(layers=1, heads=2, width=16, context=8)

TrainStep = Callable[[Tensor, Tensor], Tensor]
"""From inputs and targets to the loss."""


def model_of(quick: bool) -> GPT:
    """The model that the example trains, the same at every call."""
    torch.manual_seed(0)
    return GPT(QUICK if quick else FULL)


def batch(quick: bool) -> tuple[Tensor, Tensor]:
    """Random bytes in the shape of the example's batches, with the next bytes."""
    size, context = (2, QUICK.context) if quick else (16, FULL.context)
    tokens = torch.randint(VOCABULARY, (size, context + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def ours(model: GPT) -> TrainStep:
    """Forward, backward and the pure transform in one graph."""
    tx = fo.adamw(1e-3)

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return next_byte_loss(functional_call(model, params, (x,)), y)

    @torch.compile(fullgraph=True)
    def step(params: dict[str, Tensor], state: fo.State, x: Tensor, y: Tensor) -> Any:
        grads, value = grad_and_value(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return fo.apply_updates(params, updates), state, value

    params: Any = {name: p.detach() for name, p in model.named_parameters()}
    state: Any = tx.init(params)

    def run(x: Tensor, y: Tensor) -> Tensor:
        nonlocal params, state
        params, state, value = step(params, state, x, y)
        return value

    return run


def theirs(model: GPT) -> TrainStep:
    """Forward and backward compiled, and torch's fused AdamW outside."""
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss = torch.compile(lambda x, y: next_byte_loss(model(x), y), fullgraph=True)

    def run(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        value = loss(x, y)
        value.backward()
        opt.step()
        return value.detach()

    return run


SIDES: dict[str, Callable[[GPT], TrainStep]] = {"ours": ours, "theirs": theirs}
