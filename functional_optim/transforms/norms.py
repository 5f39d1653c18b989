"""Steps that use the initial norm of a tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.rule import Runs
from functional_optim.core.scalars import given
from functional_optim.core.storage import as_real, compute_dtype
from functional_optim.transforms.scaling import check_lr


class StartNormSlots(NamedTuple):
    start_norm: Tensor
    """The initial ‖p‖, 0-dim."""


def at_start(p: Tensor) -> StartNormSlots:
    """`init` of a rule that stores the initial norm of a tensor."""
    x = as_real(p, compute_dtype(p))
    square = (x * x).sum()
    null = square == 0  # the root of 0 has no derivative
    return StartNormSlots(square.masked_fill(null, 1.0).sqrt().masked_fill(null, 0.0))


@factory
def keep_norms_within(factor: numeric.Hyper) -> Leafwise:
    """Scale each parameter back to `factor` times its initial norm if a step makes it longer.

    For the end of a chain, after `scale_by_lr`. A tensor that starts from zero stays zero: exclude
    it with `masked`.

    Args:
        factor: the largest norm relative to the initial one, > 0: a number, a 0-dim tensor, or a
            schedule.

    State: `start_norm`, one scalar for each parameter.

    Raises:
        ValueError: if factor is a number and not positive; from `chain`, if a learning rate
            follows.
        RuntimeError: from a step, for sparse gradients.

    Paper: Bernstein, Vahdat, Yue, Liu, "On the distance between two neural networks and the
    stability of learning", https://arxiv.org/abs/2002.03432; `p_bound` in the authors' code.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.sgd(1.0), fo.keep_norms_within(2.0))
        >>> w = torch.tensor([3.0, 4.0])
        >>> u, state = tx.update(torch.tensor([-27.0, -36.0]), tx.init(w), w)
        >>> fo.apply_updates(w, u)
        tensor([6., 8.])
    """
    numeric.check_range("keep_norms_within", "positive", factor=factor)

    def update(u: Tensor, slots: StartNormSlots, p: Tensor, factor: Any) -> tuple[Tensor, Any]:
        x = p + u
        most, square = factor * slots.start_norm, (x * x).sum()
        long = square > most * most
        excess = 1 - most * square.masked_fill(~long, 1.0).rsqrt()
        return u - excess.masked_fill(~long, 0.0) * x, slots

    hyper, name = {"factor": factor}, "keep_norms_within"
    return leafwise(at_start, update, given, hyper=hyper, runs=Runs(after="lr"), name=name)


@factory
def hyperball(lr: numeric.Hyper) -> Leafwise:
    """Steps on a sphere: p ← R · (p − η R u / ‖u‖) / ‖p − η R u / ‖u‖‖, R the initial ‖p‖.

    Put it at the end of a chain, instead of `scale_by_lr`: `chain(scale_by_adam(), hyperball(lr))`.
    The norm of each tensor is constant, and a step rotates it by about lr, so there is no weight
    decay to tune. Use it for matrices of hidden layers. Use `partition` to assign another rule to
    biases, gains and tensors that start from zero, which would stay zero. If the direction u is
    zero, the parameter is only scaled to the norm R.

    Args:
        lr: η, the length of a step relative to R, ≥ 0: a number, a 0-dim tensor, or a schedule.

    State: `start_norm`, one scalar for each parameter.

    Raises:
        ValueError: if lr is a negative number; from `chain`, if a learning rate follows.
        RuntimeError: from a step, for sparse gradients.

    Paper: "Fantastic Pretraining Optimizers and Where to Find Them II: Hyperball",
    https://arxiv.org/abs/2606.16899.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.hyperball(lr=0.75)
        >>> w = torch.tensor([5.0, 0.0])
        >>> u, state = tx.update(torch.tensor([0.0, 0.1]), tx.init(w), w)
        >>> fo.apply_updates(w, u).round(decimals=3)
        tensor([ 4., -3.])
    """
    check_lr(lr)

    def update(u: Tensor, slots: StartNormSlots, p: Tensor, lr: Any) -> tuple[Tensor, Any]:
        R, square = slots.start_norm, (u * u).sum()
        null = square == 0
        step = lr * R * square.masked_fill(null, 1.0).rsqrt()
        x = p - step * u
        length = (x * x).sum()
        none = length == 0
        share = R * length.masked_fill(none, 1.0).rsqrt()
        return (share - 1) * p - share * step * u, slots

    return leafwise(
        at_start, update, given, hyper={"lr": lr}, runs=Runs(after="lr"), name="hyperball"
    )
