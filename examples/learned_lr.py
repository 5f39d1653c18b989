"""Learned learning rates and momentum: the gradient of a loss after 20 steps of SGD.

    python examples/learned_lr.py

A run of 20 steps is a function of the recipe's hyperparameters, which `torch.func.grad`
differentiates. Each leaf has a separate learning rate; all hyperparameters are stored as
logarithms, and Adam, another recipe, updates them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import digits
import torch
from torch import Tensor

import functional_optim as fo

UNROLLED, META_STEPS, BATCH = 20, 30, 64
MODEL = digits.network()
Batches = list[tuple[Tensor, Tensor]]


def first_numbers(params: dict[str, Tensor]) -> dict[str, Any]:
    """The logarithm of a learning rate for each leaf, and the logit of the momentum."""
    small = torch.tensor(0.02, dtype=torch.float64).log()
    return {"lr": {name: small.clone() for name in params}, "momentum": torch.zeros_like(small)}


def recipe(numbers: dict[str, Any]) -> fo.GradientTransformation:
    """SGD with momentum, and a separate learning rate for each leaf."""
    momentum = numbers["momentum"].sigmoid()
    each = {name: fo.sgd(lr.exp(), momentum) for name, lr in numbers["lr"].items()}
    return fo.partition(each, {name: name for name in each})


def run(numbers: Any, params: dict[str, Tensor], batches: Batches, final: Any) -> Tensor:
    """The loss on the final batch after a step on each of the others."""
    tx = recipe(numbers)
    state = tx.init(params)
    for x, y in batches:
        grads = torch.func.grad(lambda params, x=x, y=y: digits.loss_of(MODEL, params, x, y))(
            params
        )
        updates, state = tx.update(grads, state, params)
        params = fo.apply_updates(params, updates)
    return digits.loss_of(MODEL, params, *final)


def learn(meta_steps: int, unrolled: int) -> tuple[Any, list[float]]:
    """The numbers that were learnt, and the loss of each run on the way."""
    data, random = digits.load(), torch.Generator().manual_seed(0)
    params: dict[str, Tensor] = dict(MODEL.named_parameters())
    numbers = first_numbers(params)
    tx = fo.adam(0.1)
    state, losses = tx.init(numbers), []
    for _ in range(meta_steps):
        batches = [data.batch(BATCH, random) for _ in range(unrolled)]
        final = data.batch(512, random)
        slopes, loss = torch.func.grad_and_value(run)(numbers, params, batches, final)
        updates, state = tx.update(slopes, state, numbers)
        numbers = fo.apply_updates(numbers, updates)
        losses.append(float(loss))
    return numbers, losses


def main(argv: Sequence[str] | None = None) -> None:
    """Learn, and say what was learnt."""
    parser = argparse.ArgumentParser(description="Learning rates by meta-gradients.")
    parser.add_argument("--quick", action="store_true", help="few steps: does it run?")
    quick = parser.parse_args(argv).quick
    numbers, losses = learn(*((4, 5) if quick else (META_STEPS, UNROLLED)))
    for i in range(0, len(losses), max(1, len(losses) // 10)):
        print(f"meta-step {i:3}  loss {losses[i]:.3f}  {'█' * round(20 * losses[i])}")
    for name, lr in numbers["lr"].items():
        print(f"{name:10} lr {lr.exp():.3f}")
    print(f"momentum {numbers['momentum'].sigmoid():.3f}")
    print(f"The loss at the end of a run fell from {losses[0]:.3f} to {losses[-1]:.3f}.")


if __name__ == "__main__":
    main()
