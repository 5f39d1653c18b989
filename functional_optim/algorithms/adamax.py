"""Adamax: Adam with the infinity norm.

Kingma, Ba, "Adam: A Method for Stochastic Optimization", https://arxiv.org/abs/1412.6980,
Algorithm 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, adam_chain, check_betas
from functional_optim.base import GradientTransformation
from functional_optim.leafwise import Leafwise, leafwise


class AdamaxSlots(NamedTuple):
    exp_avg: Tensor
    """First moment m, like p."""
    exp_inf: Tensor
    """Decaying maximum of |g|, like p."""


def scale_by_adamax(betas: Betas = (0.9, 0.999), eps: numeric.Hyper = 1e-8) -> Leafwise:
    """Divide the average gradient by the decaying maximum of |g|.

    Args:
        betas: decay rates of the average and of the maximum, each in [0, 1).
        eps: added to |g| before the maximum is taken, as in torch.optim; ≥ 0.

    State: `exp_avg` and `exp_inf`, like the parameters.

    Raises:
        ValueError: torch.optim.Adamax's messages, for numbers out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_adamax()
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)[0]
        tensor([ 1.0000, -1.0000])
    """
    b1, b2 = check_betas(betas)
    numeric.check(lambda x: x >= 0.0, eps, "Invalid epsilon value: {}")

    def init(p: Tensor) -> AdamaxSlots:
        return AdamaxSlots(torch.zeros_like(p), torch.zeros_like(p))

    def scalars(t: Any) -> tuple[Any, ...]:
        beta1 = numeric.at(b1, t)
        return 1 - beta1, numeric.at(b2, t), 1 - beta1**t, numeric.at(eps, t)

    def update(
        g: Tensor, slots: AdamaxSlots, p: Tensor, a1: Any, b2: Any, c1: Any, eps: Any
    ) -> tuple[Tensor, AdamaxSlots]:
        m = slots.exp_avg.lerp(g, a1)
        top = torch.maximum(b2 * slots.exp_inf, g.abs() + eps)
        return (m / c1) / top, AdamaxSlots(m, top)

    return leafwise(
        init,
        update,
        scalars,
        name="scale_by_adamax",
        hyper={"betas.0": b1, "betas.1": b2, "eps": eps},
    )


def adamax(
    lr: numeric.Hyper = 2e-3,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adamax, with torch.optim.Adamax's arguments and defaults.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the average and of the maximum, each in [0, 1).
        eps: added to |g| before the maximum is taken, ≥ 0.
        weight_decay: L2 coefficient, ≥ 0.
        maximize: ascend instead of descend.

        Numbers may also be 0-dim tensors or schedules.

    State: `exp_avg` and `exp_inf`, like the parameters.

    Raises:
        ValueError: torch.optim.Adamax's messages, for numbers out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.adamax(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 1.1000])
    """
    return adam_chain(scale_by_adamax(betas, eps), lr, weight_decay, False, maximize)
