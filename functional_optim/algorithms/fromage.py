"""Fromage: steps relative to the norm of each tensor, without growing it.

Bernstein, Vahdat, Yue, Liu, "On the distance between two neural networks and the stability of
learning", https://arxiv.org/abs/2002.03432, Algorithm 1.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functional_optim import numeric
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, identity, leafwise
from functional_optim.core.rule import Runs
from functional_optim.transforms.normalizing import scale_by_trust_ratio
from functional_optim.transforms.norms import keep_norms_within
from functional_optim.transforms.scaling import check_lr, signed


@factory
def scale_by_fromage(lr: numeric.Hyper = 1e-2) -> Leafwise:
    """The step from p to (p − η u) / √(1 + η²), for a direction u as long as p.

    If u is orthogonal to p, the step rotates p and preserves its norm. It is the step itself: no
    learning rate may follow.

    Args:
        lr: η, ≥ 0: a number, a 0-dim tensor, or a schedule.

    Raises:
        ValueError: if lr is a negative number; from `chain`, if a learning rate follows.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_fromage(lr=0.75)
        >>> w = torch.tensor([1.0, 0.0])
        >>> u, state = tx.update(torch.tensor([0.0, 1.0]), tx.init(w), w)
        >>> fo.apply_updates(w, u)
        tensor([ 0.8000, -0.6000])
    """
    check_lr(lr)

    def scalars(t, *, lr):
        shrunk = 1 / numeric.sqrt(1 + lr * lr)
        return lr * shrunk, lr * lr * shrunk / (1 + 1 / shrunk)  # the latter: 1 − shrunk

    def update(u: Tensor, slots: Any, p: Tensor, step: Any, decay: Any) -> tuple[Tensor, Any]:
        return -(step * u + decay * p), slots

    return leafwise(
        None, update, scalars, hyper={"lr": lr}, runs=Runs(after="lr"), name="scale_by_fromage"
    )


@factory
def fromage(
    lr: numeric.Hyper = 1e-2, p_bound: numeric.Hyper | None = None, *, maximize: bool = False
) -> GradientTransformation:
    """Fromage: p ← (p − lr · ‖p‖ / ‖g‖ · g) / √(1 + lr²), for each tensor.

    If one of the norms is zero, the step is the plain gradient.

    Args:
        lr: η, the length of a step relative to ‖p‖, ≥ 0. Default 1e-2, the authors'.
        p_bound: largest norm of each tensor relative to its initial norm, > 0. Tensors that start
            from zero then stay zero. None, the default: no bound.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: none; with `p_bound` `start_norm`, one scalar for each parameter.

    Raises:
        ValueError: for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.fromage(lr=0.75)
        >>> w = torch.tensor([0.0, 5.0])
        >>> updates, state = tx.update(torch.tensor([100.0, 0.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates).round(decimals=3)
        tensor([-3.,  4.])
    """
    return chain(
        signed(maximize),
        scale_by_trust_ratio(),
        scale_by_fromage(lr),
        identity() if p_bound is None else keep_norms_within(p_bound),
    )
