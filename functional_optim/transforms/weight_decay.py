"""Pulling parameters towards zero."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functional_optim import numeric
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, identity, leafwise
from functional_optim.core.paths import Mask, masked_by


@factory
def add_decayed_weights(
    weight_decay: numeric.Hyper, *, independent: bool = False, mask: Mask | None = None
) -> Leafwise:
    """Add `weight_decay * p` to every update.

    What that means is a matter of its place:

    * before the adaptive transform it is L2 regularization (torch.optim.Adam's weight_decay);
    * between that and `scale_by_lr` it is decoupled from the gradient, not from the learning rate:
      a step takes `lr * weight_decay` of each weight away (torch.optim.AdamW's);
    * after `scale_by_lr`, with `independent=True`, a step takes `weight_decay` of each weight away,
      whatever the learning rate.

    Args:
        weight_decay: coefficient, ≥ 0: a number, a 0-dim tensor, or a schedule. The Python number
            0 makes this `identity`.
        independent: subtract instead of adding, for the place after `scale_by_lr`.
        mask: which parameters to decay: a pattern, patterns, a function of path and parameter, or a
            tree of bools, as in `masked`. Default: all.

    Raises:
        ValueError: if weight_decay is a negative number; from `chain`, if a learning rate follows
            an independent decay, which would turn it into growth.

    Paper: Loshchilov, Hutter, "Decoupled Weight Decay Regularization",
    https://arxiv.org/abs/1711.05101; its decay is the independent one.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(
        ...     fo.add_decayed_weights(0.1, mask=lambda path, p: p.ndim > 1), fo.scale_by_lr(1.0)
        ... )
        >>> params = {"weight": torch.full((1, 1), 10.0), "bias": torch.full((1,), 10.0)}
        >>> zeros = fo.tree.map(torch.zeros_like, params)
        >>> tx.update(zeros, tx.init(params), params)[0]
        {'weight': tensor([[-1.]]), 'bias': tensor([-0.])}
    """
    numeric.check(lambda x: x >= 0.0, weight_decay, "Invalid weight_decay value: {}")
    where = () if mask is None else (masked_by(mask),)
    if numeric.is_zero(weight_decay):
        return identity()
    sign = -1 if independent else 1

    def scalars(t: Any, *, weight_decay: Any) -> tuple[Any]:
        return (sign * weight_decay,)

    def update(u: Tensor, slots: Any, p: Tensor, w: Any) -> tuple[Tensor, Any]:
        return u + w * p, slots

    decay = leafwise(
        None,
        update,
        scalars,
        hyper={"weight_decay": weight_decay},
        scales_step=independent,
        name="add_decayed_weights",
    )
    return Leafwise(tuple([placement.on(*where) for placement in decay.placements]))
