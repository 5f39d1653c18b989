"""LAMB and LARS: layers move in proportion to the norms of their weights.

You, Li, Reddi, Hseu, Kumar, Bhojanapalli, Song, Demmel, Keutzer, Hsieh, "Large Batch Optimization
for Deep Learning: Training BERT in 76 minutes", https://arxiv.org/abs/1904.00962, Algorithm 2, as
NVIDIA and timm have it. You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks",
https://arxiv.org/abs/1708.03888, Algorithm 1, with torch.optim's momentum.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, scale_by_adam
from functional_optim.algorithms.sgd import sgd
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, identity, leafwise
from functional_optim.core.scalars import given
from functional_optim.transforms.clipping import clip_by_global_norm
from functional_optim.transforms.normalizing import (
    clip_by_trust_ratio,
    scale_by_trust_ratio,
    trust_ratio,
)
from functional_optim.transforms.scaling import scale_by_lr, signed
from functional_optim.transforms.weight_decay import add_decayed_weights


@factory
def scale_by_lars(
    weight_decay: numeric.Hyper = 0.0,
    trust_coefficient: numeric.Hyper = 1e-3,
    eps: numeric.Hyper = 1e-8,
) -> Leafwise:
    """(g + λ p) · η ‖p‖ / (‖g‖ + λ ‖p‖ + ε), for each tensor.

    If ‖p‖ or ‖g‖ is zero, the factor is 1.

    Args:
        weight_decay: λ, L2 coefficient, ≥ 0.
        trust_coefficient: η, the size of a step relative to ‖p‖, ≥ 0. Default 1e-3, the paper's.
        eps: added to the norms that are divided by, ≥ 0. Default 1e-8, timm's.

        Hyperparameters may also be 0-dim tensors or schedules.

    Raises:
        ValueError: if a number is negative.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_lars(trust_coefficient=0.1)
        >>> w = torch.tensor([3.0, 4.0])
        >>> tx.update(torch.tensor([0.0, 2.0]), tx.init(w), w)[0]
        tensor([0.0000, 0.5000])
    """
    hyper = {"weight_decay": weight_decay, "trust_coefficient": trust_coefficient, "eps": eps}
    numeric.check_range("scale_by_lars", "of 0 or more", **hyper)

    def update(g: Tensor, slots: Any, p: Tensor, *numbers: Any) -> tuple[Tensor, Any]:
        decay, k, eps = numbers
        P, G = (p * p).sum(), (g * g).sum()
        ratio = trust_ratio(P, G, k, decay, eps)
        return (g + decay * p) * ratio, slots

    return leafwise(None, update, given, hyper=hyper, name="scale_by_lars")


@factory
def lamb(
    lr: numeric.Hyper = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-6,
    weight_decay: numeric.Hyper = 0.01,
    max_grad_norm: numeric.Hyper | None = 1.0,
    trust_clip: bool = False,
    always_adapt: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """LAMB: AdamW whose step has the length lr · ‖p‖ in each tensor.

    Args:
        lr: learning rate, ≥ 0: the length of a step relative to the tensor's norm.
        betas: decay rates of the averages of g and g², each in [0, 1).
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: decay coefficient, ≥ 0. The decay is a part of the step whose norm is taken.
        max_grad_norm: largest norm of all gradients together, > 0; larger ones are scaled down.
            None: no bound.
        trust_clip: bound ‖p‖ / ‖u‖ by 1, which is called LAMBC.
        always_adapt: multiply by the ratio of norms also if `weight_decay` is the Python number 0.
            Otherwise such parameters, biases and gains in most recipes, are stepped as by Adam.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are timm's.

    State: `exp_avg` and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.lamb(lr=0.1, weight_decay=0.0, always_adapt=True)
        >>> w = torch.tensor([3.0, 4.0])
        >>> updates, state = tx.update(torch.tensor([0.01, 0.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)  # 0.1 ‖w‖ along the first axis
        tensor([2.5000, 4.0000])
    """
    adapts = always_adapt or not numeric.is_zero(weight_decay)
    adapt = clip_by_trust_ratio() if trust_clip else scale_by_trust_ratio()
    return chain(
        signed(maximize),
        identity() if max_grad_norm is None else clip_by_global_norm(max_grad_norm),
        scale_by_adam(betas, eps),
        add_decayed_weights(weight_decay),
        adapt if adapts else identity(),
        scale_by_lr(lr),
    )


@factory
def lars(
    lr: numeric.Hyper = 1.0,
    momentum: numeric.Hyper = 0.0,
    dampening: numeric.Hyper = 0.0,
    weight_decay: numeric.Hyper = 0.0,
    nesterov: bool = False,
    trust_coefficient: numeric.Hyper = 1e-3,
    eps: numeric.Hyper = 1e-8,
    always_adapt: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """LARS: SGD whose gradient has a length in proportion to ‖p‖ in each tensor.

    Args:
        lr: learning rate, ≥ 0. Default 1, timm's.
        momentum: μ, ≥ 0. The Python number 0 drops the buffer. The paper uses 0.9.
        dampening: τ in b ← μ b + (1 − τ) u.
        weight_decay: L2 coefficient, ≥ 0. The paper uses 5e-4.
        nesterov: step along u + μ b. Needs momentum > 0 and dampening 0.
        trust_coefficient: the length of the gradient relative to ‖p‖, ≥ 0. Default 1e-3, the
            paper's.
        eps: added to the norms that are divided by, ≥ 0.
        always_adapt: multiply by the ratio of norms also if `weight_decay` is the Python number 0.
            Otherwise such parameters, biases and gains in most recipes, are stepped as by SGD, with
            the full `lr`.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are timm's.

    State: `momentum_buffer`, like the parameters, if there is momentum.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.lars(lr=10.0, always_adapt=True)
        >>> w = torch.tensor([3.0, 4.0])
        >>> updates, state = tx.update(torch.tensor([100.0, 0.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)  # 10 · 0.001 ‖w‖ along the first axis
        tensor([2.9500, 4.0000])
    """
    adapts = always_adapt or not numeric.is_zero(weight_decay)
    adapt = scale_by_lars(weight_decay, trust_coefficient, eps)
    return chain(
        signed(maximize),
        adapt if adapts else identity(),
        sgd(lr, momentum, dampening, nesterov=nesterov),
    )
