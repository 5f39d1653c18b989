"""Averages over time."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_optim import numeric
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.rule import Runs
from functional_optim.core.storage import Storage, wide_dtype
from functional_optim.transforms.rules import zeros


class ParamsEmaSlots(NamedTuple):
    params_ema: Tensor
    """Average of the parameter, like p; float32 for half types. It starts from p."""


@factory
def params_ema(decay: numeric.Hyper) -> Leafwise:
    """Keep an exponential moving average of the parameters after each update.

    The updates pass unchanged. It reads p + u, so put it at the end of a chain.

    Args:
        decay: weight of the old average, in [0, 1]: a number, a 0-dim tensor, or a schedule. 0.999
            remembers about a thousand steps.

    State: `params_ema`, like the parameters (float32 for half types, in which an average would stop
    changing), equal to them before the first step. It equals
    `torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))` that is
    updated once before training and after every step, if all parameters have gradients: one
    without a gradient keeps its average.

    Raises:
        ValueError: if decay is a number outside [0, 1]; from `chain`, if a rule follows that
            changes updates.
        RuntimeError: from update, for a sparse gradient.

    Paper: Polyak, Juditsky, "Acceleration of stochastic approximation by averaging",
    https://doi.org/10.1137/0330046.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.scale_by_lr(1.0), fo.params_ema(0.75))
        >>> w = torch.tensor([4.0])
        >>> u, state = tx.update(torch.tensor([4.0]), tx.init(w), w)
        >>> state.slots["params_ema"]
        tensor([3.])
    """
    numeric.check_range("params_ema", "in [0, 1]", decay=decay)

    def init(p: Tensor) -> ParamsEmaSlots:
        return ParamsEmaSlots(p.to(wide_dtype(p), copy=True))

    def scalars(t, *, decay):
        return (1 - decay,)

    def update(u: Tensor, slots: ParamsEmaSlots, p: Tensor, a: Any) -> tuple[Tensor, Any]:
        return u, ParamsEmaSlots(slots.params_ema.lerp(p, a))

    runs, storage = Runs(after="step", dense_only=True), Storage(weights=("params_ema",))
    return leafwise(
        init, update, scalars, hyper={"decay": decay}, runs=runs, storage=storage, name="params_ema"
    )


class EmaSlots(NamedTuple):
    ema: Tensor
    """Average of the updates, like p; it starts from zero."""


@factory
def ema(decay: numeric.Hyper, debias: bool = True) -> Leafwise:
    """Replace the updates by their exponential moving average: a ← decay · a + (1 − decay) · u.

    Args:
        decay: weight of the old average, in [0, 1): a number, a 0-dim tensor, or a schedule.
        debias: divide by 1 − decayᵗ, as Adam does, so that the average does not start near zero.
            True as in optax.

    State: `ema`, like the parameters, not debiased.

    Raises:
        ValueError: if decay is a number outside [0, 1).

    Paper: Kingma, Ba, "Adam: A Method for Stochastic Optimization",
    https://arxiv.org/abs/1412.6980, section 3.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.ema(0.5)
        >>> w = torch.zeros(1)
        >>> u, state = tx.update(torch.tensor([2.0]), tx.init(w), w)
        >>> u, state.slots["ema"]
        (tensor([2.]), tensor([1.]))
    """
    numeric.check_range("ema", "in [0, 1)", decay=decay)

    init = zeros(EmaSlots)

    def scalars(t, *, decay):
        return 1 - decay, (1 - decay**t if debias else 1.0)

    def update(u: Tensor, slots: EmaSlots, p: Tensor, a: Any, c: Any) -> tuple[Tensor, EmaSlots]:
        average = slots.ema.lerp(u, a)
        return (average / c if debias else average), EmaSlots(average)

    return leafwise(init, update, scalars, hyper={"decay": decay}, name="ema")
