"""Optimistic gradient descent, and Adam: the next gradient is predicted from the last change.

Mokhtari, Ozdaglar, Pattathil, "A Unified Analysis of Extra-gradient and Optimistic Gradient Methods
for Saddle Point Problems: Proximal Point Approach", https://arxiv.org/abs/1901.08511.
Daskalakis, Ilyas, Syrgkanis, Zeng, "Training GANs with Optimism",
https://arxiv.org/abs/1711.00141, Algorithm 1.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, scale_by_adam
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.transforms.descent import descent
from functional_optim.transforms.rules import zeros
from functional_optim.transforms.variance_reduction import PreviousGrad


@factory
def scale_by_optimistic_gradient(alpha: numeric.Hyper = 1.0, beta: numeric.Hyper = 1.0) -> Leafwise:
    """α times the gradient plus β times its change since the previous step.

    Args:
        alpha: weight of the gradient.
        beta: weight of its change.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are optax's.

    State: `previous_grad`, like the parameters.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_optimistic_gradient()
        >>> w = torch.zeros(1)
        >>> u, state = tx.update(torch.tensor([2.0]), tx.init(w), w)
        >>> u, tx.update(torch.tensor([5.0]), state, w)[0]
        (tensor([2.]), tensor([8.]))
    """

    init = zeros(PreviousGrad)

    def scalars(t, *, alpha, beta):
        return alpha, numeric.where(t == 1, 0.0, beta)

    def update(g: Tensor, slots: PreviousGrad, p: Tensor, *numbers: Any) -> tuple[Tensor, Any]:
        alpha, beta = numbers
        return alpha * g + beta * (g - slots.previous_grad), PreviousGrad(g.clone())

    hyper = {"alpha": alpha, "beta": beta}
    return leafwise(init, update, scalars, hyper=hyper, name="scale_by_optimistic_gradient")


@factory
def optimistic_gradient_descent(
    lr: numeric.Hyper = 1e-2, alpha: numeric.Hyper = 1.0, beta: numeric.Hyper = 1.0
) -> GradientTransformation:
    """Gradient descent along α g + β (g − previous g), for games and saddle points.

    Args:
        lr: learning rate, ≥ 0. optax has no default.
        alpha: weight of the gradient. Default 1, optax's.
        beta: weight of its change. Default 1, optax's.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `previous_grad`, like the parameters.

    Raises:
        ValueError: if lr is a negative number.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.optimistic_gradient_descent(lr=0.5)
        >>> w = torch.tensor([1.0, 1.0])  # x and y of the game x · y, which x wants low, y high
        >>> state = tx.init(w)
        >>> for _ in range(100):
        ...     updates, state = tx.update(torch.stack([w[1], -w[0]]), state, w)
        ...     w = fo.apply_updates(w, updates)
        >>> bool(w.norm() < 1e-3)
        True
    """
    return descent(scale_by_optimistic_gradient(alpha, beta), lr)


@factory
def optimistic_adam_v2(
    lr: numeric.Hyper = 1e-3,
    alpha: numeric.Hyper = 1.0,
    beta: numeric.Hyper = 1.0,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-8,
    nesterov: bool = True,
) -> GradientTransformation:
    """Adam whose step is corrected by its change, for games such as the training of GANs.

    Args:
        lr: learning rate, ≥ 0. optax has no default.
        alpha: weight of Adam's direction. Default 1, optax's.
        beta: weight of its change. Default 1, optax's.
        betas: decay rates of the averages of g and g², each in [0, 1).
        eps: added to the root of the second moment, ≥ 0.
        nesterov: Adam's direction has Nesterov momentum. True as in optax.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `exp_avg`, `exp_avg_sq` and `previous_grad`, the previous direction, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not a pair.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.optimistic_adam_v2(lr=0.1, nesterov=False)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 1.1000])
    """
    adapt = scale_by_adam(betas, eps, nesterov=nesterov)
    return descent(chain(adapt, scale_by_optimistic_gradient(alpha, beta)), lr)
