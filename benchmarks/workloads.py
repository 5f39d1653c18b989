"""The tensors that the optimizers step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class Workload:
    """A name for `--only`, words for the table, the shapes, and tiny ones for `--quick`."""

    key: str
    words: str
    shapes: Shapes
    tiny: Shapes

    def parameters(self, *, quick: bool = False, matrices: bool = False) -> list[Tensor]:
        """Parameters with gradients, the same at every call; its matrices alone for Muon."""
        shapes = self.tiny if quick else self.shapes
        if matrices:
            shapes = [shape for shape in shapes if len(shape) == 2]
        return parameters(shapes)


def parameters(shapes: Shapes, device: str = "cpu") -> list[Tensor]:
    """Parameters of these shapes with gradients, the same at every call.

    Without temporary tensors: malloc would keep their memory, in some processes only.
    """
    torch.manual_seed(0)
    params: list[Tensor] = [
        torch.nn.Parameter(torch.randn(shape, device=device).mul_(0.02)) for shape in shapes
    ]
    for p in params:
        p.grad = torch.randn(p.shape, device=device).mul_(0.01)
    return params


def gpt_shapes(layers: int = 12, d: int = 256, vocabulary: int = 8000) -> Shapes:
    """The tensors of a GPT with biases: 148 of them for 12 layers."""
    block = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,)]
    block += [(d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(vocabulary, d), (256, d), *(block * layers), (d,), (d,)]


TINY = [(8, 4), (8,), (4, 8), (4,)]

MLP = Workload(
    "mlp",
    "MLP, 6 tensors",
    [(64, 32), (64,), (64, 64), (64,), (10, 64), (10,)],
    TINY,
)
GPT = Workload("gpt", "GPT, 12 layers, 148 tensors", gpt_shapes(), gpt_shapes(1, 8, 16))
GPT48 = Workload("gpt48", "GPT, 48 layers, 580 tensors", gpt_shapes(48), gpt_shapes(2, 8, 16))
BIG = Workload("big", "12 tensors of 2048 × 2048", [(2048, 2048)] * 12, [(16, 16)] * 2)
SMALL = Workload("small", "148 tensors of 8", [(8,)] * 148, [(8,)] * 3)
SCALARS = Workload("scalars", "1,000 tensors without dimensions", [()] * 1000, [()] * 3)
MANY = Workload("many", "10,000 tensors of 8", [(8,)] * 10_000, [(8,)] * 20)

SQUARES = Workload("squares", "24 matrices of 64 × 64", [(64, 64)] * 24, [(4, 4)] * 2)

WIDE = Workload("wide", "8 matrices of 1024 × 1024", [(1024, 1024)] * 8, [(4, 4)] * 2)
EXPERTS = Workload("experts", "64 matrices of 128 × 128", [(128, 128)] * 64, [(4, 4)] * 2)
KERNELS = Workload(
    "kernels",
    "16 kernels of 64 × 64 × 3 × 3",
    [(64, 64, 3, 3)] * 16,
    [(4, 4, 3, 3)] * 2,
)

WORKLOADS = {
    own.key: own for own in (MLP, GPT, GPT48, BIG, SMALL, MANY, SQUARES, WIDE, EXPERTS, KERNELS)
}
