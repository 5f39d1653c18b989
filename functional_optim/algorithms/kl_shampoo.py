"""KL-Shampoo and KL-SOAP: Shampoo's factors, estimated from each other.

Lin, Lowe, Dangel, Eschenhagen, Xu, Grosse, "Understanding and Improving Shampoo and SOAP via
Kullback-Leibler Minimization", https://arxiv.org/abs/2509.03378, as in the authors' code,
https://github.com/yorkerlin/KL-Methods.
"""

from __future__ import annotations

from typing import Any

import torch

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, check_betas
from functional_optim.algorithms.muon import matrix_momentum
from functional_optim.algorithms.soap import adam_in, unit_rms
from functional_optim.combinators.as_matrix import Views, seen
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import identity
from functional_optim.transforms import in_basis, kl_basis, step_then_decay
from functional_optim.transforms.bases import Refresh
from functional_optim.transforms.scaling import after_the_first


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

    For matrices and kernels: give all else another rule, with `partition`. The first step moves
    nothing.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the averages of the gradient and of its square in the basis, each in
            [0, 1). Their bias is not corrected.
        shampoo_beta: decay rate of the averages that make the basis, in [0, 1). None: β₂. The
            authors' code has −1 for that.
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: decay coefficient, ≥ 0; after the step, `lr * weight_decay` of each weight is
            taken away.
        precondition_frequency: every how many steps the bases are renewed, ≥ 1.
        normalize_grads: divide the update of each tensor by its root mean square.
        init_factor: the first eigenvalues, > 0.
        max_clamp_value: 1 / √λ is at most the length d of its side, or this if it is less, or 10 if
            d is less than that. None: there is no bound.
        refresh: "together": all bases are renewed in the same step; "spread": some in each step.
        views: which parameters are stacks of matrices, kernels or fused projections: from path
            patterns to arguments of `as_matrix`, or the model. None: those of two dimensions are
            matrices, and those of four and five are kernels.

        Floats may also be 0-dim tensors or schedules.

    State: `exp_avg` and `exp_avg_sq`, like the parameters; that of `kl_basis`.

    Raises:
        ValueError: for numbers out of range; from init, for a parameter of less than two
            dimensions, or of three of which `as_matrix` does not say what it is.
        TypeError: if betas is no pair; from init, for a complex parameter.

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
    adapt = adam_in(basis, (b1, b2), eps, normalize_grads)
    return seen(chain(adapt, step_then_decay(lr, weight_decay), after_the_first()), views)


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

    There is no second moment beside the factors. For matrices and kernels: give all else another
    rule, with `partition`. The first step moves nothing.

    Args:
        lr: learning rate, ≥ 0.
        momentum: decay rate of the average gradient, in [0, 1); the first of the authors' `betas`.
            Its bias is not corrected.
        shampoo_beta: decay rate of the factors, in [0, 1); the second of the authors' `betas`.
        eps: S becomes S / (1 + ε S), where S has the elements 1 / √(λ_L λ_R), ≥ 0.
        weight_decay: decay coefficient, ≥ 0; after the step, `lr * weight_decay` of each weight is
            taken away.
        precondition_frequency: every how many steps the bases are renewed, ≥ 1.
        normalize_grads: divide the update of each tensor by its root mean square.
        init_factor: the first eigenvalues, > 0.
        max_clamp_value: 1 / √λ is at most the length d of its side, or this if it is less, or 10 if
            d is less than that. None: there is no bound.
        refresh: "together": all bases are renewed in the same step; "spread": some in each step.
        views: which parameters are stacks of matrices, kernels or fused projections: from path
            patterns to arguments of `as_matrix`, or the model. None: those of two dimensions are
            matrices, and those of four and five are kernels.

        Floats may also be 0-dim tensors or schedules.

    State: `momentum_buffer`, like the parameters; that of `kl_basis`.

    Raises:
        ValueError: for numbers out of range; from init, for a parameter of less than two
            dimensions, or of three of which `as_matrix` does not say what it is.
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
    numeric.check(lambda x: 0.0 <= x < 1.0, momentum, "Invalid momentum value: {}")
    basis = kl_basis(
        shampoo_beta, precondition_frequency, init_factor, max_clamp_value, eps, refresh=refresh
    )
    return seen(
        chain(
            in_basis(basis, matrix_momentum("kl_shampoo", momentum, nesterov=False)),
            unit_rms() if normalize_grads else identity(),
            step_then_decay(lr, weight_decay),
            after_the_first(),
        ),
        views,
    )
