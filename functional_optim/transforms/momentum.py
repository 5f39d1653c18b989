"""Accumulating updates over time."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.transforms.rules import zeros


class TraceSlots(NamedTuple):
    momentum_buffer: Tensor
    """Running sum of updates, like p."""


@factory
def trace(
    momentum: numeric.Hyper, dampening: numeric.Hyper = 0.0, nesterov: bool = False
) -> Leafwise:
    """Momentum as in torch.optim.SGD: b ← μ b + (1 − τ) u, and b ← u at the first step.

    Args:
        momentum: μ, ≥ 0: a number, a 0-dim tensor, or a schedule.
        dampening: τ: a number, a 0-dim tensor, or a schedule. Default 0, torch's.
        nesterov: return u + μ b instead of b.

    State: `momentum_buffer`, like the parameters.

    Raises:
        ValueError: if momentum is a negative number.

    Paper: Sutskever, Martens, Dahl, Hinton, "On the importance of initialization and momentum in
    deep learning", http://proceedings.mlr.press/v28/sutskever13.html.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.trace(0.5)
        >>> w = torch.zeros(1)
        >>> u, state = tx.update(torch.ones(1), tx.init(w), w)
        >>> tx.update(torch.ones(1), state, w)[0]
        tensor([1.5000])
    """
    numeric.check_range(None, "of 0 or more", momentum=momentum)

    init = zeros(TraceSlots)

    def scalars(t, *, momentum, dampening):
        return momentum, numeric.where(t == 1, 1.0, 1 - dampening)

    def update(u: Tensor, slots: TraceSlots, p: Tensor, mu: Any, a: Any) -> tuple[Tensor, Any]:
        b = mu * slots.momentum_buffer + a * u
        return (u + mu * b if nesterov else b), TraceSlots(b)

    hyper = {"momentum": momentum, "dampening": dampening}
    return leafwise(init, update, scalars, hyper=hyper, name="trace")
