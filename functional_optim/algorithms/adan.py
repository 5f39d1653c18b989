"""Adan: Adam with Nesterov momentum by differences of gradients.

Xie, Zhou, Li, Lin, Yan, "Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep
Models", https://arxiv.org/abs/2208.06677, Algorithm 1. The betas are those of the authors' code,
https://github.com/sail-sg/Adan: 1 − β of the paper.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import check_each_beta
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.transforms.descent import descent
from functional_optim.transforms.rules import SQUARES, root, zeros
from functional_optim.transforms.weight_decay import proximal_step


class AdanSlots(NamedTuple):
    exp_avg: Tensor
    """Average m of the gradient, like p."""
    exp_avg_diff: Tensor
    """Average v of the gradient's difference from the previous one, like p."""
    exp_avg_sq: Tensor
    """Second moment n, like p."""
    previous_grad: Tensor
    """The previous gradient, like p; 0 before the first."""


@factory
def scale_by_adan(
    betas: tuple[numeric.Hyper, numeric.Hyper, numeric.Hyper] = (0.98, 0.92, 0.99),
    eps: numeric.Hyper = 1e-8,
) -> Leafwise:
    """The average gradient and the average of its changes, divided by a second moment's root.

    Args:
        betas: decay rates of the averages of the gradient, of its changes, and of the squares, each
            in [0, 1).
        eps: added to the root, ≥ 0.

    State: `exp_avg`, `exp_avg_diff`, `exp_avg_sq` and `previous_grad`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not three numbers.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_adan()
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)[0]
        tensor([ 1.0000, -1.0000])
    """
    three = numeric.triple(betas, "betas", "(0.98, 0.92, 0.99)")
    check_each_beta(three)
    numeric.check_range(None, "of 0 or more", eps=eps)

    init = zeros(AdanSlots)

    def scalars(t, *, betas, eps):
        b1, b2, b3 = betas
        root, later = numeric.sqrt(1 - b3**t), numeric.where(t == 1, 0.0, 1.0)
        from_m, from_v = root / (1 - b1**t), root * b2 / (1 - b2**t)
        return 1 - b1, 1 - b2, 1 - b3, b2, from_m, from_v, root * eps, later

    def update(g: Tensor, slots: AdanSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, AdanSlots]:
        a1, a2, a3, b2, from_m, from_v, eps, later = numbers
        d = later * (g - slots.previous_grad)
        m = slots.exp_avg.lerp(g, a1)
        v = slots.exp_avg_diff.lerp(d, a2)
        ahead = g + b2 * d
        n = slots.exp_avg_sq.lerp(ahead * ahead, a3)
        u = (from_m * m + from_v * v) / (root(n) + eps)
        return u, AdanSlots(m, v, n, g.clone())

    hyper = {"betas": three, "eps": eps}
    return leafwise(init, update, scalars, hyper=hyper, storage=SQUARES, name="scale_by_adan")


@factory
def adan(
    lr: numeric.Hyper = 1e-3,
    betas: tuple[numeric.Hyper, numeric.Hyper, numeric.Hyper] = (0.98, 0.92, 0.99),
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
    no_prox: bool = False,
) -> GradientTransformation:
    """Adan, with the arguments and defaults of the authors' code.

    Args:
        lr: learning rate, ≥ 0. Adan takes rates 5 to 10 times AdamW's.
        betas: decay rates of the averages of the gradient, of its changes, and of the squares, each
            in [0, 1).
        eps: added to the root, ≥ 0.
        weight_decay: decay coefficient, ≥ 0.
        no_prox: decay before the step, as AdamW, instead of dividing by 1 + lr · weight_decay after
            it.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `exp_avg`, `exp_avg_diff`, `exp_avg_sq` and `previous_grad`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not three numbers.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.adan(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 1.1000])
    """
    adapt = scale_by_adan(betas, eps)
    if no_prox:
        return descent(adapt, lr, weight_decay, decoupled=True)
    return chain(adapt, proximal_step(lr, weight_decay))
