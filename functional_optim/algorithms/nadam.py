"""NAdam: Adam with Nesterov momentum.

Dozat, "Incorporating Nesterov Momentum into Adam",
https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ, Algorithm 2, with the momentum schedule
μ_t = β₁ (1 − ½ · 0.96^(t ψ)) that torch.optim and Keras use.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import AdamSlots, Betas, adam_numbers
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.transforms.descent import descent
from functional_optim.transforms.rules import SQUARES, root, zeros


class NadamCarry(NamedTuple):
    mu_product: Any
    """μ₁ μ₂ … μ_t, 0-dim; 1 before the first step."""


@factory
def scale_by_nadam(
    betas: Betas = (0.9, 0.999), eps: numeric.Hyper = 1e-8, momentum_decay: numeric.Hyper = 4e-3
) -> Leafwise:
    """Adam's direction, including the momentum of the next step.

    Args:
        betas: decay rates of the averages of g and g², each in [0, 1).
        eps: added to the root of the second moment, ≥ 0.
        momentum_decay: ψ, ≥ 0: the pace at which momentum increases from β₁/2 to β₁.

    State: `mu_product`, a scalar; `exp_avg` and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: torch.optim.NAdam's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.scale_by_nadam(), fo.scale_by_lr(0.1))
        >>> w = torch.zeros(2)
        >>> updates, state = tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)
        >>> float(state.carry["mu_product"]) < 0.9
        True
    """
    hyper = {**adam_numbers(betas, eps), "momentum_decay": momentum_decay}
    numeric.check_range(None, "of 0 or more", momentum_decay=momentum_decay)

    def scalars(t, carry, *, betas, eps, momentum_decay):
        b1, b2 = betas
        mu = b1 * (1 - 0.5 * numeric.power(0.96, t * momentum_decay))
        mu_next = b1 * (1 - 0.5 * numeric.power(0.96, (t + 1) * momentum_decay))
        product = numeric.rounded(carry.mu_product * numeric.rounded(mu))
        from_g = numeric.divide(1 - mu, 1 - product)
        from_m = numeric.divide(mu_next, 1 - product * mu_next)
        root = numeric.sqrt(1 - b2**t)
        numbers = (1 - b1, 1 - b2, root * from_g, root * from_m, root * eps)
        return numbers, NadamCarry(product)

    def update(g: Tensor, slots: AdamSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, AdamSlots]:
        a1, a2, grad_factor, momentum_factor, eps = numbers
        m = slots.exp_avg.lerp(g, a1)
        v = slots.exp_avg_sq.lerp(g * g, a2)
        u = grad_factor * g + momentum_factor * m
        return u / (root(v) + eps), AdamSlots(m, v)

    init, carry = zeros(AdamSlots), NadamCarry(1.0)
    return leafwise(
        init, update, scalars, carry=carry, hyper=hyper, storage=SQUARES, name="scale_by_nadam"
    )


@factory
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
        momentum_decay: ψ, ≥ 0: the pace at which momentum increases from β₁/2 to β₁.
        decoupled_weight_decay: decoupled decay, as in AdamW.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `mu_product`, a scalar; `exp_avg` and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: torch.optim.NAdam's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.nadam(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)[0] < 1
        tensor(True)
    """
    adapt = scale_by_nadam(betas, eps, momentum_decay)
    decoupled = decoupled_weight_decay
    return descent(adapt, lr, weight_decay, decoupled=decoupled, maximize=maximize)
