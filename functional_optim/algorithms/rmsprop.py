"""RMSprop.

Hinton, "Neural Networks for Machine Learning", lecture 6e,
https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf. The centered version:
Graves, "Generating Sequences With Recurrent Neural Networks", https://arxiv.org/abs/1308.0850,
equations 38–45.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, identity, leafwise
from functional_optim.core.storage import Storage
from functional_optim.transforms.descent import descent
from functional_optim.transforms.momentum import trace
from functional_optim.transforms.rules import root, zeros


class RmsSlots(NamedTuple):
    square_avg: Tensor
    """Average v of g², like p."""


class CenteredSlots(NamedTuple):
    square_avg: Tensor
    """Average v of g², like p."""
    grad_avg: Tensor
    """Average m of g, like p."""


@factory
def scale_by_rms(
    alpha: numeric.Hyper = 0.99, eps: numeric.Hyper = 1e-8, *, centered: bool = False
) -> Leafwise:
    """Divide by the root of the average squared gradient, or of the gradient's variance.

    Args:
        alpha: decay rate of the averages, ≥ 0.
        eps: added to the root, ≥ 0.
        centered: subtract the square of the average gradient. Rounding can make that difference
            negative; it is then set to 0 (torch.optim's becomes NaN).

    State: `square_avg`, and if centered `grad_avg`, like the parameters.

    Raises:
        ValueError: torch.optim.RMSprop's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_rms(alpha=0.75)
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)[0]
        tensor([ 2.0000, -2.0000])
    """
    numeric.check_range(None, "of 0 or more", alpha=alpha, eps=eps)
    slot_type = CenteredSlots if centered else RmsSlots

    def scalars(t, *, alpha, eps):
        return 1 - alpha, eps

    def update(g: Tensor, slots: Any, p: Tensor, a: Any, eps: Any) -> tuple[Tensor, Any]:
        v = slots.square_avg.lerp(g * g, a)
        if not centered:
            return g / (root(v) + eps), RmsSlots(v)
        m = slots.grad_avg.lerp(g, a)
        return g / (root((v - m * m).clamp(min=0)) + eps), CenteredSlots(v, m)

    init, hyper = zeros(slot_type), {"alpha": alpha, "eps": eps}
    storage = Storage(nonnegative=("square_avg",))
    return leafwise(init, update, scalars, hyper=hyper, storage=storage, name="scale_by_rms")


@factory
def rmsprop(
    lr: numeric.Hyper = 1e-2,
    alpha: numeric.Hyper = 0.99,
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
    momentum: numeric.Hyper = 0.0,
    centered: bool = False,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """RMSprop, with torch.optim.RMSprop's arguments and defaults.

    Args:
        lr: learning rate, ≥ 0.
        alpha: decay rate of the averages, ≥ 0.
        eps: added to the root, ≥ 0.
        weight_decay: L2 coefficient, ≥ 0.
        momentum: momentum of the scaled gradients, ≥ 0. The Python number 0 drops the buffer.
        centered: divide by the root of the gradient's variance instead of its second moment.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `square_avg`, `grad_avg` if centered, `momentum_buffer` if there is momentum, like the
    parameters.

    Raises:
        ValueError: torch.optim.RMSprop's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.rmsprop(lr=0.1, alpha=0.75)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.8000, 1.2000])
    """
    adapt = scale_by_rms(alpha, eps, centered=centered)
    moving = identity() if numeric.is_zero(momentum) else trace(momentum)
    return descent(chain(adapt, moving), lr, weight_decay, maximize=maximize)
