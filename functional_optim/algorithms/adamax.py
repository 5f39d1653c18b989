"""Adamax and AdamaxW: Adam with the infinity norm.

Kingma, Ba, "Adam: A Method for Stochastic Optimization", https://arxiv.org/abs/1412.6980,
Algorithm 2. The decay is that of Loshchilov, Hutter, "Decoupled Weight Decay Regularization",
https://arxiv.org/abs/1711.05101.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, adam_numbers
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.storage import Storage
from functional_optim.transforms.descent import descent
from functional_optim.transforms.rules import zeros


class AdamaxSlots(NamedTuple):
    exp_avg: Tensor
    """First moment m, like p."""
    exp_inf: Tensor
    """Decaying maximum of |g|, like p."""


@factory
def scale_by_adamax(betas: Betas = (0.9, 0.999), eps: numeric.Hyper = 1e-8) -> Leafwise:
    """Divide the average gradient by the decaying maximum of |g|.

    Args:
        betas: decay rates of the average and of the maximum, each in [0, 1).
        eps: added to |g| before the maximum is taken, as in torch.optim; ≥ 0.

    State: `exp_avg` and `exp_inf`, like the parameters.

    Raises:
        ValueError: torch.optim.Adamax's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_adamax()
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)[0]
        tensor([ 1.0000, -1.0000])
    """
    hyper = adam_numbers(betas, eps)

    init = zeros(AdamaxSlots)

    def scalars(t, *, betas, eps):
        b1, b2 = betas
        return 1 - b1, b2, 1 / (1 - b1**t), eps

    def update(g: Tensor, slots: AdamaxSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, Any]:
        a1, b2, scale, eps = numbers
        m = slots.exp_avg.lerp(g, a1)
        top = torch.maximum(b2 * slots.exp_inf, g.abs() + eps)
        return scale * m / top, AdamaxSlots(m, top)

    storage = Storage(nonnegative=("exp_inf",))
    return leafwise(init, update, scalars, hyper=hyper, storage=storage, name="scale_by_adamax")


@factory
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

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `exp_avg` and `exp_inf`, like the parameters.

    Raises:
        ValueError: torch.optim.Adamax's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.adamax(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 1.1000])
    """
    return descent(scale_by_adamax(betas, eps), lr, weight_decay, maximize=maximize)


@factory
def adamaxw(
    lr: numeric.Hyper = 2e-3,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 1e-4,
) -> GradientTransformation:
    """AdamaxW: Adamax with decoupled weight decay.

    Args:
        lr: learning rate, ≥ 0. Default 2e-3, that of torch's Adamax.
        betas: decay rates of the average and of the maximum, each in [0, 1).
        eps: added to |g| before the maximum is taken, ≥ 0.
        weight_decay: decay coefficient, ≥ 0; a step subtracts `lr * weight_decay` of each weight.
            Default 1e-4, optax's.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `exp_avg` and `exp_inf`, like the parameters.

    Raises:
        ValueError: torch.optim.Adamax's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.adamaxw(lr=0.1, weight_decay=0.5)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.8500, 1.0500])
    """
    return descent(scale_by_adamax(betas, eps), lr, weight_decay, decoupled=True)
