"""A small convolutional network for handwritten digits, by AdamW, Muon and SOAP.

    python examples/convolutions.py

The optimizers get the model, so they know which parameters are kernels of convolutions: Muon sees
each as a matrix (out, in · height · width), SOAP keeps a basis for each of its dimensions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import digits
import torch
from torch import nn

from functional_optim.adapters import SOAP, AdamW, MuonAdamW

BATCH, STEPS = 64, 200

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: AdamW(model.parameters(), lr=3e-3),
    "MuonAdamW": lambda model: MuonAdamW(model, lr=0.02, adamw_lr=3e-3),
    "SOAP": lambda model: SOAP(model, lr=3e-3, precondition_frequency=5),
}


def network() -> nn.Module:
    """Three convolutions, the second in groups, and a linear layer: 9,682 numbers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GELU()),
        *(nn.Conv2d(16, 32, 3, stride=2, groups=2), nn.GELU()),
        *(nn.Conv2d(32, 24, 3), nn.GELU(), nn.Flatten()),
        nn.Linear(24, 10),
    )


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int) -> tuple[float, float]:
    """The mean loss of the last tenth of the steps, and the accuracy on the test pictures."""
    data, random = digits.load(), torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        x, y = data.batch(BATCH, random)
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    with torch.no_grad():
        right = (model(data.x_test).argmax(1) == data.y_test).float().mean().item()
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last), right


def compare(
    network: Callable[[], nn.Module],
    optimizers: dict[str, Callable[[nn.Module], torch.optim.Optimizer]],
    argv: Sequence[str] | None = None,
) -> None:
    """Train a network by each optimizer, from the same start, on the same batches."""
    parser = argparse.ArgumentParser(description="One network, several optimizers.")
    parser.add_argument("--quick", action="store_true", help="few steps")
    steps = 10 if parser.parse_args(argv).quick else STEPS
    for name, make in optimizers.items():
        model = network()
        loss, right = train(model, make(model), steps)
        print(f"{name:10} loss {loss:.4f}  accuracy {right:.1%}")


def main(argv: Sequence[str] | None = None) -> None:
    """Train it by each of the optimizers."""
    compare(network, OPTIMIZERS, argv)


if __name__ == "__main__":
    main()
