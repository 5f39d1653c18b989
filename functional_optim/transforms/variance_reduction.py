"""Correction of a stochastic gradient by the previous one."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.transforms.rules import zeros


class PreviousGrad(NamedTuple):
    previous_grad: Tensor
    """The gradient of the previous step, like p; 0 before the first step."""


@factory
def variance_reduction(
    gamma: numeric.Hyper = 0.025, beta1: numeric.Hyper = 0.95, max_norm: numeric.Hyper = 1.0
) -> Leafwise:
    """Add γ β₁ / (1 − β₁) times its change to each gradient, and clip the norm of each tensor.

    MARS does this before its adaptive transform, which averages with the same β₁.

    Args:
        gamma: γ, strength of the correction, ≥ 0.
        beta1: decay rate of the average that follows, in [0, 1).
        max_norm: the Euclidean norm at which the corrected gradient of a tensor is clipped, > 0.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are those of the
            authors' code.

    State: `previous_grad`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.

    Paper: Yuan, Liu, Wu, Zhou, Gu, "MARS: Unleashing the Power of Variance Reduction for Training
    Large Models", https://arxiv.org/abs/2411.10438.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.variance_reduction(gamma=1.0, beta1=0.5, max_norm=100.0)
        >>> w = torch.zeros(1)
        >>> u, state = tx.update(torch.tensor([2.0]), tx.init(w), w)
        >>> tx.update(torch.tensor([5.0]), state, w)[0]
        tensor([8.])
    """
    numeric.check_range(None, "of 0 or more", gamma=gamma)
    numeric.check_range(None, "in [0, 1)", beta1=beta1)
    numeric.check_range(None, "above 0", max_norm=max_norm)

    init = zeros(PreviousGrad)

    def scalars(t, *, gamma, beta1, max_norm):
        return gamma * beta1 / (1 - beta1), max_norm

    def update(g: Tensor, slots: PreviousGrad, p: Tensor, a: Any, most: Any) -> tuple[Tensor, Any]:
        c = g + a * (g - slots.previous_grad)
        excess = ((c * c).sum() / (most * most)).clamp(min=1.0)
        return c * excess.rsqrt(), PreviousGrad(g.clone())

    hyper = {"gamma": gamma, "beta1": beta1, "max_norm": max_norm}
    return leafwise(init, update, scalars, hyper=hyper, name="variance_reduction")
