"""D-Adapted Adam: Adam that estimates the scale of its learning rate.

Defazio, Mishchenko, "Learning-Rate-Free Learning by D-Adaptation",
https://arxiv.org/abs/2301.07733, Algorithm 5, as the authors have it in
https://github.com/facebookresearch/dadaptation.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, check_betas
from functional_optim.algorithms.prodigy import (
    bias_correction,
    check_numbers,
    decayed_chain,
    grown,
    kept_rate,
)
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise
from functional_optim.transforms.rules import SQUARES, of_model, root, zeros


class DadaptSlots(NamedTuple):
    exp_avg: Tensor
    """Average m of the steps, like p."""
    exp_avg_sq: Tensor
    """Second moment v, like p."""
    s: Tensor
    """Average of the weighted gradients, like p."""


class DadaptCarry(NamedTuple):
    d: Any
    """Estimate of the distance to the solution; 0 before the first step, which takes d0."""
    numerator_weighted: Any
    """Average of ⟨g, s⟩ in the norm of Adam."""


@factory
def scale_by_dadapt_adam(
    lr: numeric.Hyper = 1.0,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
    d0: numeric.Hyper = 1e-6,
    growth_rate: numeric.Hyper = math.inf,
    *,
    use_bias_correction: bool = False,
) -> Leafwise:
    """The step of D-Adapted Adam, with its learning rate and its decoupled weight decay.

    Args:
        lr, betas, eps, weight_decay, d0, growth_rate, use_bias_correction: as for `dadapt_adam`.

    State: `exp_avg`, `exp_avg_sq` and `s`, like the parameters, in float32 for half types; `d` and
    `numerator_weighted`, scalars of all parameters.

    Raises:
        TypeError: if betas is not a pair.
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_dadapt_adam(d0=0.1)
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)[0]
        tensor([-0.3162,  0.3162])
    """
    check_numbers("dadapt_adam", lr, eps, weight_decay, d0, growth_rate)
    pair = check_betas(betas)

    def before(t, carry, *, lr, betas, eps, d0):
        d = numeric.where(carry.d == 0, d0, carry.d)
        rate = d * lr * (bias_correction(t, betas) if use_bias_correction else 1.0)
        root, on = numeric.sqrt(betas[1]), numeric.where(lr > 0, 1.0, 0.0)
        return rate, kept_rate(on, root), rate * (1 - root), eps, on

    def reduce(g: Tensor, slots: DadaptSlots, p: Tensor, *weights: Any) -> tuple[Tensor, Tensor]:
        rate, beta, weight, eps, on = weights
        inner = rate * (g * slots.s / (root(slots.exp_avg_sq) + eps)).sum()
        return inner, on * (beta * slots.s + weight * g).abs().sum()

    def scalars(t, carry, total, *, lr, betas, eps, weight_decay, d0, growth_rate):
        rate, beta, weight, _, on = before(t, carry, lr=lr, betas=betas, eps=eps, d0=d0)
        d = numeric.where(carry.d == 0, d0, carry.d)
        root = numeric.sqrt(betas[1])
        null = total[1] == 0  # only zero gradients so far
        numerator = root * carry.numerator_weighted + (1 - root) * total[0]
        guess = numerator / ((1 - root) * numeric.where(null, 1.0, total[1]))
        new = numeric.maximum(d, grown(d, guess, growth_rate))
        carried = DadaptCarry(
            numeric.where(null, d, new), numeric.where(null, carry.numerator_weighted, numerator)
        )
        b1, b2 = [kept_rate(on, x) for x in betas]
        a1, a2 = rate * (1 - betas[0]), on * (1 - betas[1])
        decay = numeric.where(null, 0.0, rate * weight_decay)
        return (b1, a1, b2, a2, beta, weight, eps, decay), carried

    def update(g: Tensor, slots: DadaptSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, Any]:
        b1, a1, b2, a2, beta, weight, eps, decay = numbers
        m = b1 * slots.exp_avg + a1 * g
        v = b2 * slots.exp_avg_sq + a2 * (g * g)
        u = -(m / (root(v) + eps) + decay * p)
        return u, DadaptSlots(m, v, beta * slots.s + weight * g)

    hyper: dict[str, Any] = {"lr": lr, "betas": pair, "eps": eps, "weight_decay": weight_decay}
    hyper |= {"d0": d0, "growth_rate": growth_rate}
    rest = {"before": before, "carry": DadaptCarry(0, 0), "hyper": hyper, "storage": SQUARES}
    init = zeros(DadaptSlots, wide=True)
    return of_model("scale_by_dadapt_adam", init, update, scalars, reduce, **rest)


@factory
def dadapt_adam(
    lr: numeric.Hyper = 1.0,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
    decouple: bool = False,
    use_bias_correction: bool = False,
    d0: numeric.Hyper = 1e-6,
    growth_rate: numeric.Hyper = math.inf,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Adam with D-Adaptation: its learning rate is multiplied by a lower bound of the distance.

    Args:
        lr: factor on the step size, ≥ 0; keep it at 1, or use a schedule from 1 to 0.
        betas: decay rates of the averages of g and g², each in [0, 1).
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: coefficient, ≥ 0.
        decouple: decoupled decay, as in AdamW.
        use_bias_correction: multiply the step size by Adam's correction.
        d0: the first estimate, > 0.
        growth_rate: largest growth factor of the estimate in a step, ≥ 1. 1.02 acts as a warm-up.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are the authors'.

    State: `exp_avg`, `exp_avg_sq` and `s`, like the parameters, in float32 for half types; `d` and
    `numerator_weighted`, scalars of all parameters.

    Raises:
        TypeError: if betas is not a pair.
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.dadapt_adam()
        >>> w = torch.tensor([3.0, 4.0])
        >>> state = tx.init(w)
        >>> for _ in range(60):  # f(w) = w · w
        ...     updates, state = tx.update(2 * w, state, w)
        ...     w = fo.apply_updates(w, updates)
        >>> bool(fo.get(state, "d") > 0.1)
        True
    """
    step = scale_by_dadapt_adam(
        lr, betas, eps, weight_decay if decouple else 0.0, d0, growth_rate,
        use_bias_correction=use_bias_correction,
    )  # fmt: skip
    return decayed_chain(step, weight_decay, decouple, maximize)
