"""ADOPT: Adam with a second moment that does not contain the gradient that it divides.

Taniguchi, Harada, Minegishi, Oshima, Jeong, Nagahara, Iiyama, Suzuki, Iwasawa, Matsuo, "ADOPT:
Modified Adam Can Converge with Any β2 with the Optimal Rate", https://arxiv.org/abs/2411.02853,
with clipping, as in the authors' code, https://github.com/iShohei220/adopt.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import AdamSlots, Betas, adam_numbers
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.transforms.descent import descent
from functional_optim.transforms.rules import SQUARES, zeros
from functional_optim.transforms.scaling import after_the_first


@factory
def scale_by_adopt(
    betas: Betas = (0.9, 0.9999),
    eps: numeric.Hyper = 1e-6,
    clip_exponent: numeric.Hyper | None = 0.25,
) -> Leafwise:
    """The average of gradients, each divided by the root of the second moment before it.

    The first step returns zeros: it only initializes the second moment.

    Args:
        betas: decay rates of the averages, each in [0, 1).
        eps: lower bound of the root in the division, ≥ 0.
        clip_exponent: averaged values are clipped at n to this power, with n finished steps; None:
            no clipping.

    State: `exp_avg` and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not a pair.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_adopt((0.5, 0.9999))
        >>> w = torch.zeros(2)
        >>> u, state = tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)
        >>> tx.update(torch.tensor([5.0, -0.01]), state, w)[0]
        tensor([ 0.5000, -0.5000])
    """
    hyper = adam_numbers(betas, eps)
    hyper["clip_exponent"] = math.inf if clip_exponent is None else clip_exponent
    numeric.check_range(None, "of 0 or more", clip_exponent=hyper["clip_exponent"])

    init = zeros(AdamSlots)

    def scalars(t, *, betas, eps, clip_exponent):
        b1, b2 = betas
        first = t == 1
        bound = numeric.power(numeric.maximum(t - 1, 1.0), clip_exponent)
        bound = numeric.where(clip_exponent == math.inf, math.inf, bound)
        return (
            1 - b1,
            numeric.where(first, 1.0, 1 - b2),
            numeric.where(first, 1.0, eps * eps),
            numeric.where(first, 0.0, bound),
        )

    def update(g: Tensor, slots: AdamSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, AdamSlots]:
        a1, a2, min_square, bound = numbers
        m, v = slots
        n = (g / v.clamp(min=min_square).sqrt()).clamp(-bound, bound)
        m = m.lerp(n, a1)
        return m, AdamSlots(m, v.lerp(g * g, a2))

    return leafwise(init, update, scalars, hyper=hyper, storage=SQUARES, name="scale_by_adopt")


@factory
def adopt(
    lr: numeric.Hyper = 1e-3,
    betas: Betas = (0.9, 0.9999),
    eps: numeric.Hyper = 1e-6,
    weight_decay: numeric.Hyper = 0.0,
    clip_exponent: numeric.Hyper | None = 0.25,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """ADOPT, with the defaults of the authors' code. The first step does not change the parameters.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the averages, each in [0, 1).
        eps: lower bound of the root in the division, ≥ 0.
        weight_decay: coefficient, ≥ 0.
        clip_exponent: averaged values are clipped at n to this power, with n finished steps; None:
            no clipping. Default 0.25, the authors'.
        decoupled_weight_decay: decoupled decay, as in AdamW. False as
            in the authors' code, where it is called `decouple`.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `exp_avg` and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not a pair.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.adopt(lr=0.1, betas=(0.0, 0.9999))
        >>> w = torch.ones(2)
        >>> state = tx.init(w)
        >>> for _ in range(2):
        ...     updates, state = tx.update(torch.tensor([3.0, -2.0]), state, w)
        ...     w = fo.apply_updates(w, updates)
        >>> w
        tensor([0.9000, 1.1000])
    """
    adapt, decoupled = scale_by_adopt(betas, eps, clip_exponent), decoupled_weight_decay
    step = descent(adapt, lr, weight_decay, decoupled=decoupled, maximize=maximize)
    return chain(step, after_the_first()) if decoupled else step  # decay also starts later
