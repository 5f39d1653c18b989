"""NovoGrad: Adam with one second moment for each tensor.

Ginsburg, Castonguay, Hrinchuk, Kuchaiev, Lavrukhin, Leary, Li, Nguyen, Zhang, Cohen, "Stochastic
Gradient Methods with Layer-wise Adaptive Moments for Training of Deep Networks",
https://arxiv.org/abs/1905.11286, Algorithm 1, as NVIDIA's Jasper has it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, check_betas
from functional_optim.core import sharding
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.storage import compute_dtype
from functional_optim.transforms.descent import descent
from functional_optim.transforms.momentum import trace
from functional_optim.transforms.rules import SQUARES
from functional_optim.transforms.weight_decay import add_decayed_weights


class NovogradSlots(NamedTuple):
    exp_avg_sq: Tensor
    """Average v of ‖g‖², 0-dim."""


@factory
def scale_by_novograd(beta2: numeric.Hyper = 0.98, eps: numeric.Hyper = 1e-8) -> Leafwise:
    """Divide each tensor's gradient by the root of the average of its squared norm.

    The average starts from the first nonzero ‖g‖², so the first such step has norm 1.

    Args:
        beta2: decay rate of the average, in [0, 1).
        eps: added to the root, ≥ 0.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are NVIDIA's.

    State: `exp_avg_sq`, one scalar for each parameter.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_novograd()
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([3.0, 4.0]), tx.init(w), w)[0]
        tensor([0.6000, 0.8000])
    """
    numeric.check_range(None, "in [0, 1)", beta2=beta2)
    numeric.check_range(None, "of 0 or more", eps=eps)

    def init(p: Tensor) -> NovogradSlots:
        return NovogradSlots(torch.zeros((), dtype=compute_dtype(p), device=p.device))

    def scalars(t, *, beta2, eps):
        return 1 - beta2, eps

    def update(
        g: Tensor, slots: NovogradSlots, p: Tensor, weight: Any, eps: Any
    ) -> tuple[Tensor, NovogradSlots]:
        square, v = sharding.whole((g * g).sum()), slots.exp_avg_sq
        v = torch.where(v == 0, square, v.lerp(square, weight))
        root = v.masked_fill(v == 0, 1.0).sqrt()  # the root of 0 has no derivative
        return g / (root + eps), NovogradSlots(v)

    hyper = {"beta2": beta2, "eps": eps}
    return leafwise(init, update, scalars, hyper=hyper, storage=SQUARES, name="scale_by_novograd")


@factory
def novograd(
    lr: numeric.Hyper = 1e-3,
    betas: Betas = (0.95, 0.98),
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """NovoGrad: momentum over gradients that are divided by an average norm of their tensor.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the momentum and of the average of ‖g‖², each in [0, 1).
        eps: added to the root of that average, ≥ 0.
        weight_decay: decay coefficient, ≥ 0; the decay is added after the division, before the
            momentum.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are NVIDIA's.

    State: `exp_avg_sq`, a scalar for each parameter; `momentum_buffer`, like it.

    Raises:
        ValueError: for hyperparameters out of range.
        RuntimeError: from a step, for sparse gradients.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.novograd(lr=1.0)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([30.0, -40.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.4000, 1.8000])
    """
    b1, b2 = check_betas(betas)
    decay = add_decayed_weights(weight_decay)
    return descent(chain(scale_by_novograd(b2, eps), decay, trace(b1)), lr, maximize=maximize)
