"""COCOB: coin betting instead of a learning rate.

Orabona, Tommasi, "Training Deep Networks without Learning Rates Through Coin Betting",
https://arxiv.org/abs/1705.07795, Algorithm 2, as the authors' code has it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.scalars import given
from functional_optim.core.storage import Storage
from functional_optim.transforms.rules import zeros
from functional_optim.transforms.scaling import apply_delta, signed
from functional_optim.transforms.weight_decay import add_decayed_weights


class CocobSlots(NamedTuple):
    max_abs_grad: Tensor
    """L, largest |g| so far, like p."""
    sum_abs_grad: Tensor
    """G, sum of |g|, like p."""
    sum_grad: Tensor
    """−θ, sum of g, like p."""
    reward: Tensor
    """The reward of the bets, ≥ 0, like p."""
    bet: Tensor
    """The displacement of the parameter from its initial value, like p."""


@factory
def scale_by_cocob(alpha: numeric.Hyper = 100.0, eps: numeric.Hyper = 1e-8) -> Leafwise:
    """The difference from the previous bet to the new one: the step itself, with its sign.

    Args:
        alpha: bounds the first bets to 1 / alpha of the wealth, > 0.
        eps: lower bound of the largest |g|, > 0.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are the authors'.

    State: `max_abs_grad`, `sum_abs_grad`, `sum_grad`, `reward` and `bet`, like the parameters.

    Raises:
        ValueError: if a number is not positive.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_cocob()
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([3.0, -0.5]), tx.init(w), w)[0]
        tensor([-0.0100,  0.0100])
    """
    hyper = {"alpha": alpha, "eps": eps}
    for name, value in hyper.items():
        numeric.check(
            lambda x: x > 0.0,
            value,
            f"COCOB divides by {name}, so it must be above 0, but is {{}}.",
        )

    def update(g: Tensor, slots: CocobSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, CocobSlots]:
        alpha, eps = numbers
        L = torch.maximum(slots.max_abs_grad, g.abs()).clamp(min=eps)
        G = slots.sum_abs_grad + g.abs()
        total = slots.sum_grad + g
        reward = (slots.reward - g * slots.bet).clamp(min=0.0)
        bet = -total / L * ((L + reward) / torch.maximum(G + L, alpha * L))
        return bet - slots.bet, CocobSlots(L, G, total, reward, bet)

    init = zeros(CocobSlots)
    storage = Storage(nonnegative=("max_abs_grad", "sum_abs_grad", "reward"))
    return leafwise(init, update, given, hyper=hyper, storage=storage, name="scale_by_cocob")


@factory
def cocob(
    lr: numeric.Hyper = 1.0,
    alpha: numeric.Hyper = 100.0,
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """COCOB: each element bets a share of what it has won on the sign of the next gradient.

    Args:
        lr: a factor on all steps, ≥ 0. Default 1: the authors have none, and it need not be tuned.
        alpha: bounds the first bets, > 0: the first step of an element is 1 / alpha.
        eps: lower bound of the largest |g|, > 0.
        weight_decay: L2 coefficient, ≥ 0.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `max_abs_grad`, `sum_abs_grad`, `sum_grad`, `reward` and `bet`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.cocob()
        >>> w = torch.tensor([3.0, -2.0])
        >>> state = tx.init(w)
        >>> for _ in range(100):  # f(w) = w · w
        ...     updates, state = tx.update(2 * w, state, w)
        ...     w = fo.apply_updates(w, updates)
        >>> bool(w @ w < 0.5)
        True
    """
    return chain(
        signed(maximize),
        add_decayed_weights(weight_decay),
        scale_by_cocob(alpha, eps),
        apply_delta(lr),
    )
