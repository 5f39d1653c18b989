"""Schedule-Free SGD and AdamW.

Defazio, Yang, Mehta, Mishchenko, Khaled, Cutkosky, "The Road Less Scheduled",
https://arxiv.org/abs/2405.15682, Algorithm 1, as the authors have it in
https://github.com/facebookresearch/schedule_free since version 1.3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, check_betas
from functional_optim.combinators.averaging import schedule_free
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, identity, leafwise
from functional_optim.transforms.descent import descent
from functional_optim.transforms.rules import SQUARES, root, zeros
from functional_optim.transforms.scaling import check_lr


class SecondMomentSlots(NamedTuple):
    exp_avg_sq: Tensor
    """Second moment v, like p."""


@factory
def scale_by_second_moment(beta2: numeric.Hyper = 0.999, eps: numeric.Hyper = 1e-8) -> Leafwise:
    """Divide by the root of the corrected average of g²: `scale_by_adam` without a first moment.

    Args:
        beta2: decay rate of the average, in [0, 1). Default 0.999, Adam's.
        eps: added to the root, ≥ 0. Default 1e-8, Adam's.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_second_moment()
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)[0]
        tensor([ 1.0000, -1.0000])
    """
    numeric.check_range("scale_by_second_moment", "in [0, 1)", beta2=beta2)
    numeric.check_range("scale_by_second_moment", "of 0 or more", eps=eps)

    def scalars(t, *, beta2, eps):
        root = numeric.sqrt(1 - beta2**t)
        return 1 - beta2, root, root * eps

    def update(g: Tensor, slots: SecondMomentSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, Any]:
        a, scale, eps = numbers
        v = slots.exp_avg_sq.lerp(g * g, a)
        return scale * g / (root(v) + eps), SecondMomentSlots(v)

    hyper = {"beta2": beta2, "eps": eps}
    init = zeros(SecondMomentSlots)
    return leafwise(
        init, update, scalars, hyper=hyper, storage=SQUARES, name="scale_by_second_moment"
    )


@factory
def schedule_free_sgd(
    lr: numeric.Hyper = 1.0,
    momentum: numeric.Hyper = 0.9,
    weight_decay: numeric.Hyper = 0.0,
    warmup_steps: int = 0,
    r: numeric.Hyper = 0.0,
    weight_lr_power: numeric.Hyper = 2.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Schedule-Free SGD: its parameters are for training; `eval_params` returns the average.

    Args:
        lr: learning rate, ≥ 0. It needs no decay.
        momentum: share of the average in the parameters, in (0, 1].
        weight_decay: L2 coefficient at the parameters, ≥ 0.
        warmup_steps: number of steps in which the learning rate rises to lr, ≥ 0.
        r: power of the step in the weights of the average, ≥ 0.
        weight_lr_power: power of the learning rate in these weights, ≥ 0.
        maximize: ascend instead of descend.

        All except `warmup_steps` may also be 0-dim tensors or schedules. The defaults are the
            authors'.

    State: `z`, like the parameters; `average_share`, `lr_max` and `weight_sum`, scalars.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.schedule_free_sgd(lr=0.5)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([1.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)  # the first average is the first iterate
        tensor([0.5000, 2.0000])
    """
    check_lr(lr)
    numeric.check_count("schedule_free_sgd", 0, warmup_steps=warmup_steps)
    rate = _warmed(lr, warmup_steps)
    inner = descent(identity(), rate, weight_decay, maximize=maximize)
    return schedule_free(inner, rate, momentum, r, weight_lr_power)


@factory
def schedule_free_adamw(
    lr: numeric.Hyper = 0.0025,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
    warmup_steps: int = 0,
    r: numeric.Hyper = 0.0,
    weight_lr_power: numeric.Hyper = 2.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Schedule-Free AdamW: its parameters are for training; `eval_params` returns the average.

    Args:
        lr: learning rate, ≥ 0. It needs no decay; the authors advise more than AdamW's.
        betas: share of the average in the parameters, in (0, 1), and decay rate of the average of
            g², in [0, 1).
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: coefficient of the decay at the parameters, ≥ 0.
        warmup_steps: number of steps in which the learning rate rises to lr, ≥ 0. The authors
            advise some.
        r: power of the step in the weights of the average, ≥ 0.
        weight_lr_power: power of the learning rate in these weights, ≥ 0.
        maximize: ascend instead of descend.

        All except `warmup_steps` may also be 0-dim tensors or schedules. The defaults are the
            authors'.

    State: `z` and `exp_avg_sq`, like the parameters; `average_share`, `lr_max` and `weight_sum`,
    scalars.

    Raises:
        TypeError: if betas is not a pair.
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.schedule_free_adamw(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 1.1000])
    """
    b1, b2 = check_betas(betas)
    numeric.check_range("schedule_free_adamw", "in (0, 1]", **{"first beta": b1})
    check_lr(lr)
    numeric.check_count("schedule_free_adamw", 0, warmup_steps=warmup_steps)
    rate = _warmed(lr, warmup_steps)
    adapt = scale_by_second_moment(b2, eps)
    inner = descent(adapt, rate, weight_decay, decoupled=True, maximize=maximize)
    return schedule_free(inner, rate, b1, r, weight_lr_power)


def _warmed(lr: numeric.Hyper, steps: int) -> numeric.Hyper:
    """A linear warm-up of the learning rate: 1 / steps of it at the first step."""
    if steps == 0:
        return lr

    def rate(count: Any) -> Any:
        return numeric.at(lr, count + 1) * numeric.minimum((count + 1) / steps, 1.0)

    return rate
