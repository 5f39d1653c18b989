"""MoMo and MoMo-Adam: momentum with a step size from a model of the loss.

Schaipp, Ohana, Eickenberg, Defazio, Gower, "MoMo: Momentum Models for Adaptive Learning Rates",
https://arxiv.org/abs/2305.07583, Algorithms 1 and 2, as the authors have them in
https://github.com/fabian-sp/MoMo.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, check_betas
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.storage import Storage
from functional_optim.transforms.rules import SQUARES, of_model, root, zeros
from functional_optim.transforms.scaling import check_lr


class MomoSlots(NamedTuple):
    exp_avg: Tensor
    """Average m of the gradients, like p; float32 for half types."""


class MomoAdamSlots(NamedTuple):
    exp_avg: Tensor
    """First moment m, like p; float32 for half types."""
    exp_avg_sq: Tensor
    """Second moment v, like p; float32 for half types."""


class MomoCarry(NamedTuple):
    loss_avg: Any
    """Average of the losses."""
    grad_dot: Any
    """Average of ⟨g, p⟩ over all parameters."""


class MomoBoundCarry(NamedTuple):
    loss_avg: Any
    """Average of the losses."""
    grad_dot: Any
    """Average of ⟨g, p⟩ over all parameters."""
    lb: Any
    """Estimate of the minimum of the loss; 0 before the first step."""


@factory
def momo(
    lr: numeric.Hyper = 1.0,
    weight_decay: numeric.Hyper = 0.0,
    beta: numeric.Hyper = 0.9,
    lb: numeric.Hyper = 0.0,
    bias_correction: bool = False,
    use_fstar: bool = False,
) -> GradientTransformation:
    """MoMo: SGD with momentum and a step size bounded by a model of the loss.

    `update` takes the loss as an extra argument, the value of f at the parameters::

        updates, state = tx.update(grads, state, params, value=loss)

    Args:
        lr: the largest step size, ≥ 0.
        weight_decay: coefficient of the proximal decay p / (1 + lr · weight_decay), ≥ 0.
        beta: decay rate of the averages, in [0, 1).
        lb: a lower bound of the loss.
        bias_correction: start the averages from 0 and correct them, instead of starting them from
            the first loss and gradient.
        use_fstar: estimate the minimum of the loss, from `lb` upwards.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are the authors'.

    State: `exp_avg`, like the parameters; `loss_avg` and `grad_dot`, and with use_fstar `lb`,
    scalars of all parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: from update, without `value`.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.momo()
        >>> w = torch.tensor([3.0, 4.0])
        >>> state = tx.init(w)
        >>> for _ in range(30):  # f(w) = w · w
        ...     updates, state = tx.update(2 * w, state, w, value=w @ w)
        ...     w = fo.apply_updates(w, updates)
        >>> float(w @ w) < 2
        True
    """
    check_lr(lr)
    numeric.check_range("momo", "of 0 or more", weight_decay=weight_decay)
    numeric.check_range("momo", "in [0, 1)", beta=beta)

    def before(t, carry, *, beta):
        return (1 - beta if bias_correction else numeric.where(t == 1, 1.0, 1 - beta),)

    def averages(g: Tensor, slots: MomoSlots, a: Any) -> tuple[Tensor, Tensor, Any]:
        m = slots.exp_avg.lerp(g, a)
        return m, m, MomoSlots(m)

    def rho(t, *, beta):
        return 1 - beta**t if bias_correction else 1.0

    hyper = {"lr": lr, "weight_decay": weight_decay, "beta": beta, "lb": lb}
    return _model_step("momo", MomoSlots, before, averages, rho, hyper, use_fstar)


@factory
def momo_adam(
    lr: numeric.Hyper = 1e-2,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
    lb: numeric.Hyper = 0.0,
    use_fstar: bool = False,
) -> GradientTransformation:
    """MoMo-Adam: Adam with a step size bounded by a model of the loss.

    `update` takes the loss as an extra argument, as for `momo`.

    Args:
        lr: the largest step size, ≥ 0.
        betas: decay rates of the averages of g and g², each in [0, 1).
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: coefficient of the proximal decay p / (1 + lr · weight_decay), ≥ 0.
        lb: a lower bound of the loss.
        use_fstar: estimate the minimum of the loss, from `lb` upwards.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are the authors'.

    State: `exp_avg` and `exp_avg_sq`, like the parameters; `loss_avg` and `grad_dot`, and with
    use_fstar `lb`, scalars of all parameters.

    Raises:
        TypeError: if betas is not a pair; from update, without `value`.
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.momo_adam(lr=1.0)
        >>> w = torch.tensor([3.0, 4.0])
        >>> state = tx.init(w)
        >>> for _ in range(30):  # f(w) = w · w
        ...     updates, state = tx.update(2 * w, state, w, value=w @ w)
        ...     w = fo.apply_updates(w, updates)
        >>> float(w @ w) < 2
        True
    """
    check_lr(lr)
    numeric.check_range("momo_adam", "of 0 or more", weight_decay=weight_decay)
    numeric.check_range(None, "of 0 or more", eps=eps)

    def before(t, carry, *, betas, eps):
        root = numeric.sqrt(1 - betas[1] ** t)
        return 1 - betas[0], 1 - betas[1], root, root * eps

    def averages(g: Tensor, slots: MomoAdamSlots, *moments: Any) -> tuple[Tensor, Tensor, Any]:
        a1, a2, scale, eps = moments
        m = slots.exp_avg.lerp(g, a1)
        v = slots.exp_avg_sq.lerp(g * g, a2)
        return m, scale * m / (root(v) + eps), MomoAdamSlots(m, v)

    def rho(t, *, betas, eps):
        return 1 - betas[0] ** t

    hyper = {"lr": lr, "betas": check_betas(betas), "eps": eps}
    hyper |= {"weight_decay": weight_decay, "lb": lb}
    return _model_step("momo_adam", MomoAdamSlots, before, averages, rho, hyper, use_fstar, SQUARES)


def _model_step(
    name: str,
    slots: type,
    before: Any,
    averages: Any,
    rho: Any,
    hyper: Any,
    use_fstar: bool,
    storage: Storage = Storage(),
) -> Leafwise:
    """The rule of one averaged gradient m and the direction of its step, which may be m itself.

    averages: returns m, the direction and the new slots. rho: the bias correction of m.
    """

    def reduce(g: Tensor, slots: Any, p: Tensor, *moments: Any) -> tuple[Tensor, ...]:
        m, u, _ = averages(g, slots, *moments)
        return (p * m).sum(), (p * g).sum(), (m * u).sum()

    def scalars(t, carry, total, *, lr, weight_decay, lb, value, **betas):
        moments, unbias = before(t, carry, **betas), rho(t, **betas)
        dot, new_dot, square = total
        loss = numeric.lerp(carry.loss_avg, numeric.float64(value), moments[0])
        grad_dot = numeric.lerp(carry.grad_dot, new_dot, moments[0])
        spread = 1 + lr * weight_decay
        low = lb  # the minimum of the loss, or its estimate
        if use_fstar:
            low = numeric.where(t == 1, lb, carry.lb)
            cap = spread * loss + dot - spread * grad_dot
            reset = numeric.maximum(cap / (2 * spread * unbias), lb)
            low = numeric.where(cap < spread * unbias * low, reset, low)
        height = numeric.maximum(spread * (loss - unbias * low) + dot - spread * grad_dot, 0.0)
        null = square == 0
        longest = numeric.where(null, 0.0, height / numeric.where(null, 1.0, square))
        rate = numeric.minimum(lr / unbias, longest)
        numbers = (*moments, rate, 1 / spread)
        if not use_fstar:
            return numbers, MomoCarry(loss, grad_dot)
        reached = (loss + dot - grad_dot - 0.5 * rate * square) / unbias
        return numbers, MomoBoundCarry(loss, grad_dot, numeric.maximum(reached, lb))

    def update(g: Tensor, slots: Any, p: Tensor, *numbers: Any) -> tuple[Tensor, Any]:
        *moments, rate, shrink = numbers
        _, u, new = averages(g, slots, *moments)
        return shrink * (p - rate * u) - p, new

    carry = MomoBoundCarry(0, 0, 0) if use_fstar else MomoCarry(0, 0)
    rest = {"before": before, "carry": carry, "hyper": hyper, "storage": storage}
    return of_model(name, zeros(slots, wide=True), update, scalars, reduce, **rest)
