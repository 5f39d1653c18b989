"""MARS: AdamW with variance reduction.

Yuan, Liu, Wu, Zhou, Gu, "MARS: Unleashing the Power of Variance Reduction for Training Large
Models", https://arxiv.org/abs/2411.10438, in its approximate version, as in the authors' code,
https://github.com/AGI-Arena/MARS.
"""

from __future__ import annotations

from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, adamw, check_betas, scale_by_adam
from functional_optim.combinators.partition import partition
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.transforms.descent import descent
from functional_optim.transforms.variance_reduction import variance_reduction


def _by_dimensions(path: str, p: Tensor) -> str:
    if p.is_complex():
        raise TypeError(
            "mars gives matrices and other tensors different rules, and a complex parameter is an "
            "array of pairs; pass optimize_1d=True, which applies one rule to all tensors."
        )
    return "matrix" if p.dim() == 2 else "other"


@factory
def mars(
    lr: numeric.Hyper = 3e-3,
    betas: Betas = (0.95, 0.99),
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.0,
    gamma: numeric.Hyper = 0.025,
    optimize_1d: bool = False,
    lr_1d: numeric.Hyper = 3e-3,
    betas_1d: Betas = (0.9, 0.95),
    weight_decay_1d: numeric.Hyper = 0.1,
) -> GradientTransformation:
    """MARS-AdamW, with the arguments and defaults of the authors' code.

    It applies to matrices, as in their code. **All other tensors, also kernels of convolutions, get
    AdamW** with the hyperparameters that end in `_1d`, and are decayed even if `weight_decay` is 0.

    Args:
        lr: learning rate of matrices, ≥ 0.
        betas: decay rates of the averages of the corrected gradient and of its square, each in
            [0, 1). The first is also that of the correction.
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: decoupled decay of matrices, ≥ 0.
        gamma: γ, strength of the correction of gradients, ≥ 0.
        optimize_1d: treat all tensors like matrices; hyperparameters that end in `_1d` are then
            ignored.
        lr_1d: learning rate of all tensors that are not matrices, ≥ 0.
        betas_1d: AdamW's betas for them, each in [0, 1).
        weight_decay_1d: their decay, ≥ 0.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `previous_grad` of matrices, `exp_avg` and `exp_avg_sq`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: if betas is not a pair; from init, for a complex parameter without `optimize_1d`.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.mars(lr=0.1, lr_1d=0.2, weight_decay_1d=0.0)
        >>> params = {"weight": torch.ones(1, 2), "bias": torch.ones(2)}
        >>> grads = {"weight": torch.tensor([[3.0, -2.0]]), "bias": torch.tensor([3.0, -2.0])}
        >>> updates, state = tx.update(grads, tx.init(params), params)
        >>> fo.apply_updates(params, updates)
        {'weight': tensor([[0.9000, 1.1000]]), 'bias': tensor([0.8000, 1.2000])}
    """
    b1, _ = check_betas(betas)
    numeric.pair(betas_1d, "betas_1d", "(0.9, 0.95)")
    adapt = chain(variance_reduction(gamma, b1), scale_by_adam(betas, eps))
    correct = descent(adapt, lr, weight_decay, decoupled=True)
    if optimize_1d:
        return correct
    other = adamw(lr_1d, betas_1d, eps, weight_decay_1d)
    return partition({"matrix": correct, "other": other}, _by_dimensions)
