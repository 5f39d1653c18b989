"""SM3: Adagrad with the memory of vectors along each dimension.

Anil, Gupta, Koren, Singer, "Memory-Efficient Adaptive Optimization",
https://arxiv.org/abs/1901.11150, Algorithm SM3-II, with the momentum of the authors' code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import sharding
from functional_optim.core.base import GradientTransformation, real_only
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.scalars import given
from functional_optim.core.storage import Storage
from functional_optim.transforms.averaging import ema
from functional_optim.transforms.descent import descent
from functional_optim.transforms.scaling import scale

MOST = 5
"""The largest number of dimensions: that of kernels of 3-D convolutions."""


class Sm3Slots(NamedTuple):
    accumulator_0: Tensor
    """Largest sums of g² for each index of the first dimension, (m, 1, …); below two dimensions
    the sums themselves, like p."""
    accumulator_1: Tensor | None
    """The same for the second dimension, (1, n, 1, …); None if there is none."""
    accumulator_2: Tensor | None
    """For the third."""
    accumulator_3: Tensor | None
    """For the fourth."""
    accumulator_4: Tensor | None
    """For the fifth."""


@factory
def scale_by_sm3(eps: numeric.Hyper = 1e-30) -> Leafwise:
    """Divide each gradient by the root of a bound on the sum of its squares.

    A tensor of more than one dimension keeps one accumulator for each of them. The bound of an
    element is the smallest of its accumulators, and each accumulator becomes the largest of its
    elements' new bounds. Vectors and scalars have the sums, as in Adagrad.

    Args:
        eps: added to the sum, ≥ 0: a number, a 0-dim tensor, or a schedule. Default 1e-30, the
            authors'.

    State: `accumulator_0` to `accumulator_4`, see `Sm3Slots`; one for each dimension.

    Raises:
        ValueError: if eps is a negative number; from init, for more than five dimensions.
        TypeError: from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_sm3()
        >>> w = torch.zeros(2, 2)
        >>> u, state = tx.update(torch.tensor([[3.0, 0.0], [0.0, 4.0]]), tx.init(w), w)
        >>> u
        tensor([[1., 0.],
                [0., 1.]])
        >>> state.slots["accumulator_0"], state.slots["accumulator_1"]
        (tensor([[ 9.],
                [16.]]), tensor([[ 9., 16.]]))
    """
    numeric.check_range(None, "of 0 or more", eps=eps)
    real = real_only("scale_by_sm3")

    def init(p: Tensor) -> Sm3Slots:
        real(p)
        if p.dim() > MOST:
            raise ValueError(
                f"SM3 takes tensors of up to {MOST} dimensions, but got a parameter of shape "
                f"{tuple(p.shape)}; store it with fewer, or give it another rule with partition."
            )
        zero = torch.zeros_like(
            p
        )  # with maxima, so that shards and strides are those of later steps
        found = [largest(zero, i) for i in range(max(p.dim(), 1))]
        return Sm3Slots(*found, *[None] * (MOST - len(found)))

    def update(g: Tensor, slots: Sm3Slots, p: Tensor, eps: Any) -> tuple[Tensor, Sm3Slots]:
        bound, *others = [x for x in slots if x is not None]
        for x in others:
            bound = torch.minimum(bound, x)
        bound = bound + g * g
        found = [largest(bound, i) for i in range(1 + len(others))]
        u = g * (bound + eps).rsqrt()
        return u, Sm3Slots(*found, *[None] * (MOST - len(found)))

    storage = Storage(nonnegative=Sm3Slots._fields)
    return leafwise(init, update, given, hyper={"eps": eps}, storage=storage, name="scale_by_sm3")


def largest(x: Tensor, dim: int) -> Tensor:
    """The largest elements for each index of a dimension; other dimensions have size 1."""
    others = [i for i in range(x.dim()) if i != dim]
    if not others:
        return x
    if x.numel() == 0:
        return x.sum(others, keepdim=True)  # max fails without elements
    return sharding.complete(sharding.amax(x, others))


@factory
def sm3(
    lr: numeric.Hyper = 0.1,
    momentum: numeric.Hyper = 0.9,
    eps: numeric.Hyper = 1e-30,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """SM3 with momentum: an average of gradients that are divided by bounds on their sums.

    Args:
        lr: learning rate, ≥ 0. Default 0.1, the paper's for a Transformer is 0.125; the authors'
            code has no default.
        momentum: decay rate of the average, in [0, 1). The Python number 0 drops it. Default 0.9,
            the paper's.
        eps: added to the sums, ≥ 0.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `accumulator_0` to `accumulator_4`, vectors along the dimensions; `ema`, like the
    parameters, if there is momentum.

    Raises:
        ValueError: for hyperparameters out of range; from init, for more than five dimensions.
        TypeError: from init, for a complex parameter.
        RuntimeError: from a step, for sparse gradients.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.sm3(lr=1.0, momentum=0.5)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([30.0, -40.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.5000, 1.5000])
    """
    average = ema(momentum, debias=False)
    if numeric.is_zero(momentum):
        average = scale(1.0)
    return descent(chain(scale_by_sm3(eps), average), lr, maximize=maximize)
