"""Adadelta.

Zeiler, "ADADELTA: An Adaptive Learning Rate Method", https://arxiv.org/abs/1212.5701, Algorithm 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.storage import Storage
from functional_optim.transforms.descent import descent
from functional_optim.transforms.rules import zeros


class AdadeltaSlots(NamedTuple):
    square_avg: Tensor
    """Average of g², like p."""
    acc_delta: Tensor
    """Average of Δ², like p."""


@factory
def scale_by_adadelta(rho: numeric.Hyper = 0.9, eps: numeric.Hyper = 1e-6) -> Leafwise:
    """Δ = g · RMS(Δ) / RMS(g), so that the step has the units of the parameter.

    Args:
        rho: decay rate of both averages, in [0, 1].
        eps: added under both roots, ≥ 0.

    State: `square_avg` and `acc_delta`, like the parameters.

    Raises:
        ValueError: torch.optim.Adadelta's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_adadelta(rho=0.75, eps=1e-6)
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -2.0]), tx.init(w), w)[0]
        tensor([ 0.0020, -0.0020])
    """
    numeric.check_range(None, "in [0, 1]", rho=rho)
    numeric.check_range(None, "of 0 or more", eps=eps)

    def scalars(t, *, rho, eps):
        return 1 - rho, eps

    def update(g: Tensor, slots: AdadeltaSlots, p: Tensor, a: Any, eps: Any) -> tuple[Tensor, Any]:
        v = slots.square_avg.lerp(g * g, a)
        # one root, of a quotient whose scale keeps it from underflow
        d = ((slots.acc_delta + eps) * 2.0**20 / (v + eps)).sqrt() * 2.0**-10 * g
        return d, AdadeltaSlots(v, slots.acc_delta.lerp(d * d, a))

    init = zeros(AdadeltaSlots)
    hyper = {"rho": rho, "eps": eps}
    storage = Storage(nonnegative=("square_avg", "acc_delta"))
    return leafwise(init, update, scalars, hyper=hyper, storage=storage, name="scale_by_adadelta")


@factory
def adadelta(
    lr: numeric.Hyper = 1.0,
    rho: numeric.Hyper = 0.9,
    eps: numeric.Hyper = 1e-6,
    weight_decay: numeric.Hyper = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adadelta, with torch.optim.Adadelta's arguments and defaults.

    Args:
        lr: factor on the step, ≥ 0; 1 in the paper.
        rho: decay rate of both averages, in [0, 1].
        eps: added under both roots, ≥ 0.
        weight_decay: L2 coefficient, ≥ 0.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `square_avg` and `acc_delta`, like the parameters.

    Raises:
        ValueError: torch.optim.Adadelta's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.adadelta(rho=0.75)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9980, 1.0020])
    """
    return descent(scale_by_adadelta(rho, eps), lr, weight_decay, maximize=maximize)
