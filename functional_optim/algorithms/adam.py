"""Adam, AdamW and AMSGrad.

Kingma, Ba, "Adam: A Method for Stochastic Optimization", https://arxiv.org/abs/1412.6980,
Algorithm 1. Loshchilov, Hutter, "Decoupled Weight Decay Regularization",
https://arxiv.org/abs/1711.05101, Algorithm 2. Reddi, Kale, Kumar, "On the Convergence of Adam and
Beyond", https://arxiv.org/abs/1904.09237, Algorithm 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.storage import Storage
from functional_optim.transforms.descent import descent
from functional_optim.transforms.rules import root, zeros

Betas = tuple[numeric.Hyper, numeric.Hyper]


class AdamSlots(NamedTuple):
    exp_avg: Tensor
    """First moment m, like p."""
    exp_avg_sq: Tensor
    """Second moment v, like p."""


class AmsgradSlots(NamedTuple):
    exp_avg: Tensor
    """First moment m, like p."""
    exp_avg_sq: Tensor
    """Second moment v, like p."""
    max_exp_avg_sq: Tensor
    """Largest v so far, like p."""


@factory
def scale_by_adam(
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-8,
    *,
    amsgrad: bool = False,
    nesterov: bool = False,
    debias: bool = True,
) -> Leafwise:
    """Divide the average gradient by the root of the average squared gradient.

    Args:
        betas: decay rates of the two averages, each in [0, 1).
        eps: added to the root, ≥ 0.
        amsgrad: divide by the largest second moment seen so far.
        nesterov: step along the average after one more step with the same gradient, as optax does;
            `scale_by_nadam` has a varying momentum.
        debias: correct the bias of both averages.

    State: `exp_avg`, `exp_avg_sq`, and with amsgrad `max_exp_avg_sq`, all like the parameters.

    Raises:
        ValueError: torch.optim.Adam's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.scale_by_adam(), fo.scale_by_lr(0.1))
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)[0]
        tensor([-0.1000,  0.1000])
    """
    hyper = adam_numbers(betas, eps)
    slot_type = AmsgradSlots if amsgrad else AdamSlots

    def scalars(t, *, betas, eps):
        b1, b2 = betas
        c1, root, following = 1.0, 1.0, 1.0
        if type(b1) is type(b2) is float and not (0 <= b1 <= 1 and 0 <= b2 <= 1):
            check_each_beta(betas)  # of a schedule, or set in a group
        if debias:
            c1, root, following = 1 - b1**t, (1 - b2**t) ** 0.5, 1 - b1 ** (t + 1)
        scale = root / c1
        if nesterov:
            return 1 - b1, 1 - b2, scale * (1 - b1), eps * root, scale * b1 * c1 / following
        return 1 - b1, 1 - b2, scale, eps * root, 0.0

    def update(g: Tensor, slots: Any, p: Tensor, *numbers: Any) -> tuple[Tensor, Any]:
        a1, a2, scale, eps, lead = numbers
        m = slots.exp_avg.lerp(g, a1)
        v = slots.exp_avg_sq.lerp(g * g, a2)
        top = torch.maximum(slots.max_exp_avg_sq, v) if amsgrad else v
        step = lead * m + scale * g if nesterov else scale * m
        u = step / (root(top) + eps)
        return u, AmsgradSlots(m, v, top) if amsgrad else AdamSlots(m, v)

    init = zeros(slot_type)
    storage = Storage(nonnegative=slot_type._fields[1:])
    return leafwise(init, update, scalars, hyper=hyper, storage=storage, name="scale_by_adam")


@factory
def adam(
    lr: numeric.Hyper = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> GradientTransformation:
    """Adam, with torch.optim.Adam's arguments and defaults.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the averages of g and g², each in [0, 1).
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: L2 coefficient, ≥ 0.
        amsgrad: divide by the largest second moment seen so far.
        maximize: ascend instead of descend.
        decoupled_weight_decay: decoupled decay, which is `adamw`.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `exp_avg`, `exp_avg_sq`, and with amsgrad `max_exp_avg_sq`, all like the parameters.

    Raises:
        ValueError: torch.optim.Adam's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.adam(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 1.1000])
    """
    adapt = scale_by_adam(betas, eps, amsgrad=amsgrad)
    decoupled = decoupled_weight_decay
    return descent(adapt, lr, weight_decay, decoupled=decoupled, maximize=maximize)


@factory
def adamw(
    lr: numeric.Hyper = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 1e-2,
    amsgrad: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """AdamW: Adam with decoupled weight decay, with torch.optim.AdamW's arguments and defaults.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the averages of g and g², each in [0, 1).
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: decay coefficient, ≥ 0; a step subtracts `lr * weight_decay` of each weight.
            Default 1e-2, torch's.
        amsgrad: divide by the largest second moment seen so far.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `exp_avg`, `exp_avg_sq`, and with amsgrad `max_exp_avg_sq`, all like the parameters.

    Raises:
        ValueError: torch.optim.AdamW's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.adamw(lr=0.1, weight_decay=0.5)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.8500, 1.0500])
    """
    return adam(
        lr, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled_weight_decay=True
    )


def adam_scalars(t, *, betas, eps):
    """1 − β₁, 1 − β₂, the factor of m over √v + ε̂, and ε̂."""
    b1, b2 = betas
    root = numeric.sqrt(1 - b2**t)
    return 1 - b1, 1 - b2, root / (1 - b1**t), eps * root


def adam_numbers(betas: Betas, eps: numeric.Hyper) -> dict[str, Any]:
    """The hyperparameters that Adam's variants share, or torch's error for one out of range."""
    pair = check_betas(betas)
    numeric.check_range(None, "of 0 or more", eps=eps)
    return {"betas": pair, "eps": eps}


def check_betas(betas: Betas) -> Betas:
    """Return the pair of betas, or raise torch's error for one out of range."""
    pair = numeric.pair(betas, "betas", "(0.9, 0.999)")
    check_each_beta(pair)
    return pair


def check_each_beta(betas: tuple[numeric.Hyper, ...]) -> None:
    """Raise torch's error for a beta out of range."""
    for i, beta in enumerate(betas):
        numeric.check(lambda x: 0.0 <= x < 1.0, beta, f"Invalid beta parameter at index {i}: {{}}")
