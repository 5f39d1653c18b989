"""SparseAdam: Adam that updates only the rows with a gradient.

Kingma, Ba, "Adam: A Method for Stochastic Optimization", https://arxiv.org/abs/1412.6980, with ε
added to the uncorrected root (section 2, last remark), as in torch.optim.
"""

from __future__ import annotations

from typing import Any

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, check_betas, scale_by_adam
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.transforms.descent import descent


@factory
def sparse_adam(
    lr: numeric.Hyper = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-8,
    maximize: bool = False,
) -> GradientTransformation:
    """Adam for sparse gradients, with torch.optim.SparseAdam's arguments and defaults.

    Every rule of this library takes sparse COO gradients lazily: it updates the rows with a
    gradient, and does not change other rows and their slots. So this is `adam` except for ε, which
    is divided by √(1 − β₂^t).

    Args:
        lr: learning rate, > 0.
        betas: decay rates of the averages of g and g², each in [0, 1).
        eps: added to the root of the uncorrected second moment, > 0.
        maximize: ascend instead of descend.

        Hyperparameters may also be 0-dim tensors or schedules.

    State: `exp_avg` and `exp_avg_sq`, like the parameters, dense.

    Raises:
        ValueError: torch.optim.SparseAdam's messages, for hyperparameters out of range.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.sparse_adam(lr=0.1)
        >>> w = torch.ones(3, 2)
        >>> g = torch.tensor([[0.0, 0.0], [3.0, -2.0], [0.0, 0.0]]).to_sparse(1)
        >>> updates, state = tx.update(g, tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([[1.0000, 1.0000],
                [0.9000, 1.1000],
                [1.0000, 1.0000]])
    """
    numeric.check(lambda x: x > 0.0, lr, "Invalid learning rate: {}")
    numeric.check_range(None, "above 0", eps=eps)
    _, b2 = check_betas(betas)

    def corrected(count: Any) -> Any:
        t = count + 1
        return numeric.divide(numeric.at(eps, t), numeric.sqrt(1 - numeric.at(b2, t) ** t))

    return descent(scale_by_adam(betas, corrected), lr, maximize=maximize)
