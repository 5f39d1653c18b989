"""NAdam: Adam with Nesterov momentum.

Dozat, "Incorporating Nesterov Momentum into Adam",
https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ, Algorithm 2, with the momentum schedule
μ_t = β₁ (1 − ½ · 0.96^(t ψ)) that torch.optim and Keras use.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import AdamSlots, Betas, adam_chain, check_betas
from functional_optim.base import GradientTransformation
from functional_optim.leafwise import Leafwise, leafwise


class NadamCarry(NamedTuple):
    mu_product: Any
    """μ₁ μ₂ … μ_t, 0-dim; 1 before the first step."""


def scale_by_nadam(
    betas: Betas = (0.9, 0.999), eps: numeric.Hyper = 1e-8, momentum_decay: numeric.Hyper = 4e-3
) -> Leafwise:
    """Adam's direction, with the momentum of the next step already in it.

    Args:
        betas: decay rates of the averages of g and g², each in [0, 1).
        eps: added to the root of the second moment, ≥ 0.
        momentum_decay: ψ, ≥ 0: how fast the momentum rises from β₁/2 to β₁.

    State: `mu_product`, a number; `exp_avg` and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: torch.optim.NAdam's messages, for numbers out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.scale_by_nadam(), fo.scale_by_lr(0.1))
        >>> w = torch.zeros(2)
        >>> updates, state = tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)
        >>> float(state.carry["mu_product"]) < 0.9
        True
    """
    b1, b2 = check_betas(betas)
    numeric.check(lambda x: x >= 0.0, eps, "Invalid epsilon value: {}")
    numeric.check(lambda x: x >= 0.0, momentum_decay, "Invalid momentum_decay value: {}")

    def init(p: Tensor) -> AdamSlots:
        return AdamSlots(torch.zeros_like(p), torch.zeros_like(p))

    def scalars(t: Any, carry: NadamCarry) -> tuple[Any, ...]:
        beta1, beta2, psi = numeric.at(b1, t), numeric.at(b2, t), numeric.at(momentum_decay, t)
        mu = beta1 * (1 - 0.5 * 0.96 ** (t * psi))
        mu_next = beta1 * (1 - 0.5 * 0.96 ** ((t + 1) * psi))
        product = numeric.rounded(carry.mu_product * numeric.rounded(mu))
        from_g = (1 - mu) / (1 - product)
        from_m = mu_next / (1 - product * mu_next)
        numbers = (1 - beta1, 1 - beta2, 1 - beta2**t, from_g, from_m, numeric.at(eps, t))
        return numbers, NadamCarry(product)

    def update(
        g: Tensor, slots: AdamSlots, p: Tensor, a1: Any, a2: Any, c2: Any, k: Any, n: Any, eps: Any
    ) -> tuple[Tensor, AdamSlots]:
        m = slots.exp_avg.lerp(g, a1)
        v = slots.exp_avg_sq.lerp(g * g, a2)
        return (k * g + n * m) / ((v / c2).sqrt() + eps), AdamSlots(m, v)

    return leafwise(
        init,
        update,
        scalars,
        carry=NadamCarry(1.0),
        name="scale_by_nadam",
        hyper={"betas.0": b1, "betas.1": b2, "eps": eps, "momentum_decay": momentum_decay},
    )


def nadam(
    lr: numeric.Hyper = 2e-3,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
    momentum_decay: numeric.Hyper = 4e-3,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """NAdam, with torch.optim.NAdam's arguments and defaults.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the averages of g and g², each in [0, 1).
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: coefficient, ≥ 0.
        momentum_decay: ψ, ≥ 0: how fast the momentum rises from β₁/2 to β₁.
        decoupled_weight_decay: decay the weights apart from the gradient, as AdamW does.
        maximize: ascend instead of descend.

        Numbers may also be 0-dim tensors or schedules.

    State: `mu_product`, a number; `exp_avg` and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: torch.optim.NAdam's messages, for numbers out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.nadam(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)[0] < 1
        tensor(True)
    """
    adapt = scale_by_nadam(betas, eps, momentum_decay)
    return adam_chain(adapt, lr, weight_decay, decoupled_weight_decay, maximize)
