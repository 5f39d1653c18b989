"""Sophia: averaged gradients, divided by an estimate of the Hessian's diagonal, and clipped.

Liu, Li, Hall, Liang, Ma, "Sophia: A Scalable Stochastic Second-order Optimizer for Language Model
Pre-training", https://arxiv.org/abs/2305.14342, Algorithm 3, as in the authors' code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, check_betas
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.transforms.descent import descent
from functional_optim.transforms.rules import zeros


class SophiaSlots(NamedTuple):
    exp_avg: Tensor
    """Average gradient m, like p."""
    hessian: Tensor
    """Average h of the estimates of the Hessian's diagonal, like p."""


@factory
def scale_by_sophia(
    betas: Betas = (0.965, 0.99), rho: numeric.Hyper = 0.04, eps: numeric.Hyper = 1e-15
) -> Leafwise:
    """The average gradient divided by ρ max(h, 0) + ε, clipped to [−1, 1].

    A step does not change h: `estimators.observe_hessian` adds an estimate to it. Before the first
    estimate, the result is the sign of the average gradient.

    Args:
        betas: decay rates of the averages of g and of the estimates, each in [0, 1).
        rho: ρ, ≥ 0: the smaller it is, the more elements are clipped. The authors recommend that
            the fraction of elements that are not clipped is between 0.1 and 0.5.
        eps: added to the divisor, > 0.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are the authors'.

    State: `exp_avg` and `hessian`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_sophia(betas=(0.0, 0.0), rho=1.0)
        >>> w = torch.zeros(2)
        >>> state = fo.estimators.observe_hessian(tx.init(w), torch.tensor([10.0, 0.1]))
        >>> tx.update(torch.tensor([5.0, 5.0]), state, w)[0]
        tensor([0.5000, 1.0000])
    """
    hyper = {"betas": check_betas(betas), "rho": rho, "eps": eps}
    numeric.check_range(None, "of 0 or more", rho=rho)
    numeric.check(
        lambda x: x > 0.0, eps, "Sophia divides by eps where the Hessian is 0, so eps must be "
        "above 0, but got {}."
    )  # fmt: skip

    init = zeros(SophiaSlots)

    def scalars(t, *, betas, rho, eps):
        return 1 - betas[0], rho, eps

    def update(g: Tensor, slots: SophiaSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, Any]:
        a1, rho, eps = numbers
        m = slots.exp_avg.lerp(g, a1)
        u = m / (rho * slots.hessian.clamp(min=0.0) + eps)
        return u.clamp(-1.0, 1.0), SophiaSlots(m, slots.hessian)

    return leafwise(init, update, scalars, hyper=hyper, name="scale_by_sophia")


@factory
def sophia(
    lr: numeric.Hyper = 1e-4,
    betas: Betas = (0.965, 0.99),
    rho: numeric.Hyper = 0.04,
    weight_decay: numeric.Hyper = 0.1,
    eps: numeric.Hyper = 1e-15,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """Sophia: steps along m / (ρ h), with elements of at most lr.

    About every ten steps, pass it an estimate of the Hessian's diagonal::

        diagonal = fo.estimators.gauss_newton_bartlett(logits_fn)
        state = fo.estimators.observe_hessian(state, diagonal(params, seed, x))

    Args:
        lr: learning rate, ≥ 0: the largest step of an element.
        betas: decay rates of the averages of g and of the estimates, each in [0, 1).
        rho: ρ, ≥ 0: the smaller it is, the more elements are clipped.
        weight_decay: decay coefficient, ≥ 0; a step subtracts `lr * weight_decay` of each weight.
        eps: added to the divisor, > 0.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are the authors'.

    State: `exp_avg` and `hessian`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> scale = torch.tensor([100.0, 1.0])  # f(w) = (100 w₀² + w₁²) / 2
        >>> tx, w = fo.sophia(lr=1.0, betas=(0.0, 0.0), rho=1.0, weight_decay=0.0), torch.ones(2)
        >>> diagonal = fo.estimators.hutchinson(lambda w: (scale * w * w).sum() / 2)
        >>> state = fo.estimators.observe_hessian(tx.init(w), diagonal(w, 0))
        >>> updates, state = tx.update(scale * w, state, w)
        >>> fo.apply_updates(w, updates)  # a step of Newton's method
        tensor([0., 0.])
    """
    adapt = scale_by_sophia(betas, rho, eps)
    return descent(adapt, lr, weight_decay, decoupled=True, maximize=maximize)
