"""Adagrad.

Duchi, Hazan, Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
Optimization", https://jmlr.org/papers/v12/duchi11a.html, Figure 1, with a diagonal matrix.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.scalars import given
from functional_optim.core.storage import Storage
from functional_optim.transforms.descent import descent
from functional_optim.transforms.rules import root
from functional_optim.transforms.scaling import check_lr


class AdagradSlots(NamedTuple):
    sum: Tensor
    """Sum of g² so far, like p."""


@factory
def scale_by_adagrad(
    initial_accumulator_value: float = 0.0, eps: numeric.Hyper = 1e-10
) -> Leafwise:
    """Divide by the root of the sum of all squared gradients.

    Args:
        initial_accumulator_value: initial value of the sum, ≥ 0.
        eps: added to the root, ≥ 0.

    State: `sum`, like the parameters.

    Raises:
        ValueError: torch.optim.Adagrad's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_adagrad()
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -2.0]), tx.init(w), w)[0]
        tensor([ 1., -1.])
    """
    start = initial_accumulator_value
    numeric.check_range(None, "of 0 or more", initial_accumulator_value=start, eps=eps)

    def init(p: Tensor) -> AdagradSlots:
        return AdagradSlots(torch.full_like(p, start * (1 + 1j) if p.is_complex() else start))

    def update(g: Tensor, slots: AdagradSlots, p: Tensor, eps: Any) -> tuple[Tensor, AdagradSlots]:
        s = slots.sum + g * g
        return g / (root(s) + eps), AdagradSlots(s)

    hyper, storage = {"eps": eps}, Storage(nonnegative=("sum",))
    return leafwise(init, update, given, hyper=hyper, storage=storage, name="scale_by_adagrad")


@factory
def adagrad(
    lr: numeric.Hyper = 1e-2,
    lr_decay: numeric.Hyper = 0.0,
    weight_decay: numeric.Hyper = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: numeric.Hyper = 1e-10,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adagrad, with torch.optim.Adagrad's arguments and defaults.

    Args:
        lr: learning rate, ≥ 0.
        lr_decay: η in lr / (1 + (t − 1) η), ≥ 0.
        weight_decay: L2 coefficient, ≥ 0.
        initial_accumulator_value: initial value of the sum of squares, ≥ 0.
        eps: added to the root, ≥ 0.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `sum`, like the parameters.

    Raises:
        ValueError: torch.optim.Adagrad's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.adagrad(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 1.1000])
    """
    check_lr(lr)
    numeric.check_range(None, "of 0 or more", lr_decay=lr_decay)

    def decayed(count: Any) -> Any:
        return numeric.at(lr, count + 1) / (1 + count * numeric.at(lr_decay, count + 1))

    adapt = scale_by_adagrad(initial_accumulator_value, eps)
    rate = lr if numeric.is_zero(lr_decay) else decayed
    return descent(adapt, rate, weight_decay, maximize=maximize)
