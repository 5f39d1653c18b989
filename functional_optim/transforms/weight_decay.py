"""Pulling parameters towards zero."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functional_optim import numeric
from functional_optim.leafwise import Leafwise, identity, leafwise


def add_decayed_weights(weight_decay: numeric.Hyper) -> Leafwise:
    """Add `weight_decay * p` to every update.

    Before the adaptive link this is L2 regularization (torch.optim.Adam's weight_decay); between it
    and `scale_by_lr` it is decoupled weight decay (torch.optim.AdamW's).

    Args:
        weight_decay: coefficient, ≥ 0: a number, a 0-dim tensor, or a schedule. The Python number
            0 drops the link.

    Raises:
        ValueError: if weight_decay is a negative number.

    Paper: Loshchilov, Hutter, "Decoupled Weight Decay Regularization",
    https://arxiv.org/abs/1711.05101.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.add_decayed_weights(0.1), fo.scale_by_lr(1.0))
        >>> w = torch.tensor([10.0])
        >>> tx.update(torch.zeros(1), tx.init(w), w)[0]
        tensor([-1.])
    """
    numeric.check(lambda x: x >= 0.0, weight_decay, "Invalid weight_decay value: {}")
    if numeric.is_zero(weight_decay):
        return identity()

    def scalars(t: Any) -> tuple[Any]:
        return (numeric.at(weight_decay, t),)

    def update(u: Tensor, slots: Any, p: Tensor, w: Any) -> tuple[Tensor, Any]:
        return u + w * p, slots

    return leafwise(
        None, update, scalars, name="add_decayed_weights", hyper={"weight_decay": weight_decay}
    )
