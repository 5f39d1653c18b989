"""Ways to store weights and slots of AdamW, and the GPT of `make train` trained with each.

All runs of a seed begin with the same weights, rounded to bfloat16, and see the same batches. The
model computes in float32, from the weights as they are stored: what differs is the storage alone,
and gradients of parameters in bfloat16, which are bfloat16, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value

import functional_optim as fo
from functional_optim import tree

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import corpus
from gpt import GPT, Shape, next_byte_loss

SHAPE = Shape(layers=4, heads=4, width=160, context=64)
BATCH, STEPS, VALID = 8, 200, 512
PEAK, BETAS, DECAY = 3e-3, (0.9, 0.99), 0.1
"""Those of `make train`, with half of its batch and fewer steps."""

Recipe = Callable[[Any], fo.GradientTransformation]
"""From a learning rate to a transformation."""


def adamw(lr: Any) -> Any:
    """Clipping and AdamW."""
    return fo.chain(fo.clip_by_global_norm(1.0), fo.adamw(lr, BETAS, weight_decay=DECAY))


def packed(kind: str, lr: Any) -> Any:
    """The same with its slots stored so."""
    return fo.stored(adamw(lr), kind)


def master(kind: Any, lr: Any) -> Any:
    """The same for parameters in bfloat16."""
    return fo.master_weights(adamw(lr), kind)


def both(lr: Any) -> Any:
    """Weights of 24 bits and slots of 8."""
    return fo.master_weights(packed("int8", lr), "split8")


class Choice(NamedTuple):
    """A way to store.

    dtype: of the parameters. full: whether the model sees `fo.full_weights`, in float32.
    """

    what: str
    make: Recipe
    dtype: torch.dtype = torch.float32
    full: bool = False


BF16 = torch.bfloat16
CHOICES: dict[str, Choice] = {
    "float32": Choice("all in float32", adamw),
    "bfloat16": Choice("slots in bfloat16", partial(packed, "bfloat16")),
    "int8": Choice("slots in int8", partial(packed, "int8")),
    "float8_e4m3fn": Choice("slots in float8_e4m3fn", partial(packed, "float8_e4m3fn")),
    "int4": Choice("slots in int4", partial(packed, "int4")),
    "split16": Choice("weights split16", partial(master, "split16"), BF16),
    "kahan": Choice("weights kahan", partial(master, "kahan"), BF16),
    "split8": Choice("weights split8", partial(master, "split8"), BF16),
    "stochastic": Choice("weights stochastic", partial(master, "stochastic"), BF16),
    "split8_int8": Choice("weights split8, slots in int8", both, BF16),
    "nearest": Choice("plain bfloat16, weights and slots", adamw, BF16),
    "exact": Choice("weights split16, seen in float32", partial(master, "split16"), BF16, True),
}


def state_bytes(tx: fo.GradientTransformation, dtype: torch.dtype = torch.float32) -> float:
    """Bytes of state per parameter, of a hidden matrix of 2048 × 2048."""
    w = torch.empty(2048, 2048, dtype=dtype, device="meta")
    state = tx.init({"layers.0.weight": w})
    leaves = [x for x in tree.leaves(state) if isinstance(x, Tensor)]
    return sum([x.nbytes for x in leaves]) / w.numel()


class Trained(NamedTuple):
    """The end of a run. bits: a checksum of the weights in float32."""

    loss: float
    bits: int


def train(choice: Choice, text: corpus.Corpus, seed: int, steps: int = STEPS) -> Trained:
    """A run from new weights."""
    torch.manual_seed(seed)
    model = GPT(SHAPE)
    params = {name: p.detach().to(BF16).to(choice.dtype) for name, p in model.named_parameters()}

    def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        wide = {name: w.float() for name, w in weights.items()}
        return next_byte_loss(functional_call(model, wide, (x,)), y)

    rate = fo.schedules.warmup_cosine(0.0, PEAK, steps // 20, steps, PEAK / 20)
    tx = choice.make(rate)
    state, step, gradients = tx.init(params), fo.compile(tx), grad_and_value(loss_of)
    for count in range(steps):
        x, y = corpus.batch(text.train, seed, count, BATCH, SHAPE.context)
        seen = fo.full_weights(params, state) if choice.full else params
        grads, _ = gradients(seen, x, y)
        params, state = step(grads, state, params)
    full = fo.full_weights(params, state) if choice.full else params
    return Trained(validate(loss_of, full, text.valid), checksum(full))


@torch.no_grad()
def validate(loss_of: Callable[..., Tensor], weights: dict[str, Tensor], text: Tensor) -> float:
    """Mean loss in nats a byte, over windows spread evenly over the validation text."""
    starts = torch.linspace(0, len(text) - SHAPE.context - 1, VALID, dtype=torch.float64).long()
    total = 0.0
    for some in starts.split(64):
        total += loss_of(weights, *corpus.windows(text, some, SHAPE.context)).item() * len(some)
    return total / VALID


def checksum(weights: dict[str, Tensor]) -> int:
    """The sum of the weights' bits."""
    return sum([int(w.float().view(torch.int32).long().sum()) for w in weights.values()])
