"""DoG and DoWG: gradient descent with a step size of distance over gradients.

Ivgi, Hinder, Carmon, "DoG is SGD's Best Friend: A Parameter-Free Dynamic Step Size Schedule",
https://arxiv.org/abs/2302.12022, as the authors have it in https://github.com/formll/dog. Khaled,
Mishchenko, Jin, "DoWG Unleashed: An Efficient Universal Parameter-Free Gradient Descent Method",
https://arxiv.org/abs/2305.16284, Algorithm 1, as in https://github.com/rka97/dowg.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.rule import times
from functional_optim.core.storage import Storage, wide_dtype
from functional_optim.transforms.descent import descent
from functional_optim.transforms.rules import of_model


class StartSlots(NamedTuple):
    p0: Tensor
    """The initial parameter, like p; float32 for half types."""


class DogCarry(NamedTuple):
    distance: Any
    """The largest distance from the start so far; 0 before the first step."""
    grad_square_sum: Any
    """Sum of all ‖g‖², and eps; 0 before the first step."""


class DowgCarry(NamedTuple):
    distance_square: Any
    """The square of the largest distance from the start so far; 0 before the first step."""
    weighted_square_sum: Any
    """Sum of all ‖g‖², each weighted by the square of the distance at that step."""


@factory
def scale_by_dog(
    reps_rel: numeric.Hyper = 1e-6, eps: numeric.Hyper = 1e-8, init_eta: numeric.Hyper | None = None
) -> Leafwise:
    """Multiply a gradient by the largest distance from the start over the root of Σ ‖g‖².

    Args:
        reps_rel, eps, init_eta: as for `dog`.

    State: `p0`, like the parameters; `distance` and `grad_square_sum`, scalars of all parameters.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_dog(reps_rel=0.5, eps=0.0)
        >>> w = torch.tensor([3.0, 4.0])  # of norm 5, so the first distance is 0.5 · (1 + 5)
        >>> tx.update(torch.tensor([0.0, 2.0]), tx.init(w), w)[0]
        tensor([0., 3.])
    """
    numeric.check_range("dog", "above 0", reps_rel=reps_rel)
    numeric.check_range("dog", "of 0 or more", eps=eps)
    hyper = {"eps": eps, "first": reps_rel}
    if init_eta is not None:
        numeric.check_range("dog", "above 0", init_eta=init_eta)
        hyper["first"] = init_eta
    given = init_eta is not None

    def reduce(g: Tensor, slots: StartSlots, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        away, start = p - slots.p0, slots.p0
        return (away * away).sum(), (g * g).sum(), (start * start).sum()

    def scalars(t, carry, total, *, first, eps):
        new = carry.grad_square_sum == 0
        least = 0.0 if given else first * (1 + numeric.sqrt(total[2]))
        farthest = numeric.maximum(carry.distance, numeric.sqrt(total[0]))
        distance = numeric.where(new, least, farthest)
        squares = carry.grad_square_sum + numeric.where(new, eps, 0.0) + total[1]
        eta = distance / numeric.sqrt(numeric.where(squares == 0, 1.0, squares))
        if given:
            eta = numeric.where(new, first, eta)
        return (eta,), DogCarry(distance, squares)

    rest = {"carry": DogCarry(0, 0), "hyper": hyper, "storage": Storage(weights=("p0",))}
    return of_model("scale_by_dog", _start, times, scalars, reduce, **rest)


@factory
def dog(
    lr: numeric.Hyper = 1.0,
    reps_rel: numeric.Hyper = 1e-6,
    weight_decay: numeric.Hyper = 0.0,
    eps: numeric.Hyper = 1e-8,
    init_eta: numeric.Hyper | None = None,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """DoG: the step size is the largest distance from the start over the root of Σ ‖g‖².

    For good results, evaluate an average of the parameters: chain it with `params_ema`, with a
    growing decay, e.g. `fo.params_ema(lambda count: 1 - 9 / (count + 9))`, the authors' choice.

    Args:
        lr: factor on the step, ≥ 0; the authors advise to keep it at 1.
        reps_rel: the initial distance, as a fraction of 1 + ‖p‖; > 0. The authors advise 1e-4 for
            models with batch normalization.
        weight_decay: L2 coefficient, ≥ 0.
        eps: added to Σ ‖g‖², ≥ 0.
        init_eta: the first step size, > 0, instead of the one that follows from `reps_rel`.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are the authors'.

    State: `p0`, like the parameters; `distance` and `grad_square_sum`, scalars of all parameters.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.dog(reps_rel=1e-2)
        >>> w = torch.tensor([3.0, 4.0])
        >>> state = tx.init(w)
        >>> for _ in range(60):  # f(w) = w · w
        ...     updates, state = tx.update(2 * w, state, w)
        ...     w = fo.apply_updates(w, updates)
        >>> bool(w.norm() < 1)
        True
    """
    adapt = scale_by_dog(reps_rel, eps, init_eta)
    return descent(adapt, lr, weight_decay, maximize=maximize)


@factory
def scale_by_dowg(eps: numeric.Hyper = 1e-4) -> Leafwise:
    """Multiply a gradient by r² over the root of Σ r² ‖g‖², r the largest distance from the start.

    Args:
        eps: as for `dowg`.

    State: `p0`, like the parameters; `distance_square` and `weighted_square_sum`, scalars of all
    parameters.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_dowg(eps=1.0)
        >>> w = torch.tensor([3.0, 4.0])
        >>> tx.update(torch.tensor([0.0, 2.0]), tx.init(w), w)[0]
        tensor([0.0000, 0.6667])
    """
    numeric.check_range("dowg", "above 0", eps=eps)

    def reduce(g: Tensor, slots: StartSlots, p: Tensor) -> tuple[Tensor, Tensor]:
        away = p - slots.p0
        return (away * away).sum(), (g * g).sum()

    def scalars(t, carry, total, *, eps):
        before = numeric.where(carry.distance_square == 0, eps, carry.distance_square)
        square = numeric.maximum(before, total[0])
        weighted = carry.weighted_square_sum + square * total[1]
        return (square / (numeric.sqrt(weighted) + eps),), DowgCarry(square, weighted)

    rest = {"carry": DowgCarry(0, 0), "hyper": {"eps": eps}, "storage": Storage(weights=("p0",))}
    return of_model("scale_by_dowg", _start, times, scalars, reduce, **rest)


@factory
def dowg(
    lr: numeric.Hyper = 1.0, eps: numeric.Hyper = 1e-4, *, maximize: bool = False
) -> GradientTransformation:
    """DoWG: DoG with larger weights for later gradients.

    Args:
        lr: factor on the step, ≥ 0; 1 in the paper.
        eps: the square of the initial distance, and added to the root; > 0. Default 1e-4, the
            authors'.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `p0`, like the parameters; `distance_square` and `weighted_square_sum`, scalars of all
    parameters.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.dowg()
        >>> w = torch.tensor([3.0, 4.0])
        >>> state = tx.init(w)
        >>> for _ in range(60):  # f(w) = w · w
        ...     updates, state = tx.update(2 * w, state, w)
        ...     w = fo.apply_updates(w, updates)
        >>> bool(w.norm() < 1)
        True
    """
    return descent(scale_by_dowg(eps), lr, maximize=maximize)


def _start(p: Tensor) -> StartSlots:
    return StartSlots(p.to(wide_dtype(p), copy=True))
