"""LaProp: gradients are first divided by their size, and then averaged.

Ziyin, Wang, Ueda, "LaProp: Separating Momentum and Adaptivity in Adam",
https://arxiv.org/abs/2002.04839, with the learning rate inside the average, as in the authors'
code, https://github.com/Z-T-WANG/LaProp-Optimizer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import AdamSlots, Betas, adam_numbers
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.transforms.rules import SQUARES, root, zeros
from functional_optim.transforms.scaling import check_lr, scale
from functional_optim.transforms.weight_decay import decay_after_step


class LapropCarry(NamedTuple):
    lr_average: Any
    """Average of the learning rate with β₁, 0-dim; 0 before the first step."""


@factory
def scale_by_laprop(
    lr: numeric.Hyper = 4e-4, betas: Betas = (0.9, 0.999), eps: numeric.Hyper = 1e-15
) -> Leafwise:
    """The average of gradients, each divided by the root of the second moment, times lr.

    Each gradient is weighted by the learning rate of its step. Multiply by −1 to descend.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the average and of the second moment, each in [0, 1).
        eps: added to the root of the second moment, ≥ 0.

    State: `lr_average`, a scalar; `exp_avg` and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not a pair.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_laprop(lr=1.0)
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)[0]
        tensor([ 1.0000, -1.0000])
    """
    check_lr(lr)
    hyper = {"lr": lr, **adam_numbers(betas, eps)}

    def scalars(t, carry, *, lr, betas, eps):
        b1, b2 = betas
        average = b1 * carry.lr_average + (1 - b1) * lr
        null = lr == 0
        correction = numeric.where(null, 1.0, average / numeric.where(null, 1.0, lr))
        root = numeric.sqrt(1 - b2**t)
        numbers = (b1, (1 - b1) * lr * root, 1 - b2, numeric.divide(1, correction), eps * root)
        return numbers, LapropCarry(average)

    def update(g: Tensor, slots: AdamSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, AdamSlots]:
        b1, a1, a2, scale, eps = numbers
        v = slots.exp_avg_sq.lerp(g * g, a2)
        n = g / (root(v) + eps)
        m = b1 * slots.exp_avg + a1 * n
        return scale * m, AdamSlots(m, v)

    init, carry = zeros(AdamSlots), LapropCarry(0)
    return leafwise(
        init, update, scalars, carry=carry, hyper=hyper, storage=SQUARES, name="scale_by_laprop"
    )


@factory
def laprop(
    lr: numeric.Hyper = 4e-4,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-15,
    weight_decay: numeric.Hyper = 0.0,
) -> GradientTransformation:
    """LaProp, with the arguments and defaults of the authors' code.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the average and of the second moment, each in [0, 1).
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: fraction of each weight that is subtracted after a step, ≥ 0, **independent of
            the learning rate**: lr times AdamW's.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `lr_average`, a scalar; `exp_avg` and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not a pair.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.laprop(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 1.1000])
    """
    return chain(scale_by_laprop(lr, betas, eps), scale(-1), decay_after_step(weight_decay))
