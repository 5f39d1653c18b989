"""CAME: Adafactor with momentum, and small steps where updates differ from the momentum.

Luo, Ren, Zheng, Jiang, Jiang, You, "CAME: Confidence-guided Adaptive Memory Efficient
Optimization", https://arxiv.org/abs/2307.02047, Algorithm 2, as in
https://github.com/yangluo7/CAME/blob/master/came_pytorch/CAME.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adafactor import inverse_root, mean, rms
from functional_optim.algorithms.adam import check_each_beta
from functional_optim.core.base import GradientTransformation, real_only
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.storage import Storage
from functional_optim.transforms.descent import descent


class CameSlots(NamedTuple):
    exp_avg: Tensor
    """Average m of the updates, like p."""
    exp_avg_sq_row: Tensor | None
    """Average R of the rows' means of g², (…, m, 1); None for fewer than two dimensions."""
    exp_avg_sq_col: Tensor | None
    """Average C of the columns' means of g², (…, 1, n); None for fewer than two dimensions."""
    exp_avg_res_row: Tensor | None
    """The same as R of the updates' squared distances to m."""
    exp_avg_res_col: Tensor | None
    """The same as C of these."""
    exp_avg_sq: Tensor | None
    """Average V of g², like p; None for two or more dimensions."""


@factory
def scale_by_came(
    betas: tuple[numeric.Hyper, numeric.Hyper, numeric.Hyper] = (0.9, 0.999, 0.9999),
    eps: tuple[numeric.Hyper, numeric.Hyper] = (1e-30, 1e-16),
    clip_threshold: numeric.Hyper = 1.0,
) -> Leafwise:
    """The average of Adafactor's updates, divided by the root of their average squared distance.

    Vectors and scalars are not divided by the distance.

    Args:
        betas: decay rates of the averages of updates, of g² and of squared distances, each in
            [0, 1).
        eps: added to g² and to squared distances, each > 0.
        clip_threshold: largest root mean square of an update before it is averaged, > 0.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are the authors'.

    State: `exp_avg`, like the parameters; of those with two or more dimensions `exp_avg_sq_row`,
    `exp_avg_sq_col`, `exp_avg_res_row` and `exp_avg_res_col`, of others `exp_avg_sq`; see
    `CameSlots`.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas are not three numbers or eps two; from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_came()
        >>> state = tx.init({"w": torch.zeros(3, 2), "b": torch.zeros(2)})
        >>> state.slots["exp_avg_res_row"]["w"].shape, state.slots["exp_avg_res_row"]["b"]
        (torch.Size([3, 1]), None)
    """
    betas = numeric.triple(betas, "betas", "(0.9, 0.999, 0.9999)")
    check_each_beta(betas)
    eps = numeric.pair(eps, "eps", "(1e-30, 1e-16)")
    for i, x in enumerate(eps):
        numeric.check(
            lambda x: x > 0.0, x, f"scale_by_came needs a positive eps at index {i}, but got {{}}."
        )
    numeric.check_range("scale_by_came", "positive", clip_threshold=clip_threshold)
    real = real_only("scale_by_came")

    def init(p: Tensor) -> CameSlots:
        real(p)
        m = torch.zeros_like(p)
        if p.dim() < 2:
            return CameSlots(m, None, None, None, None, torch.zeros_like(p))
        # averaged, so that shards and strides are those of later steps
        R, C, S, D = [mean(torch.zeros_like(p), dim) for dim in (-1, -2, -1, -2)]
        return CameSlots(m, R, C, S, D, None)

    def scalars(t, *, betas, eps, clip_threshold):
        (b1, b2, b3), (eps1, eps2) = betas, eps
        return 1 - b1, 1 - b2, 1 - b3, eps1, eps2, clip_threshold

    def update(g: Tensor, slots: CameSlots, p: Tensor, *numbers: Any) -> tuple[Tensor, CameSlots]:
        a1, a2, a3, eps1, eps2, threshold = numbers
        m, R, C, S, D, v = slots
        square = g * g + eps1
        if R is not None and C is not None:
            R = R.lerp(mean(square, -1), a2)
            C = C.lerp(mean(square, -2), a2)
            U = g * inverse_root(R, C)
        else:
            assert v is not None
            v = v.lerp(square, a2)
            U = g * v.rsqrt()
        U = U * (rms(U) / threshold).clamp(min=1.0).reciprocal()
        m = m.lerp(U, a1)
        if S is None or D is None:
            return m, CameSlots(m, R, C, S, D, v)
        distance = (U - m) * (U - m) + eps2
        S = S.lerp(mean(distance, -1), a3)
        D = D.lerp(mean(distance, -2), a3)
        return m * inverse_root(S, D), CameSlots(m, R, C, S, D, v)

    hyper = {"betas": betas, "eps": eps, "clip_threshold": clip_threshold}
    storage = Storage(nonnegative=CameSlots._fields[1:])
    return leafwise(init, update, scalars, hyper=hyper, storage=storage, name="scale_by_came")


@factory
def came(
    lr: numeric.Hyper = 2e-4,
    betas: tuple[numeric.Hyper, numeric.Hyper, numeric.Hyper] = (0.9, 0.999, 0.9999),
    eps: tuple[numeric.Hyper, numeric.Hyper] = (1e-30, 1e-16),
    clip_threshold: numeric.Hyper = 1.0,
    weight_decay: numeric.Hyper = 0.0,
    *,
    maximize: bool = False,
) -> GradientTransformation:
    """CAME, with the arguments and defaults of the authors' code.

    Args:
        lr: learning rate, ≥ 0. The authors have no default; 2e-4 is that of their examples.
        betas: decay rates of the averages of updates, of g² and of squared distances, each in
            [0, 1).
        eps: added to g² and to squared distances, each > 0.
        clip_threshold: largest root mean square of an update before it is averaged, > 0.
        weight_decay: decoupled decay, ≥ 0.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `exp_avg`, like the parameters; of those with two or more dimensions `exp_avg_sq_row`
    (…, m, 1), `exp_avg_sq_col` (…, 1, n), `exp_avg_res_row` and `exp_avg_res_col`, of others
    `exp_avg_sq`.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas are not three numbers or eps two; from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.came(lr=0.1)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -2.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.9900, 1.0100])
    """
    adapt = scale_by_came(betas, eps, clip_threshold)
    return descent(adapt, lr, weight_decay, decoupled=True, maximize=maximize)
