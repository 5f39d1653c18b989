"""Steps from a point between the newest iterate and its average: Schedule-Free and GPA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.checkpoint.lookup import get, keys
from functional_optim.core import base
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.rule import Runs
from functional_optim.core.storage import Storage, wide_dtype


class IterateSlots(NamedTuple):
    z: Tensor
    """The newest iterate, like p; float32 for half types. It starts from p."""


class ShareCarry(NamedTuple):
    average_share: Any
    """Share μ of the average x in the parameters y = μ x + (1 − μ) z; 1 before the first step."""


class ScheduleFreeCarry(NamedTuple):
    average_share: Any
    """Share μ of the average x in the parameters y = μ x + (1 − μ) z; 1 before the first step."""
    lr_max: Any
    """The largest learning rate so far."""
    weight_sum: Any
    """Sum of the weights of all iterates in the average."""


@factory
def gpa(
    tx: base.GradientTransformation,
    train_interp_coeff: numeric.Hyper = 0.7,
    eval_interp_coeff: numeric.Hyper = 0.9967,
) -> base.GradientTransformation:
    """Generalized primal averaging: gradients are taken between an iterate and its average.

    The base steps an iterate z. Evaluate its average x ← μₓ x + (1 − μₓ) z, which `eval_params`
    returns. The parameters are y = μ_y x + (1 − μ_y) z, where gradients are taken, so the base
    decays y.

    Args:
        tx: the base, with its learning rate.
        train_interp_coeff: μ_y, share of the average in the parameters, in (0, 1]. 0.7 is the
            authors'.
        eval_interp_coeff: μₓ, share of the old average in the new one, in [0, 1]. 0.9967 is the
            authors'; it corresponds to DiLoCo with 32 local steps.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: that of tx; `average_share`, a scalar; `z`, like the parameters.

    Raises:
        TypeError: if tx is not a transformation.
        ValueError: for hyperparameters out of range.
        RuntimeError: from update, for a sparse gradient.

    Paper: Defazio et al., "Smoothing DiLoCo with Primal Averaging for Faster Training of LLMs",
    https://arxiv.org/abs/2512.17131.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.gpa(fo.sgd(1.0), train_interp_coeff=0.5, eval_interp_coeff=0.5)
        >>> w = torch.zeros(1)
        >>> u, state = tx.update(torch.tensor([-4.0]), tx.init(w), w)
        >>> w = fo.apply_updates(w, u)
        >>> state.slots["z"], fo.eval_params(state, w), w
        (tensor([4.]), tensor([2.]), tensor([3.]))
    """
    base.check_transformation("gpa", tx, "gpa(adamw())")
    numeric.check_range("gpa", "in (0, 1]", train_interp_coeff=train_interp_coeff)
    numeric.check_range("gpa", "in [0, 1]", eval_interp_coeff=eval_interp_coeff)

    def scalars(t, carry, *, train_interp_coeff, eval_interp_coeff):
        share = train_interp_coeff
        numbers = _between(carry.average_share, share, 1 - eval_interp_coeff)
        return numbers, ShareCarry(share)

    hyper = {"train_interp_coeff": train_interp_coeff, "eval_interp_coeff": eval_interp_coeff}
    return chain(tx, _averaging(scalars, ShareCarry(1), hyper, "gpa"))


@factory
def schedule_free(
    tx: base.GradientTransformation,
    lr: numeric.Hyper = 1.0,
    momentum: numeric.Hyper = 0.9,
    r: numeric.Hyper = 0.0,
    weight_lr_power: numeric.Hyper = 2.0,
) -> base.GradientTransformation:
    """Schedule-Free learning with any base: `gpa` with the mean of all iterates as the average.

    The iterate of step t has the weight tʳ · (largest learning rate so far)ᵖ in the mean.

    Args:
        tx: the base, with its learning rate. It needs no momentum.
        lr: the learning rate of tx, ≥ 0, for the weights. It has an effect only if it changes; with
            the default, all iterates have equal weights.
        momentum: share of the average in the parameters, in (0, 1]; it acts like Adam's β₁. 0.9 is
            the authors'.
        r: power of the step in the weights, ≥ 0. The authors' default: 0.
        weight_lr_power: power of the learning rate in the weights, ≥ 0. The authors' default: 2.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: that of tx; `average_share`, `lr_max`, `weight_sum`, scalars; `z`, like the parameters.

    Raises:
        TypeError: if tx is not a transformation.
        ValueError: for hyperparameters out of range.
        RuntimeError: from update, for a sparse gradient.

    Paper: Defazio et al., "The Road Less Scheduled", https://arxiv.org/abs/2405.15682.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.schedule_free(fo.rmsprop(0.1, alpha=0.5, eps=0.0), momentum=0.5)
        >>> w = torch.zeros(1)
        >>> state = tx.init(w)
        >>> for _ in range(2):
        ...     u, state = tx.update(torch.ones(1), state, w)
        ...     w = fo.apply_updates(w, u)
        >>> state.slots["z"], fo.eval_params(state, w)  # −0.1414 and −0.2569 have this mean
        (tensor([-0.2569]), tensor([-0.1992]))
    """
    base.check_transformation("schedule_free", tx, "schedule_free(sgd(1.0))")
    numeric.check_range("schedule_free", "in (0, 1]", momentum=momentum)
    numeric.check_range(
        "schedule_free", "of 0 or more", lr=lr, r=r, weight_lr_power=weight_lr_power
    )

    def scalars(t, carry, *, weight_lr, momentum, r, weight_lr_power):
        top = numeric.maximum(weight_lr, carry.lr_max)
        weight = numeric.power(t, r) * numeric.power(top, weight_lr_power)
        total = carry.weight_sum + weight
        null = total == 0
        share = numeric.where(null, 0.0, weight / numeric.where(null, 1.0, total))
        numbers = _between(carry.average_share, momentum, share)
        return numbers, ScheduleFreeCarry(momentum, top, total)

    hyper = {"weight_lr": lr, "momentum": momentum, "r": r, "weight_lr_power": weight_lr_power}
    return chain(tx, _averaging(scalars, ScheduleFreeCarry(1, 0, 0), hyper, "schedule_free"))


def eval_params(state: Any, params: Any) -> Any:
    """The average to evaluate, of parameters that `schedule_free` or `gpa` train.

    Args:
        state: of a transformation that contains one of these.
        params: the parameters of training.

    Returns:
        A tree like params. A leaf without an average is returned unchanged.

    Raises:
        ValueError: if the state has no average, or has several.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.schedule_free_sgd(lr=1.0)
        >>> w = torch.zeros(1)
        >>> state = tx.init(w)
        >>> for g in (1.0, 3.0):  # z is −1, then −4
        ...     u, state = tx.update(torch.tensor([g]), state, w)
        ...     w = fo.apply_updates(w, u)
        >>> fo.eval_params(state, w)
        tensor([-2.5000])
    """
    found = keys(state, "z"), keys(state, "average_share")
    if any(len(names) != 1 for names in found):
        listed = ", ".join([*found[0], *found[1]]) or "none"
        raise ValueError(
            "eval_params needs a state in which schedule_free or gpa occurs once, but this one has "
            f"these entries of an average: {listed}; put it around the whole transformation, e.g. "
            "schedule_free(partition(...))."
        )
    share, iterate = get(state, found[1][0]), get(state, found[0][0])
    advice = "pass the parameters that were trained with this state, and put flatten inside"
    tree.check_same(params, iterate, "params", "the average's z", advice)

    def average(y: Tensor, z: Any) -> Tensor:
        return y if z is None else to_average(y, z.to(y.device), share)

    return tree.map(average, params, iterate)


def to_average(y: Tensor, z: Tensor, share: Any) -> Tensor:
    """x, where y = share · x + (1 − share) · z."""
    return (y + (1 - 1 / _nonzero(share)) * (z - y)).to(y.dtype)


def from_average(x: Tensor, z: Tensor, share: Any) -> Tensor:
    """y = share · x + (1 − share) · z."""
    return (x + (1 - share) * (z - x)).to(x.dtype)


def _between(old: Any, new: Any, weight: Any) -> tuple[Any, ...]:
    """The scalars of a step, from the shares of the average in y before and after it.

    weight: the weight of the new iterate in the average. y' − y follows from y = μ x + (1 − μ) z,
    z' = z + u, x' = (1 − c) x + c z' and y' = μ' x' + (1 − μ') z'. If a share became 0, y is z and
    x is unknown; it restarts from z.
    """
    kept = new * (1 - weight)
    return 1 - kept / _nonzero(old), 1 - kept


def _nonzero(share: Any) -> Any:
    return numeric.where(share == 0, 1.0, share)


def _averaging(scalars: Callable[..., Any], carry: Any, hyper: Any, name: str) -> Leafwise:
    def init(p: Tensor) -> IterateSlots:
        return IterateSlots(p.to(wide_dtype(p), copy=True))

    def update(u: Tensor, slots: IterateSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, Any]:
        pull, step = numbers
        return pull * (slots.z - p) + step * u, IterateSlots(slots.z + u)

    runs, storage = Runs(after="lr", dense_only=True), Storage(weights=("z",))
    return leafwise(
        init, update, scalars, carry=carry, hyper=hyper, runs=runs, storage=storage, name=name
    )
