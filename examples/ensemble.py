"""Sixteen networks with sixteen learning rates, trained together in one compiled step.

    python examples/ensemble.py

The learning rate is an argument of the recipe, so `vmap` goes over it as it goes over parameters
and states. The step writes into the tensors that it was given: nothing is allocated, nothing moves
from one call to the next, and one compiled graph serves all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import digits
import torch
from torch import Tensor

import functional_optim as fo

MEMBERS, BATCH, STEPS = 16, 32, 300
MODEL = digits.network()
Step = Callable[..., Tensor]


def rates(members: int) -> Tensor:
    """Learning rates from 1e-5 to 1. Numbers are float64, whatever the parameters are."""
    return torch.logspace(-5, 0, members, dtype=torch.float64)


def start(lrs: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Parameters and states of all members, stacked: each leaf has the members in front."""
    members = [dict(digits.network(seed).to(dtype).named_parameters()) for seed in range(len(lrs))]
    params = {name: torch.stack([p[name] for p in members]) for name in members[0]}
    state = torch.vmap(lambda params, lr: fo.adamw(lr).init(params))(params, lrs)
    return params, fo.tree.map(torch.clone, state)  # expanded by vmap: copy


def member_step(params: Any, state: Any, lr: Tensor, x: Tensor, y: Tensor) -> tuple[Any, Any, Any]:
    """One step of one member: a pure function."""

    def loss(params: Any) -> Tensor:
        return digits.loss_of(MODEL, params, x, y)

    grads, value = torch.func.grad_and_value(loss)(params)
    updates, state = fo.adamw(lr).update(grads, state, params)
    return fo.apply_updates(params, updates), state, value


def ensemble_step(params: Any, state: Any, lrs: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """One step of all members on one batch, written into their tensors; returns their losses."""
    every = torch.vmap(member_step, in_dims=(0, 0, 0, None, None))
    *new, losses = every(params, state, lrs, x, y)
    fo.tree.map(Tensor.copy_, (params, state), tuple(new))
    return losses


def train(step: Step, steps: int, members: int) -> tuple[Tensor, Tensor]:
    """Learning rates and the accuracy of each member on the test pictures."""
    data, random = digits.load(), torch.Generator().manual_seed(0)
    lrs = rates(members)
    params, state = start(lrs)
    for _ in range(steps):
        step(params, state, lrs, *data.batch(BATCH, random))
    ends = [{name: p[i] for name, p in params.items()} for i in range(members)]
    return lrs, torch.tensor([digits.accuracy(MODEL, end, data) for end in ends])


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and draw a bar for each member."""
    parser = argparse.ArgumentParser(description="An ensemble in one compiled step.")
    parser.add_argument("--quick", action="store_true", help="few members and steps, eagerly")
    quick = parser.parse_args(argv).quick
    step = ensemble_step if quick else torch.compile(ensemble_step, fullgraph=True)
    lrs, found = train(step, *((20, 4) if quick else (STEPS, MEMBERS)))
    for lr, accuracy in zip(lrs.tolist(), found.tolist(), strict=True):
        print(f"lr {lr:8.1e}  {accuracy:6.1%}  {'█' * round(40 * accuracy)}")
    print(f"The best learning rate is {lrs[found.argmax()]:.1e}.")


if __name__ == "__main__":
    main()
