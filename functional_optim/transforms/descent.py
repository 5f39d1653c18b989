"""The chain that most algorithms build around their main transform."""

from __future__ import annotations

from functional_optim import numeric
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.transforms.scaling import scale_by_lr, signed
from functional_optim.transforms.weight_decay import add_decayed_weights


def descent(
    adapt: GradientTransformation,
    lr: numeric.Hyper,
    weight_decay: numeric.Hyper = 0.0,
    *,
    decoupled: bool = False,
    maximize: bool = False,
) -> GradientTransformation:
    """Step by −lr times the adapted gradient, with weight decay before `adapt`, or decoupled."""
    descend = scale_by_lr(lr)
    decay = add_decayed_weights(weight_decay)
    sign = signed(maximize)
    if decoupled:
        return chain(sign, adapt, decay, descend)
    return chain(sign, decay, adapt, descend)
