"""StableAdamW: AdamW with shorter steps if g² is larger than its average.

Wortsman, Dettmers, Zettlemoyer, Morcos, Farhadi, Schmidt, "Stable and low-precision training for
large-scale vision-language models", https://arxiv.org/abs/2304.13013, Algorithm 2, as in optimi.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import AdamSlots, Betas, check_betas
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.transforms.descent import descent
from functional_optim.transforms.rules import SQUARES, root, zeros


@factory
def scale_by_stable_adam(
    betas: Betas = (0.9, 0.99), eps: numeric.Hyper = 1e-6, weight_decay: numeric.Hyper = 1e-2
) -> Leafwise:
    """(m / (√v + ε) + λ p) / max(1, RMS(g / √v)), for each tensor.

    Args:
        betas: decay rates of the averages of g and g², each in [0, 1).
        eps: added to the root, and lower bound of the root in the measurement, > 0.
        weight_decay: λ, ≥ 0: the decay decreases with the step, so it is a part of this rule.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are optimi's.

    State: `exp_avg` and `exp_avg_sq`, like the parameters; averages free of bias.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_stable_adam(betas=(0.0, 0.75), weight_decay=0.0)
        >>> w = torch.zeros(2)
        >>> u, state = tx.update(torch.tensor([1.0, 1.0]), tx.init(w), w)
        >>> tx.update(torch.tensor([9.0, 9.0]), state, w)[0]  # Adam: 1.3
        tensor([1.0000, 1.0000])
    """
    hyper = {"betas": check_betas(betas), "eps": eps, "weight_decay": weight_decay}
    numeric.check(
        lambda x: x > 0.0, eps, "StableAdamW divides by averages of at least eps, so eps must be "
        "above 0, but got {}."
    )  # fmt: skip
    numeric.check_range(None, "of 0 or more", weight_decay=weight_decay)

    def scalars(t, *, betas, eps, weight_decay):
        b1, b2 = betas
        return (1 - b1) / (1 - b1**t), (1 - b2) / (1 - b2**t), eps, weight_decay

    def update(g: Tensor, slots: AdamSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, AdamSlots]:
        a1, a2, eps, decay = numbers
        m = slots.exp_avg.lerp(g, a1)
        v = slots.exp_avg_sq.lerp(g * g, a2)
        excess = (g * g / v.clamp(min=eps * eps)).mean()
        excess = excess.clamp(min=1.0)  # the root of 0 has no derivative
        u = m / (root(v) + eps) + decay * p
        return u * excess.rsqrt(), AdamSlots(m, v)

    init = zeros(AdamSlots)
    return leafwise(
        init, update, scalars, hyper=hyper, storage=SQUARES, name="scale_by_stable_adam"
    )


@factory
def stable_adamw(
    lr: numeric.Hyper = 1e-3,
    betas: Betas = (0.9, 0.99),
    eps: numeric.Hyper = 1e-6,
    weight_decay: numeric.Hyper = 1e-2,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """StableAdamW: AdamW with a learning rate of lr / max(1, RMS(g / √v)) in each tensor.

    Args:
        lr: learning rate, ≥ 0. Default 1e-3; optimi has no default. betas: decay rates of the
            averages of g and g², each in [0, 1).
        eps: added to the root of the second moment, and its lower bound in the measurement, > 0.
        weight_decay: decay coefficient, ≥ 0; it decreases with the learning rate.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are optimi's.

    State: `exp_avg` and `exp_avg_sq`, like the parameters; averages free of bias.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.stable_adamw(lr=0.1, weight_decay=0.0)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 1.1000])
    """
    return descent(scale_by_stable_adam(betas, eps, weight_decay), lr, maximize=maximize)
