"""KL-Shampoo and KL-SOAP: Shampoo with factors that depend on each other.

Lin, Lowe, Dangel, Eschenhagen, Xu, Grosse, "Understanding and Improving Shampoo and SOAP via
Kullback-Leibler Minimization", https://arxiv.org/abs/2509.03378, as in the authors' code,
https://github.com/yorkerlin/KL-Methods.
"""

from __future__ import annotations

from typing import Any

import torch

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, check_betas, scale_by_adam
from functional_optim.algorithms.muon import matrix_momentum
from functional_optim.algorithms.soap import late_descent, turned_back
from functional_optim.combinators.as_matrix import Views
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.transforms.bases import Refresh, kl_basis


@factory
def kl_soap(
    lr: numeric.Hyper = 1e-4,
    betas: Betas = (0.9, 0.98),
    shampoo_beta: numeric.Hyper | None = None,
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.01,
    precondition_frequency: Any = 10,
    normalize_grads: bool = False,
    init_factor: numeric.Hyper = 0.1,
    max_clamp_value: int | None = 4000,
    *,
    refresh: Refresh = "together",
    views: Views | torch.nn.Module | None = None,
) -> GradientTransformation:
    """KL-SOAP: Adam in the basis of KL-Shampoo, with the defaults of the authors' code.

    Accepts matrices and kernels: use `partition` to assign other parameters to another rule. The
    first step does not change the parameters.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the averages of the gradient and of its square in the basis, each in
            [0, 1). Their bias is not corrected.
        shampoo_beta: decay rate of the averages that make the basis, in [0, 1). None: β₂, which is
            −1 in the authors' code.
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: decay coefficient, ≥ 0; after the step, `lr * weight_decay` of each weight is
            subtracted.
        precondition_frequency: number of steps between renewals of the bases, ≥ 1.
        normalize_grads: divide the update of each tensor by its root mean square.
        init_factor: the first eigenvalues, > 0.
        max_clamp_value: 1 / √λ is at most max(10, min(d, max_clamp_value)) for a side of length d.
            None: no bound.
        refresh: "together": renew all bases in the same step; "spread": some in each step.
        views: descriptions of stacks of matrices, kernels and fused projections: from path patterns
            to arguments of `as_matrix`, or the model. None: parameters with two dimensions are
            matrices, those with four and five are kernels.

        Floats may also be 0-dim tensors or schedules.

    State: `exp_avg` and `exp_avg_sq`, like the parameters; that of `kl_basis`.

    Raises:
        ValueError: for hyperparameters out of range; from init, for a parameter with fewer than two
            dimensions, or with three that `as_matrix` does not describe.
        TypeError: if betas is not a pair; from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.kl_soap(lr=0.1, betas=(0.0, 0.0), weight_decay=0.0)
        >>> w, g = torch.ones(2, 2), torch.diag(torch.tensor([100.0, 1.0]))
        >>> state = tx.init(w)
        >>> for _ in range(2):
        ...     updates, state = tx.update(g, state, w)
        ...     w = fo.apply_updates(w, updates)
        >>> w
        tensor([[0.9000, 1.0000],
                [1.0000, 0.9000]])
    """
    b1, b2 = check_betas(betas)
    beta = b2 if shampoo_beta is None else shampoo_beta
    basis = kl_basis(beta, precondition_frequency, init_factor, max_clamp_value, refresh=refresh)
    adapt = turned_back(basis, scale_by_adam((b1, b2), eps, debias=False), normalize_grads)
    return late_descent(adapt, lr, weight_decay, views)


@factory
def kl_shampoo(
    lr: numeric.Hyper = 1e-4,
    momentum: numeric.Hyper = 0.9,
    shampoo_beta: numeric.Hyper = 0.98,
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.01,
    precondition_frequency: Any = 10,
    normalize_grads: bool = False,
    init_factor: numeric.Hyper = 0.1,
    max_clamp_value: int | None = 4000,
    *,
    refresh: Refresh = "together",
    views: Views | torch.nn.Module | None = None,
) -> GradientTransformation:
    """KL-Shampoo: momentum, divided by the roots of two factors, with the authors' defaults.

    It has no second moment in addition to the factors. Accepts matrices and kernels: use
    `partition` to assign other parameters to another rule. The first step does not change the
    parameters.

    Args:
        lr: learning rate, ≥ 0.
        momentum: decay rate of the average gradient, in [0, 1); the first of the authors' `betas`.
            Its bias is not corrected.
        shampoo_beta: decay rate of the factors, in [0, 1); the second of the authors' `betas`.
        eps: S becomes S / (1 + ε S), where S has the elements 1 / √(λ_L λ_R), ≥ 0.
        weight_decay: decay coefficient, ≥ 0; after the step, `lr * weight_decay` of each weight is
            subtracted.
        precondition_frequency: number of steps between renewals of the bases, ≥ 1.
        normalize_grads: divide the update of each tensor by its root mean square.
        init_factor: the first eigenvalues, > 0.
        max_clamp_value: 1 / √λ is at most max(10, min(d, max_clamp_value)) for a side of length d.
            None: no bound.
        refresh: "together": renew all bases in the same step; "spread": some in each step.
        views: descriptions of stacks of matrices, kernels and fused projections: from path patterns
            to arguments of `as_matrix`, or the model. None: parameters with two dimensions are
            matrices, those with four and five are kernels.

        Floats may also be 0-dim tensors or schedules.

    State: `momentum_buffer`, like the parameters; that of `kl_basis`.

    Raises:
        ValueError: for hyperparameters out of range; from init, for a parameter with fewer than two
            dimensions, or with three that `as_matrix` does not describe.
        TypeError: from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.kl_shampoo(lr=0.1, momentum=0.0, weight_decay=0.0, init_factor=1.0)
        >>> w, g = torch.ones(2, 2), torch.diag(torch.tensor([2.0, 1.0]))
        >>> state = tx.init(w)
        >>> for _ in range(2):
        ...     updates, state = tx.update(g, state, w)
        ...     w = fo.apply_updates(w, updates)
        >>> w
        tensor([[0.8000, 1.0000],
                [1.0000, 0.9000]])
    """
    numeric.check_range(None, "in [0, 1)", momentum=momentum)
    basis = kl_basis(
        shampoo_beta, precondition_frequency, init_factor, max_clamp_value, eps, refresh=refresh
    )
    average = matrix_momentum("kl_shampoo", momentum, nesterov=False)
    return late_descent(turned_back(basis, average, normalize_grads), lr, weight_decay, views)
