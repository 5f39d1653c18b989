"""Rprop: separate step sizes for all weights, from the signs of gradients.

Riedmiller, Braun, "A direct adaptive method for faster backpropagation learning: the RPROP
algorithm", https://doi.org/10.1109/ICNN.1993.298623, in the variant without weight backtracking
(iRprop−): Igel, Hüsken, "Improving the Rprop Learning Algorithm", 2000, Algorithm 4.
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
from functional_optim.core.storage import Storage
from functional_optim.transforms.scaling import check_lr, scale, signed


class RpropSlots(NamedTuple):
    prev: Tensor
    """The last gradient, like p; 0 where its sign had changed."""
    step_size: Tensor
    """Size of the next step, like p."""


@factory
def scale_by_rprop(
    lr: numeric.Hyper = 1e-2,
    etas: tuple[numeric.Hyper, numeric.Hyper] = (0.5, 1.2),
    step_sizes: tuple[numeric.Hyper, numeric.Hyper] = (1e-6, 50.0),
) -> Leafwise:
    """The sign of the gradient, times a step size that grows while the sign stays.

    Args:
        lr: the first step size, ≥ 0. Read once, when a parameter's state is created.
        etas: factors for a changed and for an unchanged sign, 0 < η⁻ < 1 < η⁺.
        step_sizes: smallest and largest step size.

    State: `prev` and `step_size`, like the parameters.

    Raises:
        ValueError: torch.optim.Rprop's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_rprop(lr=0.1)
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)[0]
        tensor([ 0.1000, -0.1000])
    """
    check_lr(lr)
    minus, plus = numeric.pair(etas, "etas", "(0.5, 1.2)")
    bounds = numeric.pair(step_sizes, "step_sizes", "(1e-6, 50.0)")
    if numeric.is_static(minus) and numeric.is_static(plus) and not 0.0 < minus < 1.0 < plus:
        raise ValueError(f"Invalid eta values: {minus}, {plus}")

    def init(p: Tensor) -> RpropSlots:
        first = numeric.at(lr, 1)
        first = first.to(p.device) if isinstance(first, Tensor) else first
        size = torch.zeros_like(p) + (first * (1 + 1j) if p.is_complex() else first)
        return RpropSlots(torch.zeros_like(p), size.to(p.dtype))

    def scalars(t, *, etas, step_sizes):
        return *etas, *step_sizes

    def update(g: Tensor, slots: RpropSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, RpropSlots]:
        shrink, grow, min_step, max_step = numbers
        agreement, size = g * slots.prev, slots.step_size
        shrunk = torch.where(agreement < 0, shrink * size, size)
        size = torch.where(agreement > 0, grow * size, shrunk).clamp(min_step, max_step)
        g = torch.where(agreement < 0, 0, g)
        return g.sign() * size, RpropSlots(g, size)

    hyper = {"lr": lr, "etas": (minus, plus), "step_sizes": bounds}
    storage = Storage(nonnegative=("step_size",))
    return leafwise(init, update, scalars, hyper=hyper, storage=storage, name="scale_by_rprop")


@factory
def rprop(
    lr: numeric.Hyper = 1e-2,
    etas: tuple[numeric.Hyper, numeric.Hyper] = (0.5, 1.2),
    step_sizes: tuple[numeric.Hyper, numeric.Hyper] = (1e-6, 50.0),
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Rprop, with torch.optim.Rprop's arguments and defaults. For full batches only.

    Args:
        lr: the first step size, ≥ 0. Read once, when a parameter's state is created.
        etas: factors for a changed and for an unchanged sign, 0 < η⁻ < 1 < η⁺.
        step_sizes: smallest and largest step size.
        maximize: ascend instead of descend.

    State: `prev` and `step_size`, like the parameters.

    Raises:
        ValueError: torch.optim.Rprop's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.rprop(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 1.1000])
    """
    return chain(signed(maximize), scale_by_rprop(lr, etas, step_sizes), scale(-1))
