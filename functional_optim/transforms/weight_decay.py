"""Weight decay."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functional_optim import numeric
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, identity, leafwise
from functional_optim.core.paths import Mask, masked_by
from functional_optim.core.rule import Runs, Update
from functional_optim.core.scalars import given
from functional_optim.transforms.scaling import check_lr, scale_by_lr


@factory
def add_decayed_weights(
    weight_decay: numeric.Hyper, *, independent: bool = False, mask: Mask | None = None
) -> Leafwise:
    """Add `weight_decay * p` to every update.

    The meaning depends on its place in the chain:

    * before the adaptive transform it is L2 regularization (torch.optim.Adam's weight_decay);
    * between that and `scale_by_lr` it is decoupled from the gradient, not from the learning rate:
      a step subtracts `lr * weight_decay` of each weight (torch.optim.AdamW's);
    * after `scale_by_lr`, with `independent=True`, a step subtracts `weight_decay` of each weight,
      independently of the learning rate;
    * there, with a schedule proportional to the learning rate's, a step subtracts `weight_decay *
      lr / peak` of each weight: `add_decayed_weights(lambda count: 0.1 * lr(count) / peak,
      independent=True)`.

    `cautious_weight_decay` skips the elements whose absolute value a step increases.

    Args:
        weight_decay: coefficient, ≥ 0: a number, a 0-dim tensor, or a schedule. The Python number
            0 makes this `identity`.
        independent: subtract instead of adding, for the place after `scale_by_lr`.
        mask: which parameters to decay: a pattern, patterns, a function of path and parameter, or a
            tree of bools, as in `masked`. Default: all.

    Raises:
        ValueError: if weight_decay is a negative number; from `chain`, if a learning rate follows
            an independent decay, or another one follows a learning rate: weights would grow.

    Paper: Loshchilov, Hutter, "Decoupled Weight Decay Regularization",
    https://arxiv.org/abs/1711.05101; its decay is the independent one.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(
        ...     fo.add_decayed_weights(0.1, mask=lambda path, p: p.ndim > 1), fo.scale_by_lr(1.0)
        ... )
        >>> params = {"weight": torch.full((1, 1), 10.0), "bias": torch.full((1,), 10.0)}
        >>> zeros = fo.tree.map(torch.zeros_like, params)
        >>> tx.update(zeros, tx.init(params), params)[0]
        {'weight': tensor([[-1.]]), 'bias': tensor([-0.])}
    """
    sign = -1 if independent else 1

    def update(u: Tensor, slots: Any, p: Tensor, w: Any) -> tuple[Tensor, Any]:
        return u + sign * w * p, slots

    return _decay(update, weight_decay, independent, mask, "add_decayed_weights")


@factory
def cautious_weight_decay(
    weight_decay: numeric.Hyper, *, independent: bool = False, mask: Mask | None = None
) -> Leafwise:
    """Add `weight_decay * p` to the elements of an update that already move towards zero.

    An element decays if the step and its decay have the same direction, or if the step is zero. The
    others do not decay, so the decay does not shift the minimum of the loss as plain decay does.
    Put it where `add_decayed_weights` would be: before `scale_by_lr`, or with `independent=True`
    after it. It is not useful before an adaptive transform.

    Args:
        weight_decay: coefficient, ≥ 0: a number, a 0-dim tensor, or a schedule. The Python number
            0 makes this `identity`.
        independent: subtract instead of adding, for the place after `scale_by_lr`.
        mask: which parameters to decay, as in `add_decayed_weights`. Default: all.

    Raises:
        ValueError: if weight_decay is a negative number; from `chain`, if a learning rate follows
            an independent decay, or another one follows a learning rate.

    Paper: Chen, Li, Liang et al., "Cautious Weight Decay", https://arxiv.org/abs/2510.12402.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.cautious_weight_decay(0.5), fo.scale_by_lr(1.0))
        >>> w = torch.tensor([2.0, 2.0])
        >>> tx.update(torch.tensor([3.0, -3.0]), tx.init(w), w)[0]
        tensor([-4.,  3.])
    """
    sign = -1 if independent else 1

    def update(u: Tensor, slots: Any, p: Tensor, w: Any) -> tuple[Tensor, Any]:
        agrees = (sign * u * p >= 0).to(u.dtype)
        return u + sign * w * agrees * p, slots

    return _decay(update, weight_decay, independent, mask, "cautious_weight_decay")


NEGATIVE = (
    "Invalid weight_decay value: {}; pass 0 or more, and independent=True after a learning rate."
)


def _decay(
    update: Update, weight_decay: numeric.Hyper, independent: bool, mask: Mask | None, name: str
) -> Leafwise:
    """A decay by a rule that reads the coefficient."""
    numeric.check(numeric.RANGES["of 0 or more"], weight_decay, NEGATIVE)
    where = () if mask is None else (masked_by(mask),)
    if numeric.is_zero(weight_decay):
        return identity()

    hyper = {"weight_decay": weight_decay}
    decay = leafwise(
        None, update, given, hyper=hyper, runs=Runs(after="lr" if independent else None), name=name
    )
    return Leafwise(tuple([placement.on(*where) for placement in decay.placements]))


@factory
def proximal_step(lr: numeric.Hyper, weight_decay: numeric.Hyper) -> Leafwise:
    """Step by −lr u and then divide by 1 + lr λ: p becomes (p − lr u) / (1 + lr λ).

    Use it instead of `scale_by_lr`. To first order in lr this is decoupled decay, but it never
    changes the sign of a weight, even for large hyperparameters.

    Args:
        lr: learning rate, ≥ 0: a number, a 0-dim tensor, or a schedule.
        weight_decay: λ, ≥ 0: a number, a 0-dim tensor, or a schedule. The Python number 0 makes
            this `scale_by_lr`.

    Raises:
        ValueError: if one of them is a negative number; from `chain`, if a learning rate follows.

    Paper: Zhuang, Liu, Cutkosky, Orabona, "Understanding AdamW through Proximal Methods and
    Scale-Freeness", https://arxiv.org/abs/2202.00089.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.proximal_step(lr=1.0, weight_decay=1.0)
        >>> w = torch.tensor([8.0])
        >>> u, state = tx.update(torch.tensor([2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, u)
        tensor([3.])
    """

    def scalars(t, *, lr, weight_decay):
        whole = 1 + lr * weight_decay
        return -lr / whole, lr * weight_decay / whole

    return _shrinking("proximal_step", scalars, weight_decay, lr=lr)


@factory
def decay_after_step(weight_decay: numeric.Hyper) -> Leafwise:
    """Decay the result of a step: p + u becomes (1 − weight_decay) (p + u).

    Put it after `scale_by_lr`; the learning rate does not multiply it. `add_decayed_weights(...,
    independent=True)` decays the weights before the step instead.

    Args:
        weight_decay: the share, ≥ 0: a number, a 0-dim tensor, or a schedule. The Python number 0
            makes this `identity`.

    Raises:
        ValueError: if weight_decay is a negative number; from `chain`, if a learning rate follows.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.scale_by_lr(1.0), fo.decay_after_step(0.5))
        >>> w = torch.tensor([8.0])
        >>> u, state = tx.update(torch.tensor([2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, u)
        tensor([3.])
    """

    def scalars(t, *, weight_decay):
        return 1 - weight_decay, weight_decay

    return _shrinking("decay_after_step", scalars, weight_decay)


@factory
def step_then_decay(lr: numeric.Hyper, weight_decay: numeric.Hyper) -> Leafwise:
    """Step by −lr u and then decay: p becomes (1 − lr λ) (p − lr u).

    Use it instead of `scale_by_lr`. `add_decayed_weights` before `scale_by_lr` decays the weights
    before the step: p − lr (u + λ p).

    Args:
        lr: learning rate, ≥ 0: a number, a 0-dim tensor, or a schedule.
        weight_decay: λ, ≥ 0: a number, a 0-dim tensor, or a schedule. The Python number 0 makes
            this `scale_by_lr`.

    Raises:
        ValueError: if one of them is a negative number; from `chain`, if a learning rate follows.

    Source: https://github.com/nikhilvyas/SOAP, which decays in this way.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.step_then_decay(lr=0.5, weight_decay=1.0)
        >>> w = torch.tensor([8.0])
        >>> u, state = tx.update(torch.tensor([4.0]), tx.init(w), w)
        >>> fo.apply_updates(w, u)
        tensor([3.])
    """

    def scalars(t, *, lr, weight_decay):
        lost = lr * weight_decay
        return -lr * (1 - lost), lost

    return _shrinking("step_then_decay", scalars, weight_decay, lr=lr)


def _shrinking(
    name: str, scalars: Any, weight_decay: numeric.Hyper, **lr: numeric.Hyper
) -> Leafwise:
    """A transform of the step as a whole, with a learning rate or after it."""
    for rate in lr.values():
        check_lr(rate)
    numeric.check_range(None, "of 0 or more", weight_decay=weight_decay)
    if numeric.is_zero(weight_decay):
        return scale_by_lr(**lr) if lr else identity()
    hyper, runs = {**lr, "weight_decay": weight_decay}, Runs(after="lr")
    return leafwise(None, _shrunk, scalars, hyper=hyper, runs=runs, name=name)


def _shrunk(u: Tensor, slots: Any, p: Tensor, factor: Any, lost: Any) -> tuple[Tensor, Any]:
    """A step with weight decay."""
    return factor * u - lost * p, slots
