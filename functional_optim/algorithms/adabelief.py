"""AdaBelief and ACProp: the second moment is that of the gradient's difference from its average.

Zhuang, Tang, Ding, Tatikonda, Dvornek, Papademetris, Duncan, "AdaBelief Optimizer: Adapting
Stepsizes by the Belief in Observed Gradients", https://arxiv.org/abs/2010.07468, Algorithm 2.
Zhuang, Ding, Tang, Dvornek, Tatikonda, Duncan, "Momentum Centering and Asynchronous Update for
Adaptive Gradient Methods", https://arxiv.org/abs/2110.05454. Both with RAdam's rectification, as in
the authors' code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, adam_numbers
from functional_optim.algorithms.radam import rectification
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.storage import Storage
from functional_optim.transforms.descent import descent
from functional_optim.transforms.rules import zeros


class BeliefSlots(NamedTuple):
    exp_avg: Tensor
    """First moment m, like p."""
    exp_avg_var: Tensor
    """Average s of (g − m)², like p."""


@factory
def scale_by_belief(
    betas: Betas = (0.9, 0.999), eps: numeric.Hyper = 1e-16, *, rectify: bool = True
) -> Leafwise:
    """Divide the average gradient by the root of the average squared difference from it.

    Args:
        betas: decay rates of the two averages, each in [0, 1).
        eps: added to the second average in each step, and to its root, ≥ 0.
        rectify: as in RAdam, return the average gradient until the variance of the second average
            is known, and scale the first adaptive steps down.

    State: `exp_avg` and `exp_avg_var`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not a pair.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_belief((0.5, 0.999), rectify=False)
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)[0]
        tensor([ 2.0000, -2.0000])
    """
    hyper = adam_numbers(betas, eps)

    def scalars(t, *, betas, eps):
        b1, b2 = betas
        root, c1 = numeric.sqrt(1 - b2**t), 1 - b1**t
        if rectify:
            rect, plain = rectification(t, b2)
            return 1 - b1, 1 - b2, rect * root / c1, plain / c1, eps, eps
        return 1 - b1, 1 - b2, root / c1, 0.0, eps, eps * root

    def update(g: Tensor, slots: BeliefSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, Any]:
        a1, a2, adaptive, plain, eps, root_eps = numbers
        m = slots.exp_avg.lerp(g, a1)
        r = g - m
        v = slots.exp_avg_var.lerp(r * r, a2) + eps
        u = m * (adaptive / (v.sqrt() + root_eps) + plain)
        return u, BeliefSlots(m, v)

    init, storage = zeros(BeliefSlots), Storage(nonnegative=("exp_avg_var",))
    return leafwise(init, update, scalars, hyper=hyper, storage=storage, name="scale_by_belief")


@factory
def adabelief(
    lr: numeric.Hyper = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-16,
    weight_decay: numeric.Hyper = 0.0,
    rectify: bool = True,
) -> GradientTransformation:
    """AdaBelief, with the defaults of the authors' package (adabelief-pytorch 0.2).

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the two averages, each in [0, 1).
        eps: added to the second average in each step, and to its root, ≥ 0.
        weight_decay: decoupled decay, ≥ 0.
        rectify: as in RAdam, follow the average gradient until the variance of the second average
            is known, and scale the first adaptive steps down.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `exp_avg` and `exp_avg_var`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not a pair.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.adabelief(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)  # not adaptive yet
        tensor([0.7000, 1.2000])
    """
    adapt = scale_by_belief(betas, eps, rectify=rectify)
    return descent(adapt, lr, weight_decay, decoupled=True)


@factory
def scale_by_acprop(
    betas: Betas = (0.9, 0.999), eps: numeric.Hyper = 1e-16, *, rectify: bool = True
) -> Leafwise:
    """Divide the gradient by the root of the second average before it: they are independent.

    Args:
        betas: decay rates of the averages of g and of its squared difference from that average,
            each in [0, 1).
        eps: added to the second average in each step but the first, and to its root, ≥ 0.
        rectify: as in RAdam, return the average gradient until the variance of the second average
            is known, and scale the first adaptive steps down. The first step is never adaptive.

    State: `exp_avg` and `exp_avg_var`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not a pair.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_acprop((0.5, 0.999), rectify=False)
        >>> w = torch.zeros(2)
        >>> u, state = tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)
        >>> u, tx.update(torch.tensor([5.0, -0.01]), state, w)[0]
        (tensor([ 5.0000, -0.0100]), tensor([ 2.0000, -2.0000]))
    """
    hyper = adam_numbers(betas, eps)

    def scalars(t, *, betas, eps):
        b1, b2 = betas
        first = t == 1
        if rectify:
            rect, plain = rectification(t, b2)
            adaptive, root_eps = rect * numeric.sqrt(1 - b2**t), eps
            adaptive = numeric.where(first, 0.0, adaptive)
            plain = numeric.where(first, 1.0, plain)
        else:
            adaptive = numeric.sqrt(1 - b2 ** numeric.where(first, 1.0, t - 1))
            plain, root_eps = numeric.where(first, 1.0, 0.0), eps * adaptive
            adaptive = numeric.where(first, 0.0, adaptive)
        # the root of a positive number at the first step, too: that of 0 has no derivative
        above, eps = numeric.where(first, 1.0, 0.0), numeric.where(first, 0.0, eps)
        return 1 - b1, 1 - b2, adaptive, plain / (1 - b1**t), eps, root_eps, above

    def update(g: Tensor, slots: BeliefSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, Any]:
        a1, a2, adaptive, plain, eps, root_eps, above = numbers
        m = slots.exp_avg.lerp(g, a1)
        r, v = g - m, slots.exp_avg_var + eps
        u = adaptive * g / ((v + above).sqrt() + root_eps) + plain * m
        return u, BeliefSlots(m, v.lerp(r * r, a2))

    init, storage = zeros(BeliefSlots), Storage(nonnegative=("exp_avg_var",))
    return leafwise(init, update, scalars, hyper=hyper, storage=storage, name="scale_by_acprop")


@factory
def acprop(
    lr: numeric.Hyper = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-16,
    weight_decay: numeric.Hyper = 0.0,
    rectify: bool = True,
) -> GradientTransformation:
    """ACProp, with the defaults of the authors' code.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the averages of g and of its squared difference from that average,
            each in [0, 1).
        eps: added to the second average in each step but the first, and to its root, ≥ 0.
        weight_decay: decoupled decay, ≥ 0.
        rectify: as in RAdam, follow the average gradient until the variance of the second average
            is known, and scale the first adaptive steps down.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `exp_avg` and `exp_avg_var`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not a pair.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.acprop(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)  # not adaptive yet
        tensor([0.7000, 1.2000])
    """
    adapt = scale_by_acprop(betas, eps, rectify=rectify)
    return descent(adapt, lr, weight_decay, decoupled=True)
