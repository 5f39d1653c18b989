"""A small GPT over bytes: the model that `train_gpt.py` trains."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
"""One token per byte value."""


@dataclass(frozen=True)
class Shape:
    """The size of a GPT.

    layers: number of blocks. width: length of a token's vector, a multiple of `heads`.
    context: the most bytes that it looks back on.
    """

    layers: int
    heads: int
    width: int
    context: int


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.attend(self.attention_norm(x)))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention, before its output projection."""
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(batch, time, width)


class GPT(nn.Module):
    """Bytes in, the logits of each next byte out: (batch, time) → (batch, time, 256)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*[Block(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Normal with deviation 1/√(row length); smaller where a block adds to the residual."""
        for name, p in self.named_parameters():
            if p.dim() == 1:
                p.fill_(1.0)
                continue
            p.normal_(std=1 / math.sqrt(p.shape[1]))
            if name.endswith(("mix.weight", "down.weight")):
                p.div_(math.sqrt(2 * self.shape.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        # A lookup's gradient is summed in any order by compiled code, a product's is the same in
        # every process: a resumed training finds the losses that it would have found.
        one_hot = F.one_hot(tokens, VOCABULARY).to(self.token.weight.dtype)
        x = one_hot @ self.token.weight + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
