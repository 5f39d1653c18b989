"""Stochastic gradient descent, with momentum.

Sutskever, Martens, Dahl, Hinton, "On the importance of initialization and momentum in deep
learning", http://proceedings.mlr.press/v28/sutskever13.html. The momentum is torch.optim's, which
keeps the learning rate out of the buffer: p ← p − lr b.
"""

from __future__ import annotations

from functional_optim import numeric
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import identity
from functional_optim.transforms.descent import descent
from functional_optim.transforms.momentum import trace


@factory
def sgd(
    lr: numeric.Hyper = 1e-3,
    momentum: numeric.Hyper = 0.0,
    dampening: numeric.Hyper = 0.0,
    weight_decay: numeric.Hyper = 0.0,
    nesterov: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """SGD with momentum, dampening, Nesterov's variant and L2 regularization, as in torch.optim.

    Args:
        lr: learning rate, ≥ 0. Default 1e-3, torch's.
        momentum: μ, ≥ 0. The Python number 0 drops the buffer.
        dampening: τ in b ← μ b + (1 − τ) g.
        weight_decay: L2 coefficient, ≥ 0.
        nesterov: step along g + μ b. Needs momentum > 0 and dampening 0.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `momentum_buffer`, like the parameters, if there is momentum.

    Raises:
        ValueError: torch.optim.SGD's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.sgd(lr=0.1, momentum=0.9)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.ones(2), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 0.9000])
    """
    accumulate = trace(momentum, dampening, nesterov)
    if nesterov and (numeric.is_zero(momentum) or not numeric.is_zero(dampening)):
        words = "Nesterov momentum requires a momentum and zero dampening"
        numeric.check(lambda _: False, 0.0, words)  # when it is made: later, torch steps
    moving = identity() if numeric.is_zero(momentum) else accumulate
    return descent(moving, lr, weight_decay, maximize=maximize)
