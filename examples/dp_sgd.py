"""DP-SGD: gradients of single examples, clipped, summed and noised, before any optimizer.

    python examples/dp_sgd.py

`vmap(grad)` makes one gradient per example, and `differentially_private_aggregate` makes one of
them all, so that no picture moves the network by more than its clip allows.
Abadi et al., "Deep Learning with Differential Privacy", https://arxiv.org/abs/1607.00133.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import digits
import torch
from torch import Tensor

import functional_optim as fo

CLIP, NOISE, BATCH, STEPS = 1.0, 1.0, 256, 200
MODEL = digits.network()


def recipe(lr: float, noise: float, seed: int = 0) -> fo.GradientTransformation:
    """SGD with momentum; any other transformation may follow the aggregate."""
    private = fo.differentially_private_aggregate(CLIP, noise, seed)
    return fo.chain(private, fo.sgd(lr, momentum=0.9))


def loss_of_one(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The loss of one picture."""
    return digits.loss_of(MODEL, params, x[None], y[None])


def each_gradient(params: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradient of each picture: leaves of shape (batch, *shape of the parameter)."""
    return torch.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0))(params, x, y)


def train(tx: fo.GradientTransformation, steps: int, gradients: Any = each_gradient) -> float:
    """The accuracy on the test pictures after some steps."""
    data, random = digits.load(), torch.Generator().manual_seed(0)
    params: Any = dict(MODEL.named_parameters())
    state = tx.init(params)
    for _ in range(steps):
        grads = gradients(params, *data.batch(BATCH, random))
        updates, state = tx.update(grads, state, params)
        params = fo.apply_updates(params, updates)
    return digits.accuracy(MODEL, params, data)


def main(argv: Sequence[str] | None = None) -> None:
    """Train with more and more noise."""
    parser = argparse.ArgumentParser(description="Differentially private SGD.")
    parser.add_argument("--quick", action="store_true", help="few steps, eagerly")
    quick = parser.parse_args(argv).quick
    gradients = each_gradient if quick else torch.compile(each_gradient, fullgraph=True)
    for noise in (0.0, NOISE) if quick else (0.0, NOISE, 4 * NOISE, 16 * NOISE):
        accuracy = train(recipe(0.3, noise), 10 if quick else STEPS, gradients)
        print(f"noise {noise:4.1f}  {accuracy:6.1%}  {'█' * round(40 * accuracy)}")


if __name__ == "__main__":
    main()
