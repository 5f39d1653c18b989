"""AdEMAMix: Adam with a second, slow average of the gradient.

Pagliardini, Ablin, Grangier, "The AdEMAMix Optimizer: Better, Faster, Older",
https://arxiv.org/abs/2409.03137, Algorithm 1. Morwani, Vyas, Zhang, Kakade, "Connections between
Schedule-Free Optimizers, AdEMAMix, and Accelerated SGD Variants",
https://arxiv.org/abs/2502.02431.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import AdamSlots, Betas, check_betas, check_each_beta
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.transforms.descent import descent
from functional_optim.transforms.rules import SQUARES, root, zeros


class AdEMAMixSlots(NamedTuple):
    exp_avg_fast: Tensor
    """Fast average m₁ of the gradient, like p."""
    exp_avg_slow: Tensor
    """Slow average m₂ of the gradient, like p."""
    exp_avg_sq: Tensor
    """Second moment ν, like p."""


@factory
def scale_by_ademamix(
    betas: tuple[numeric.Hyper, numeric.Hyper, numeric.Hyper] = (0.9, 0.999, 0.9999),
    alpha: numeric.Hyper = 2.0,
    beta3_warmup: numeric.Hyper | None = None,
    alpha_warmup: numeric.Hyper | None = None,
    eps: numeric.Hyper = 1e-8,
) -> Leafwise:
    """A fast and a slow average of the gradient, divided by the root of the second moment.

    Args:
        betas: decay rates of the fast average, of the average of g², and of the slow average, each
            in [0, 1).
        alpha: weight of the slow average, ≥ 0.
        beta3_warmup: number of steps in which the slow average's rate rises from that of the fast
            one to β₃, linearly in half-lives; None: constant.
        alpha_warmup: number of steps in which alpha rises linearly from 0; None: constant.
        eps: added to the root of the second moment, ≥ 0.

    State: `exp_avg_fast`, `exp_avg_slow` and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not three numbers.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_ademamix((0.9, 0.999, 0.5))
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -2.0]), tx.init(w), w)[0]
        tensor([ 2.0000, -2.0000])
    """
    three = numeric.triple(betas, "betas", "(0.9, 0.999, 0.9999)")
    check_each_beta(three)
    hyper = {"betas": three, "eps": eps, "alpha": alpha}
    hyper |= {"beta3_warmup": _steps("beta3_warmup", beta3_warmup)}
    hyper |= {"alpha_warmup": _steps("alpha_warmup", alpha_warmup)}
    numeric.check_range(None, "of 0 or more", alpha=alpha, eps=eps)

    init = zeros(AdEMAMixSlots)

    def scalars(t, *, betas, eps, alpha, beta3_warmup, alpha_warmup):
        b1, b2, b3 = betas
        b3 = _warmed(t, b1, b3, beta3_warmup)
        alpha = alpha * _risen(t, alpha_warmup)
        root = numeric.sqrt(1 - b2**t)
        return 1 - b1, 1 - b2, 1 - b3, root / (1 - b1**t), root * alpha, root * eps

    def update(g: Tensor, slots: AdEMAMixSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, Any]:
        a1, a2, a3, fast, slow, eps = numbers
        m1 = slots.exp_avg_fast.lerp(g, a1)
        m2 = slots.exp_avg_slow.lerp(g, a3)
        v = slots.exp_avg_sq.lerp(g * g, a2)
        return (fast * m1 + slow * m2) / (root(v) + eps), AdEMAMixSlots(m1, m2, v)

    return leafwise(init, update, scalars, hyper=hyper, storage=SQUARES, name="scale_by_ademamix")


def _steps(name: str, warmup: numeric.Hyper | None) -> numeric.Hyper:
    """The length of a warm-up, 0 for none."""
    if warmup is None:
        return 0.0
    numeric.check(lambda x: x >= 0, warmup, name + " must be 0 or more steps, but is {}.")
    return warmup


def _risen(t: Any, warmup: Any) -> Any:
    """The finished fraction of a warm-up in step t, at most 1."""
    return numeric.minimum(1.0, t / numeric.maximum(warmup, 1.0))


def _warmed(t: Any, start: Any, end: Any, warmup: Any) -> Any:
    """A decay rate in step t of a warm-up, in which its half-life grows linearly."""
    half_life = numeric.lerp(_half_life(start), _half_life(end), _risen(t, warmup))
    return numeric.where(t < warmup, numeric.power(0.5, 1 / (half_life + 1)), end)


def _half_life(beta: Any) -> Any:
    """The half-life in steps, minus one; 1e-8 is from the authors' code, for a beta of 0."""
    return numeric.log(0.5) / numeric.log(beta + 1e-8) - 1


@factory
def ademamix(
    lr: numeric.Hyper = 1e-3,
    betas: tuple[numeric.Hyper, numeric.Hyper, numeric.Hyper] = (0.9, 0.999, 0.9999),
    alpha: numeric.Hyper = 2.0,
    beta3_warmup: numeric.Hyper | None = None,
    alpha_warmup: numeric.Hyper | None = None,
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
) -> GradientTransformation:
    """AdEMAMix, with the arguments and defaults of the authors' code.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the fast average, of the average of g², and of the slow average, each
            in [0, 1).
        alpha: weight of the slow average, ≥ 0. The paper uses 4 to 10, with warm-ups.
        beta3_warmup: number of steps in which the slow average's rate rises from that of the fast
            one to β₃, linearly in half-lives; None: constant. The paper takes all steps.
        alpha_warmup: number of steps in which alpha rises linearly from 0; None: constant. The
            paper takes all steps.
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: decoupled decay, ≥ 0.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `exp_avg_fast`, `exp_avg_slow` and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not three numbers.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.ademamix(lr=0.1, alpha=8.0, beta3_warmup=1000, alpha_warmup=1000)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 1.1000])
    """
    adapt = scale_by_ademamix(betas, alpha, beta3_warmup, alpha_warmup, eps)
    return descent(adapt, lr, weight_decay, decoupled=True)


@factory
def scale_by_simplified_ademamix(
    betas: Betas = (0.99, 0.95),
    alpha: numeric.Hyper = 0.0,
    beta1_warmup: numeric.Hyper | None = None,
    min_beta1: numeric.Hyper = 0.9,
    eps: numeric.Hyper = 1e-8,
) -> Leafwise:
    """A sum of gradients plus α times the newest, divided by the root of the second moment.

    Args:
        betas: decay rates of the sum of g and of the average of g², each in [0, 1).
        alpha: weight of the newest gradient relative to the sum, ≥ 0.
        beta1_warmup: number of steps in which the sum's rate rises from `min_beta1` to β₁, linearly
            in half-lives; None: constant.
        min_beta1: initial rate of that warm-up, in [0, 1).
        eps: added to the root of the second moment, ≥ 0.

    State: `exp_avg`, the sum, and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not a pair.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_simplified_ademamix(alpha=3.0)
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)[0]
        tensor([ 4.0000, -4.0000])
    """
    hyper = {"betas": check_betas(betas), "eps": eps, "alpha": alpha, "min_beta1": min_beta1}
    hyper |= {"beta1_warmup": _steps("beta1_warmup", beta1_warmup)}
    numeric.check_range(None, "of 0 or more", alpha=alpha, eps=eps)
    numeric.check_range(None, "in [0, 1)", min_beta1=min_beta1)

    def scalars(t, *, betas, eps, alpha, beta1_warmup, min_beta1):
        b1, b2 = betas
        b1 = _warmed(t, min_beta1, b1, beta1_warmup)
        root = numeric.sqrt(1 - b2**t)
        return b1, 1 - b2, root, root * alpha, root * eps

    def update(g: Tensor, slots: AdamSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, AdamSlots]:
        b1, a2, scale, from_g, eps = numbers
        m = b1 * slots.exp_avg + g
        v = slots.exp_avg_sq.lerp(g * g, a2)
        u = (scale * m + from_g * g) / (root(v) + eps)
        return u, AdamSlots(m, v)

    init = zeros(AdamSlots)
    return leafwise(
        init, update, scalars, hyper=hyper, storage=SQUARES, name="scale_by_simplified_ademamix"
    )


@factory
def simplified_ademamix(
    lr: numeric.Hyper = 1e-3,
    betas: Betas = (0.99, 0.95),
    alpha: numeric.Hyper = 0.0,
    beta1_warmup: numeric.Hyper | None = None,
    min_beta1: numeric.Hyper = 0.9,
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
) -> GradientTransformation:
    """Simplified AdEMAMix, with the arguments and defaults of the authors' code.

    Args:
        lr: learning rate, ≥ 0. The sum of gradients is about 1 / (1 − β₁) times an average, so
            this is smaller than Adam's by that factor.
        betas: decay rates of the sum of g and of the average of g², each in [0, 1).
        alpha: weight of the newest gradient relative to the sum, ≥ 0. The paper uses 10 to 200 for
            small batches.
        beta1_warmup: number of steps in which the sum's rate rises from `min_beta1` to β₁, linearly
            in half-lives; None: constant.
        min_beta1: initial rate of that warm-up, in [0, 1).
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: decoupled decay, ≥ 0.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `exp_avg`, the sum, and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not a pair.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.simplified_ademamix(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 1.1000])
    """
    adapt = scale_by_simplified_ademamix(betas, alpha, beta1_warmup, min_beta1, eps)
    return descent(adapt, lr, weight_decay, decoupled=True)
