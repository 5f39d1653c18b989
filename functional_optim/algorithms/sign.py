"""Lion, Signum and signSGD: steps of one size in every element.

Chen, Liang, Huang, Real, Wang, Liu, Pham, Dong, Luong, Hsieh, Lu, Le, "Symbolic Discovery of
Optimization Algorithms", https://arxiv.org/abs/2302.06675, Algorithm 2. Bernstein, Wang,
Azizzadenesheli, Anandkumar, "signSGD: Compressed Optimisation for Non-Convex Problems",
https://arxiv.org/abs/1802.04434, Algorithms 1 and 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, check_betas
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.transforms.averaging import ema
from functional_optim.transforms.descent import descent
from functional_optim.transforms.normalizing import sign
from functional_optim.transforms.rules import zeros


class LionSlots(NamedTuple):
    exp_avg: Tensor
    """Average m of the gradient, like p."""


@factory
def scale_by_lion(betas: Betas = (0.9, 0.99)) -> Leafwise:
    """The sign of a mean of the gradient and its average.

    Args:
        betas: weight of the average in the mean, and decay rate of the average, each in [0, 1).

    State: `exp_avg`, like the parameters.

    Raises:
        ValueError: if one of betas is a number outside [0, 1).
        TypeError: if betas is not a pair.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_lion()
        >>> w = torch.zeros(2)
        >>> tx.update(torch.tensor([5.0, -0.01]), tx.init(w), w)[0]
        tensor([ 1., -1.])
    """
    hyper = {"betas": check_betas(betas)}

    init = zeros(LionSlots)

    def scalars(t, *, betas):
        b1, b2 = betas
        return 1 - b1, 1 - b2

    def update(g: Tensor, slots: LionSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, LionSlots]:
        a1, a2 = numbers
        m = slots.exp_avg
        return m.lerp(g, a1), LionSlots(m.lerp(g, a2))

    mix = leafwise(init, update, scalars, hyper=hyper, name="scale_by_lion")
    return Leafwise((*mix.placements, *sign().placements))


@factory
def lion(
    lr: numeric.Hyper = 1e-4, betas: Betas = (0.9, 0.99), weight_decay: numeric.Hyper = 0.0
) -> GradientTransformation:
    """Lion, with the arguments and defaults of the authors' code.

    Args:
        lr: learning rate, ≥ 0. Use a third to a tenth of AdamW's.
        betas: weight of the average in the step, and decay rate of the average, each in [0, 1).
        weight_decay: decoupled decay, ≥ 0. Use three to ten times AdamW's, so that `lr *
            weight_decay` stays as it is.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `exp_avg`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not a pair.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.lion(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 1.1000])
    """
    return descent(scale_by_lion(betas), lr, weight_decay, decoupled=True)


@factory
def signum(
    lr: numeric.Hyper = 1e-2, momentum: numeric.Hyper = 0.9, weight_decay: numeric.Hyper = 0.0
) -> GradientTransformation:
    """Signum: the sign of the average gradient.

    Args:
        lr: learning rate, ≥ 0, the size of the step in every element. Default 1e-2, that of the
            authors' code.
        momentum: decay rate of the average, in [0, 1). Default 0.9, the authors'.
        weight_decay: decoupled decay, ≥ 0.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `ema`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.signum(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 1.1000])
    """
    numeric.check_range("signum", "in [0, 1)", momentum=momentum)
    average = ema(momentum, debias=False)
    return descent(chain(average, sign()), lr, weight_decay, decoupled=True)


@factory
def sign_sgd(lr: numeric.Hyper = 1e-2, weight_decay: numeric.Hyper = 0.0) -> GradientTransformation:
    """signSGD: the sign of the gradient.

    Args:
        lr: learning rate, ≥ 0, the size of the step in every element. Default 1e-2, that of the
            authors' code.
        weight_decay: decoupled decay, ≥ 0.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: none.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.sign_sgd(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9000, 1.1000])
    """
    return descent(sign(), lr, weight_decay, decoupled=True)
