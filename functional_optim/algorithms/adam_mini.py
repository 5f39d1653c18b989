"""Adam-mini: Adam with one second moment for each block of weights.

Zhang et al., "Adam-mini: Use Fewer Learning Rates To Gain More", https://arxiv.org/abs/2406.16793,
Algorithm 1, as in https://github.com/zyushun/Adam-mini/blob/main/adam_mini/adam_mini.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import (
    AdamSlots,
    Betas,
    adam_numbers,
    adam_scalars,
    scale_by_adam,
)
from functional_optim.combinators.partition import partition
from functional_optim.core import sharding
from functional_optim.core.base import GradientTransformation, real_only
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.paths import Answers
from functional_optim.kernels.callers import warn
from functional_optim.transforms.descent import descent
from functional_optim.transforms.rules import SQUARES, root

Block = Literal["row", "tensor"] | int
"""The block that shares one second moment: a row, a tensor, or one of a number of equal parts."""


@factory
def scale_by_adam_mini(
    betas: Betas = (0.9, 0.999), eps: numeric.Hyper = 1e-8, block: Block = "row"
) -> Leafwise:
    """Divide the average gradient by the root of the average mean square of its block.

    Args:
        betas: decay rates of the two averages, each in [0, 1).
        eps: added to the root, ≥ 0.
        block: "row": the weights of one output, a row of a matrix or a filter of a kernel.
            "tensor": the tensor. A number: this number of parts of equal height, such as the heads
            of a projection of queries.

        `betas` and `eps` may also be 0-dim tensors or schedules.

    State: `exp_avg`, like the parameters, and `exp_avg_sq`: (m, 1, …) for rows, one number for a
    tensor, (parts, 1) for parts.

    Raises:
        ValueError: for hyperparameters out of range, or an unknown option; from a step, for a
            parameter whose rows cannot be divided into so many parts.
        TypeError: from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_adam_mini()
        >>> w = torch.zeros(2, 2)
        >>> u, state = tx.update(torch.tensor([[3.0, -3.0], [1.0, 0.0]]), tx.init(w), w)
        >>> u
        tensor([[ 1.0000, -1.0000],
                [ 1.4142,  0.0000]])
        >>> state.slots["exp_avg_sq"].shape
        torch.Size([2, 1])
    """
    hyper = adam_numbers(betas, eps)
    if block not in ("row", "tensor"):
        if isinstance(block, str):
            raise ValueError(
                "scale_by_adam_mini needs a block 'row' or 'tensor', or the number of equal parts, "
                f"but got {block!r}."
            )
        numeric.check_count("scale_by_adam_mini", 1, block=block)
    real = real_only("scale_by_adam_mini")

    def squares(x: Tensor) -> Tensor:
        """The mean square of each block, broadcastable to `cut(x)`."""
        dims = [*range(1 if block != "tensor" else 0, x.dim())]
        if not dims:
            return x * x
        count = max(x[0].numel() if block != "tensor" and len(x) else x.numel(), 1)
        total = (x * x).sum(dims, keepdim=block != "tensor")
        return (sharding.whole(total) if block == "tensor" else sharding.complete(total)) / count

    def cut(x: Tensor) -> Tensor:
        """The parts of a tensor in rows."""
        if not isinstance(block, int):
            return x
        if x.dim() == 0 or x.shape[0] % block:
            raise ValueError(
                f"scale_by_adam_mini needs {block} parts, but got a parameter of shape "
                f"{tuple(x.shape)}; pass a number that divides its rows."
            )
        return x.reshape(block, -1)

    def init(p: Tensor) -> AdamSlots:
        real(p)
        m = torch.zeros_like(p)
        if isinstance(block, int):
            return AdamSlots(m, p.new_zeros(block, 1))
        return AdamSlots(m, squares(torch.zeros_like(p)))

    def update(g: Tensor, slots: AdamSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, AdamSlots]:
        a1, a2, scale, eps = numbers
        m = slots.exp_avg.lerp(g, a1)
        v = slots.exp_avg_sq.lerp(squares(cut(g)), a2)
        u = cut(m) * (scale / (root(v) + eps))
        return (u.reshape(g.shape) if isinstance(block, int) else u), AdamSlots(m, v)

    return leafwise(
        init, update, adam_scalars, hyper=hyper, storage=SQUARES, name="scale_by_adam_mini"
    )


class BlockOfLeaf(Answers):
    """The block of each leaf: that of the first matching pattern, or the one for its shape."""

    def __call__(self, path: str, leaf: Any) -> str:
        if block := super().__call__(path, leaf):
            if block.isdecimal() and (leaf.dim() == 0 or leaf.shape[0] % int(block)):
                raise ValueError(
                    f"adam_mini needs {block} parts of the parameter {path!r}, but its shape is "
                    f"{tuple(leaf.shape)}; pass a number that divides its rows."
                )
            return block
        if leaf.dim() > 1:
            return "row"
        return "element" if path.endswith("bias") else "tensor"


@factory
def adam_mini(
    lr: numeric.Hyper = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
    blocks: Mapping[str, Literal["row", "tensor", "element"] | int] | None = None,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adam-mini, with the defaults of the authors' code, and patterns instead of its names.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the averages of g and of the blocks' mean squares, each in [0, 1).
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: decoupled decay, ≥ 0.
        blocks: the blocks that share a second moment, by patterns of paths; the first matching
            pattern counts: "row", "tensor", "element" (which is Adam), or the number of equal
            parts. **Pass the number of heads for projections of queries and keys**, e.g.
            `{"*.q_proj.weight": 32, "*.k_proj.weight": 8}`. Default: rows for matrices and kernels;
            vectors and scalars are one block, or elements if their name ends in "bias".
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules, except blocks.

    State: `exp_avg`, like the parameters, and `exp_avg_sq`, one scalar for each block.

    Raises:
        ValueError: torch.optim.Adam's messages, for hyperparameters out of range; for an unknown
            option; from init, for a parameter whose rows cannot be divided into so many parts.
        TypeError: for blocks that are no dict; from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.adam_mini(lr=0.1, blocks={"query": 2})
        >>> params = {"query": torch.ones(4, 3), "value": torch.ones(4, 3)}
        >>> state = tx.init(params)
        >>> state.slots["exp_avg_sq"]["query"].shape, state.slots["exp_avg_sq"]["value"].shape
        (torch.Size([2, 1]), torch.Size([4, 1]))
    """
    if not isinstance(blocks, Mapping | None):
        raise TypeError(
            "adam_mini takes as blocks a dict from patterns of paths to blocks, such as "
            f"{{'*.query.weight': 8}}, but got {blocks!r}."
        )
    given: dict[str, Any] = dict(blocks or {})
    for pattern, block in given.items():
        if block == "entry":
            warn("adam_mini: the block 'entry' is now called 'element'.", DeprecationWarning)
            given[pattern] = "element"

    parts: dict[str, GradientTransformation] = {"element": scale_by_adam(betas, eps)}
    others: list[Any] = ["row", "tensor", *given.values()]
    for block in others:
        if block != "element":
            parts[str(block)] = scale_by_adam_mini(betas, eps, block)
    named = {pattern: str(block) for pattern, block in given.items()}
    adapt: Any = partition(parts, BlockOfLeaf(named, parts, "blocks", other=""))
    return descent(adapt, lr, weight_decay, decoupled=True, maximize=maximize)
