"""A small mixture of experts for handwritten digits, by AdamW, Muon and SOAP.

    python examples/experts.py

The weights of all experts of a layer are one parameter (experts, out, in). `views` declares it as a
stack, so the optimizer updates the matrix of each expert separately, in batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from convolutions import compare
from torch import Tensor, nn

from functional_optim.adapters import SOAP, AdamW, MuonAdamW

VIEWS: dict[str, dict[str, Any]] = {"*.up": {"stack": True}, "*.down": {"stack": True}}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: AdamW(model.parameters(), lr=3e-3),
    "MuonAdamW": lambda model: MuonAdamW(model, lr=0.005, adamw_lr=3e-3, views=VIEWS),
    "SOAP": lambda model: SOAP(model, lr=3e-3, precondition_frequency=5, views=VIEWS),
}


class Experts(nn.Module):
    """Feed-forward networks, of which each input goes to the two that a router likes best."""

    def __init__(self, experts: int = 8, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.router(x).softmax(-1).topk(2)
        made = torch.einsum("eoi,bi->beo", self.up, x)
        made = torch.einsum("eoi,bei->beo", self.down, nn.functional.gelu(made))
        mine = made.gather(1, chosen[..., None].expand(-1, -1, x.shape[-1]))
        return x + (share[..., None] * mine).sum(1)


def network() -> nn.Module:
    """Two layers of experts between linear layers: 68,522 numbers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 32), Experts(), nn.LayerNorm(32), Experts(), nn.Linear(32, 10)
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Train it by each of the optimizers."""
    compare(network, OPTIMIZERS, argv)


if __name__ == "__main__":
    main()
