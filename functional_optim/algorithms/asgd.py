"""ASGD: averaged stochastic gradient descent.

Polyak, Juditsky, "Acceleration of stochastic approximation by averaging",
https://doi.org/10.1137/0330046, with the decaying step size of Bottou, "Stochastic Gradient Descent
Tricks", https://leon.bottou.org/publications/pdf/tricks-2012.pdf, section 5.1.
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
from functional_optim.core.rule import Runs
from functional_optim.core.storage import Storage
from functional_optim.transforms.rules import zeros
from functional_optim.transforms.scaling import check_lr, signed
from functional_optim.transforms.weight_decay import add_decayed_weights


class EtaCarry(NamedTuple):
    eta: Any
    """Step size of the next step, 0-dim; lr at the first."""


class MuCarry(NamedTuple):
    mu: Any
    """Weight of the next parameters in the average, 0-dim; 1 until averaging starts."""


class AsgdSlots(NamedTuple):
    ax: Tensor
    """Average of the parameter, like p; float32 for half types."""


@factory
def scale_by_asgd(
    lr: numeric.Hyper = 1e-2, lambd: numeric.Hyper = 1e-4, alpha: numeric.Hyper = 0.75
) -> Leafwise:
    """−η (g + λ p), with the step size η = lr / (1 + λ lr t)^α of the previous step.

    Args:
        lr: first step size, ≥ 0.
        lambd: λ, decay of the parameters and of the step size.
        alpha: power in the decay of the step size.

    State: `eta`, a scalar.

    Raises:
        ValueError: torch.optim.ASGD's message, for a negative lr.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_asgd(lr=0.5, lambd=0.0)
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -2.0]), tx.init(w), w)[0]
        tensor([-2.5000,  1.0000])
    """
    check_lr(lr)

    def scalars(t, carry, *, lr, lambd, alpha):
        eta = lr / numeric.power(1 + lambd * lr * t, alpha)
        return (carry.eta, lambd), EtaCarry(eta)

    def update(g: Tensor, slots: Any, p: Tensor, eta: Any, lambd: Any) -> tuple[Tensor, Any]:
        return -eta * (g + lambd * p), slots

    carry, hyper = EtaCarry(numeric.at(lr, 1)), {"lr": lr, "lambd": lambd, "alpha": alpha}
    return leafwise(None, update, scalars, carry=carry, hyper=hyper, name="scale_by_asgd")


@factory
def polyak_average(t0: numeric.Hyper = 1e6) -> Leafwise:
    """Keep the mean of the parameters over all steps after t0; a copy of them before.

    The updates pass unchanged. It reads p + u, so put it at the end of a chain.

    Args:
        t0: step after which averaging starts.

    State: `mu`, a scalar; `ax`, like the parameters (float32 for half types), 0 before the first
    step.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.scale_by_lr(1.0), fo.polyak_average(t0=0))
        >>> w = torch.tensor([4.0])
        >>> u, state = tx.update(torch.tensor([1.0]), tx.init(w), w)
        >>> state.slots["ax"]
        tensor([3.])
    """

    def scalars(t, carry, *, t0):
        return (carry.mu,), MuCarry(1 / numeric.maximum(1.0, t - t0))

    def update(u: Tensor, slots: AsgdSlots, p: Tensor, mu: Any) -> tuple[Tensor, AsgdSlots]:
        # lerp by 1 is no copy if ax is not finite
        if isinstance(mu, Tensor):
            return u, AsgdSlots(torch.where(mu == 1, p, slots.ax.lerp(p, mu)))
        return u, AsgdSlots(p.clone() if mu == 1 else slots.ax.lerp(p, mu))

    return leafwise(
        zeros(AsgdSlots, wide=True),
        update,
        scalars,
        carry=MuCarry(1.0),
        hyper={"t0": t0},
        runs=Runs(after="step", dense_only=True),
        storage=Storage(weights=("ax",)),
        name="polyak_average",
    )


@factory
def asgd(
    lr: numeric.Hyper = 1e-2,
    lambd: numeric.Hyper = 1e-4,
    alpha: numeric.Hyper = 0.75,
    t0: numeric.Hyper = 1e6,
    weight_decay: numeric.Hyper = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """ASGD, with torch.optim.ASGD's arguments and defaults. The average is the slot `ax`.

    Args:
        lr: first step size, ≥ 0.
        lambd: λ, decay of the parameters and of the step size.
        alpha: power in the decay of the step size.
        t0: step after which averaging starts.
        weight_decay: L2 coefficient, ≥ 0.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `eta` and `mu`, scalars; `ax`, like the parameters (float32 for half types).

    Raises:
        ValueError: torch.optim.ASGD's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.asgd(lr=0.1, lambd=0.0)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.7000, 1.2000])
    """
    return chain(
        signed(maximize),
        add_decayed_weights(weight_decay),
        scale_by_asgd(lr, lambd, alpha),
        polyak_average(t0),
    )
