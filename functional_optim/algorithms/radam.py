"""RAdam: Adam with adaptive steps only after the variance of the second moment is known.

Liu, Jiang, He, Chen, Liu, Gao, Han, "On the Variance of the Adaptive Learning Rate and Beyond",
https://arxiv.org/abs/1908.03265, Algorithm 2. The threshold is ρ_t > 5, torch.optim's (in the
paper: 4).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import AdamSlots, Betas, adam_numbers
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.transforms.descent import descent
from functional_optim.transforms.rules import SQUARES, root, zeros


@factory
def scale_by_radam(betas: Betas = (0.9, 0.999), eps: numeric.Hyper = 1e-8) -> Leafwise:
    """The average gradient, divided by the root of the second moment once that is reliable.

    Args:
        betas: decay rates of the averages of g and g², each in [0, 1).
        eps: added to the root of the second moment, ≥ 0.

    State: `exp_avg` and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: torch.optim.RAdam's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_radam()
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)[0]  # not adaptive yet
        tensor([ 5.0000, -0.0100])
    """
    hyper = adam_numbers(betas, eps)

    init = zeros(AdamSlots)

    def scalars(t, *, betas, eps):
        b1, b2 = betas
        rect, plain = rectification(t, b2)
        adaptive, c1 = rect * numeric.sqrt(1 - b2**t), 1 - b1**t
        return 1 - b1, 1 - b2, adaptive / c1, plain / c1, eps

    def update(g: Tensor, slots: AdamSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, AdamSlots]:
        a1, a2, adaptive, plain, eps = numbers
        m = slots.exp_avg.lerp(g, a1)
        v = slots.exp_avg_sq.lerp(g * g, a2)
        u = m * (adaptive / (root(v) + eps) + plain)
        return u, AdamSlots(m, v)

    return leafwise(init, update, scalars, hyper=hyper, storage=SQUARES, name="scale_by_radam")


def rectification(t: Any, b2: Any) -> tuple[Any, Any]:
    """(r_t, 0) where ρ_t > 5, else (0, 1): the weights of the adaptive and of the plain step."""
    rho_inf = numeric.divide(2.0, 1 - b2) - 1
    rho = rho_inf - numeric.divide(2 * t * b2**t, 1 - b2**t)
    known = rho > 5.0
    r, r_inf = numeric.maximum(rho, 5.0), numeric.maximum(rho_inf, 5.0)
    rect = numeric.sqrt((r - 4) * (r - 2) * r_inf / ((r_inf - 4) * (r_inf - 2) * r))
    return numeric.where(known, rect, 0.0), numeric.where(known, 0.0, 1.0)


@factory
def radam(
    lr: numeric.Hyper = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
    decoupled_weight_decay: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """RAdam, with torch.optim.RAdam's arguments and defaults.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the averages of g and g², each in [0, 1).
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: coefficient, ≥ 0.
        decoupled_weight_decay: decoupled decay, as in AdamW.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `exp_avg` and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: torch.optim.RAdam's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.radam(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.7000, 1.2000])
    """
    adapt = scale_by_radam(betas, eps)
    decoupled = decoupled_weight_decay
    return descent(adapt, lr, weight_decay, decoupled=decoupled, maximize=maximize)
