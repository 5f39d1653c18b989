"""Yogi: Adam whose second moment changes by at most (1 − β₂) g² in a step.

Zaheer, Reddi, Sachan, Kale, Kumar, "Adaptive Methods for Nonconvex Optimization",
https://papers.nips.cc/paper/8186-adaptive-methods-for-nonconvex-optimization, Algorithm 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import AdamSlots, Betas, adam_numbers, adam_scalars
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.transforms.descent import descent
from functional_optim.transforms.rules import SQUARES


@factory
def scale_by_yogi(
    betas: Betas = (0.9, 0.999), eps: numeric.Hyper = 1e-3, initial_accumulator_value: float = 1e-6
) -> Leafwise:
    """Divide the average gradient by the root of a second moment that changes additively.

    Args:
        betas: decay rates, each in [0, 1).
        eps: added to the root, ≥ 0.
        initial_accumulator_value: initial value of both moments, ≥ 0. Default 1e-6, optax's.

    State: `exp_avg` and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not a pair.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_yogi(eps=0.0, initial_accumulator_value=0.0)
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)[0]
        tensor([ 1.0000, -1.0000])
    """
    start = initial_accumulator_value
    hyper = adam_numbers(betas, eps)
    numeric.check_range(None, "of 0 or more", initial_accumulator_value=start)

    def init(p: Tensor) -> AdamSlots:
        value = start * (1 + 1j) if p.is_complex() else start
        return AdamSlots(torch.full_like(p, value), torch.full_like(p, value))

    def update(g: Tensor, slots: AdamSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, AdamSlots]:
        a1, a2, scale, eps = numbers
        m, v = slots.exp_avg.lerp(g, a1), slots.exp_avg_sq
        v = v - a2 * (v - g * g).sign() * (g * g)
        u = scale * m / (v.sqrt() + eps)
        return u, AdamSlots(m, v)

    return leafwise(init, update, adam_scalars, hyper=hyper, storage=SQUARES, name="scale_by_yogi")


@factory
def yogi(
    lr: numeric.Hyper = 1e-2,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-3,
    weight_decay: numeric.Hyper = 0.0,
    initial_accumulator_value: float = 1e-6,
) -> GradientTransformation:
    """Yogi, with the hyperparameters that the paper recommends.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates, each in [0, 1).
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: decoupled decay, ≥ 0.
        initial_accumulator_value: initial value of both moments, ≥ 0. Default 1e-6, optax's.

        Numbers but the last may also be 0-dim tensors or schedules.

    State: `exp_avg` and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not a pair.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.yogi(lr=0.1, eps=0.0, initial_accumulator_value=0.0)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 1.1000])
    """
    adapt = scale_by_yogi(betas, eps, initial_accumulator_value)
    return descent(adapt, lr, weight_decay, decoupled=True)
