"""MADGRAD: dual averaging with momentum and cube roots.

Defazio, Jelassi, "Adaptivity without Compromise: A Momentumized, Adaptive, Dual Averaged Gradient
Method for Stochastic Optimization", https://arxiv.org/abs/2101.11075, Algorithm 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.modes import differentiable
from functional_optim.core.storage import Storage
from functional_optim.transforms.weight_decay import add_decayed_weights


class MadgradSlots(NamedTuple):
    grad_sum_sq: Tensor
    """Sum ν of λ g², like p."""
    s: Tensor
    """Sum of λ g, like p."""
    x0: Tensor
    """The initial parameter, like p."""


@factory
def scale_by_madgrad(
    lr: numeric.Hyper = 1e-2, momentum: numeric.Hyper = 0.9, eps: numeric.Hyper = 1e-6
) -> Leafwise:
    """All of MADGRAD: the step from p to its average with x₀ − s / (∛ν + ε).

    Args:
        lr: learning rate, > 0.
        momentum: weight of p in the average, in [0, 1).
        eps: added to the cube root, and to lr, ≥ 0.

    State: `grad_sum_sq`, `s` and `x0`, like the parameters; `x0` is initially equal to them.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_madgrad(lr=1.0, momentum=0.0)
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([8.0, -0.001]), tx.init(w), w)[0]
        tensor([-2.0000,  0.1000])
    """
    numeric.check(lambda x: x > 0.0, lr, "Learning rate {} must be positive")
    numeric.check(lambda x: 0.0 <= x < 1.0, momentum, "Momentum {} must be in the range [0,1)")
    numeric.check_range(None, "of 0 or more", eps=eps)
    may_be_zero = numeric.is_zero(eps) or callable(eps) or isinstance(eps, Tensor)

    def init(p: Tensor) -> MadgradSlots:
        return MadgradSlots(torch.zeros_like(p), torch.zeros_like(p), p.clone())

    def scalars(t, *, lr, momentum, eps):
        return (lr + eps) * numeric.sqrt(t), 1 - momentum, eps

    def update(g: Tensor, slots: MadgradSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, Any]:
        lamb, a, eps = numbers
        v = slots.grad_sum_sq + lamb * (g * g)
        s = slots.s + lamb * g
        safe = may_be_zero or differentiable(v)  # the root of 0 has no derivative
        base = v.masked_fill(v == 0, 1.0) if safe else v  # where v is 0, s is
        root = base.pow(1 / 3) + eps
        z = slots.x0 - s / root
        return a * (z - p), MadgradSlots(v, s, slots.x0)

    hyper = {"lr": lr, "momentum": momentum, "eps": eps}
    storage = Storage(nonnegative=("grad_sum_sq",), weights=("x0",))
    return leafwise(init, update, scalars, hyper=hyper, storage=storage, name="scale_by_madgrad")


@factory
def madgrad(
    lr: numeric.Hyper = 1e-2,
    momentum: numeric.Hyper = 0.9,
    weight_decay: numeric.Hyper = 0.0,
    eps: numeric.Hyper = 1e-6,
) -> GradientTransformation:
    """MADGRAD, with the arguments and defaults of the authors' package.

    Args:
        lr: learning rate, > 0. It is not comparable to SGD's or Adam's.
        momentum: weight of the parameter in its average, in [0, 1).
        weight_decay: L2 coefficient, ≥ 0. MADGRAD needs less than other methods, often none.
        eps: added to the cube root, and to lr, ≥ 0.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `grad_sum_sq`, `s` and `x0`, like the parameters; `x0` is initially equal to them.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.madgrad(lr=1.0, momentum=0.0)
        >>> w = torch.zeros(2)
        >>> updates, state = tx.update(torch.tensor([8.0, -0.001]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([-2.0000,  0.1000])
    """
    return chain(add_decayed_weights(weight_decay), scale_by_madgrad(lr, momentum, eps))
