"""Prodigy: Adam that estimates the scale of its learning rate.

Mishchenko, Defazio, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner",
https://arxiv.org/abs/2306.06101, Algorithm 4, as the authors have it in
https://github.com/konstmish/prodigy.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, check_betas
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.storage import Storage, wide_dtype
from functional_optim.transforms.rules import of_model, root
from functional_optim.transforms.scaling import check_lr, signed
from functional_optim.transforms.weight_decay import add_decayed_weights


class ProdigySlots(NamedTuple):
    exp_avg: Tensor
    """First moment m of d g, like p."""
    exp_avg_sq: Tensor
    """Second moment v of d g, like p."""
    s: Tensor
    """Weighted sum of gradients, like p."""
    p0: Tensor
    """The initial parameter, like p."""


class ProdigyCarry(NamedTuple):
    d: Any
    """Estimate of the distance to the solution; 0 before the first step, which takes d0."""
    d_max: Any
    """The largest estimate so far; 0 before the first step."""
    d_numerator: Any
    """Weighted sum of ⟨g, p0 − p⟩."""


@factory
def scale_by_prodigy(
    lr: numeric.Hyper = 1.0,
    betas: Betas = (0.9, 0.999),
    beta3: numeric.Hyper | None = None,
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
    d0: numeric.Hyper = 1e-6,
    d_coef: numeric.Hyper = 1.0,
    growth_rate: numeric.Hyper = math.inf,
    *,
    use_bias_correction: bool = False,
    safeguard_warmup: bool = False,
) -> Leafwise:
    """The step of Prodigy, with its learning rate and its decoupled weight decay.

    The arguments are those of `prodigy`.

    State: `exp_avg`, `exp_avg_sq`, `s` and `p0`, like the parameters, in float32 for half types;
    `d`, `d_max` and `d_numerator`, scalars of all parameters.

    Raises:
        TypeError: if betas is not a pair.
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_prodigy(d0=0.1)
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)[0]  # 0.1 · (1 − β₁) / √(1 − β₂)
        tensor([-0.3162,  0.3162])
    """
    check_numbers("prodigy", lr, eps, weight_decay, d0, growth_rate)
    numeric.check_range("prodigy", "above 0", d_coef=d_coef)
    every = check_betas(betas)
    if beta3 is not None:
        numeric.check_range("prodigy", "in [0, 1)", beta3=beta3)
        every = (*every, beta3)

    def init(p: Tensor) -> ProdigySlots:
        m, v, s = [torch.zeros_like(p, dtype=wide_dtype(p)) for _ in range(3)]
        return ProdigySlots(m, v, s, p.to(wide_dtype(p), copy=True))

    def before(t, carry, *, lr, betas, d0):
        d = numeric.where(carry.d == 0, d0, carry.d)
        rate = d * lr * (bias_correction(t, betas) if use_bias_correction else 1.0)
        b3 = betas[2] if len(betas) == 3 else numeric.sqrt(betas[1])
        on = numeric.where(lr > 0, 1.0, 0.0)
        weight3 = d / d0 * (d if safeguard_warmup else rate)
        return d / d0 * rate, kept_rate(on, b3), on * weight3, on

    def reduce(g: Tensor, slots: ProdigySlots, p: Tensor, *weights: Any) -> tuple[Tensor, Tensor]:
        weight, b3, a3, on = weights
        inner = weight * (g * (slots.p0 - p)).sum()
        return inner, on * (b3 * slots.s + a3 * g).abs().sum()

    def scalars(t, carry, total, *, lr, betas, eps, weight_decay, d0, d_coef, growth_rate):
        _, b3, a3, on = before(t, carry, lr=lr, betas=betas, d0=d0)
        d = numeric.where(carry.d == 0, d0, carry.d)
        top = numeric.where(carry.d == 0, d0, carry.d_max)
        rate = d * lr * (bias_correction(t, betas) if use_bias_correction else 1.0)
        null = total[1] == 0  # only zero gradients so far
        numerator = b3 * carry.d_numerator + total[0]
        guess = d_coef * numerator / numeric.where(null, 1.0, total[1])
        new_top = numeric.maximum(top, guess)
        start = numeric.where(d == d0, numeric.maximum(d, guess), d)
        new = ProdigyCarry(grown(start, new_top, growth_rate), new_top, numerator)
        old = ProdigyCarry(d, top, carry.d_numerator)
        new = ProdigyCarry(*[numeric.where(null, a, b) for a, b in zip(old, new, strict=True)])
        b1, b2 = [kept_rate(on, x) for x in betas[:2]]
        a1, a2 = on * d * (1 - betas[0]), on * d * d * (1 - betas[1])
        rate = numeric.where(null, 0.0, rate)
        return (b1, a1, b2, a2, b3, a3, rate, new.d * eps, weight_decay), new

    def update(g: Tensor, slots: ProdigySlots, p: Tensor, *numbers: Any) -> tuple[Tensor, Any]:
        b1, a1, b2, a2, b3, a3, rate, eps, decay = numbers
        m = b1 * slots.exp_avg + a1 * g
        v = b2 * slots.exp_avg_sq + a2 * (g * g)
        u = -rate * (m / (root(v) + eps) + decay * p)
        return u, ProdigySlots(m, v, b3 * slots.s + a3 * g, slots.p0)

    hyper: dict[str, Any] = {"lr": lr, "betas": every, "eps": eps, "weight_decay": weight_decay}
    hyper |= {"d0": d0, "d_coef": d_coef, "growth_rate": growth_rate}
    storage = Storage(nonnegative=("exp_avg_sq",), weights=("p0",))
    rest = {"before": before, "carry": ProdigyCarry(0, 0, 0), "hyper": hyper, "storage": storage}
    return of_model("scale_by_prodigy", init, update, scalars, reduce, **rest)


@factory
def prodigy(
    lr: numeric.Hyper = 1.0,
    betas: Betas = (0.9, 0.999),
    beta3: numeric.Hyper | None = None,
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
    decouple: bool = True,
    use_bias_correction: bool = False,
    safeguard_warmup: bool = False,
    d0: numeric.Hyper = 1e-6,
    d_coef: numeric.Hyper = 1.0,
    growth_rate: numeric.Hyper = math.inf,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Prodigy: Adam whose learning rate is multiplied by an estimate of the distance.

    Args:
        lr: factor on the step size, ≥ 0; keep it at 1, or use a schedule from 1 to 0.
        betas: decay rates of the averages of g and g², each in [0, 1).
        beta3: decay rate of the sums of the estimate, in [0, 1); None: the root of β₂.
        eps: added to the root of the second moment, times the estimate; ≥ 0.
        weight_decay: coefficient, ≥ 0.
        decouple: decoupled decay, as in AdamW.
        use_bias_correction: multiply the step size by Adam's correction, as the paper does.
        safeguard_warmup: exclude lr from the weights of the estimate, for use with a warm-up.
        d0: the first estimate, > 0.
        d_coef: factor on the estimates, > 0: tune it between 0.5 and 2.
        growth_rate: largest growth factor of the estimate in a step, ≥ 1. 1.02 acts as a warm-up.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are the authors'.

    State: `exp_avg`, `exp_avg_sq`, `s` and `p0`, like the parameters, in float32 for half types;
    `d`, `d_max` and `d_numerator`, scalars of all parameters: `fo.get(state, "d")` reads one.

    Raises:
        TypeError: if betas is not a pair.
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.prodigy()
        >>> w = torch.tensor([3.0, 4.0])
        >>> state = tx.init(w)
        >>> for _ in range(60):  # f(w) = w · w
        ...     updates, state = tx.update(2 * w, state, w)
        ...     w = fo.apply_updates(w, updates)
        >>> bool(w.norm() < 1), bool(fo.get(state, "d") > 0.1)
        (True, True)
    """
    step = scale_by_prodigy(
        lr, betas, beta3, eps, weight_decay if decouple else 0.0, d0, d_coef, growth_rate,
        use_bias_correction=use_bias_correction, safeguard_warmup=safeguard_warmup,
    )  # fmt: skip
    return decayed_chain(step, weight_decay, decouple, maximize)


def decayed_chain(
    step: Leafwise, weight_decay: numeric.Hyper, decouple: bool, maximize: bool
) -> GradientTransformation:
    """A step with decoupled decay, or a step after L2 decay."""
    coupled = () if decouple else (add_decayed_weights(weight_decay),)
    return chain(signed(maximize), *coupled, step)


def grown(d: Any, goal: Any, growth_rate: Any) -> Any:
    """The smaller of d · growth_rate and a goal, with a gradient where the rate is infinite."""
    free = growth_rate == math.inf
    most = d * numeric.where(free, 1.0, growth_rate)
    return numeric.where(free, goal, numeric.minimum(goal, most))


def bias_correction(t: Any, betas: Any) -> Any:
    """Adam's two corrections as one factor on the step size."""
    return numeric.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t)


def kept_rate(on: Any, beta: Any) -> Any:
    """A decay rate; 1 if the learning rate is 0, so that the averages are unchanged."""
    return numeric.where(on > 0, beta, 1.0)


def check_numbers(
    who: str, lr: Any, eps: Any, weight_decay: Any, d0: Any, growth_rate: Any
) -> None:
    """Raise ValueError, naming an algorithm, for hyperparameters out of range."""
    check_lr(lr)
    numeric.check_range(None, "of 0 or more", eps=eps, weight_decay=weight_decay)
    numeric.check_range(who, "above 0", d0=d0)
    numeric.check_range(who, "of 1 or more", growth_rate=growth_rate)
