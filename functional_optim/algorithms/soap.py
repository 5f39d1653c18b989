"""SOAP: Adam in the eigenbasis of Shampoo.

Vyas, Morwani, Zhao, Kwun, Shapira, Brandfonbrener, Janson, Kakade, "SOAP: Improving and Stabilizing
Shampoo using Adam", https://arxiv.org/abs/2409.11321, Algorithm 3, as in the authors' code,
https://github.com/nikhilvyas/SOAP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, check_betas, scale_by_adam
from functional_optim.combinators.as_matrix import Views, seen
from functional_optim.core.base import GradientTransformation
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, identity, leafwise
from functional_optim.core.rule import Runs
from functional_optim.core.storage import Storage
from functional_optim.core.views import TENSORS
from functional_optim.transforms.bases import Basis, Refresh, shampoo_basis
from functional_optim.transforms.in_basis import in_basis
from functional_optim.transforms.scaling import after_the_first, scale_by_schedule
from functional_optim.transforms.weight_decay import step_then_decay


@factory
def scale_by_soap(
    betas: Betas = (0.95, 0.95),
    eps: numeric.Hyper = 1e-8,
    precondition_frequency: Any = 10,
    max_precond_dim: int = 10000,
    normalize_grads: bool = False,
    correct_bias: bool = True,
    *,
    shampoo_beta: numeric.Hyper | None = None,
    merge_dims: bool = False,
    refresh: Refresh = "together",
) -> Leafwise:
    """Adam in the eigenbases of the averages of G Gᵀ and Gᵀ G. The first step returns zeros.

    Args:
        betas: decay rates of the averages of the gradient and of its square in the basis, each in
            [0, 1).
        eps: added to the root of the second moment before its bias is corrected, ≥ 0.
        precondition_frequency: number of steps between updates of the bases, ≥ 1.
        max_precond_dim: a side longer than this has the identity as its basis.
        normalize_grads: divide the update of each tensor by its root mean square.
        correct_bias: multiply by √(1 − β₂ᵗ) / (1 − β₁ᵗ), where t counts from the second step on.
        shampoo_beta: decay rate of the averages of G Gᵀ and Gᵀ G, in [0, 1). None: β₂.
        merge_dims: merge adjacent dimensions of a kernel while their product is at most
            max_precond_dim. False: each has a separate basis.
        refresh: "together": all bases are updated in the same step; "spread": some in each.

        Floats may also be 0-dim tensors or schedules.

    State: `exp_avg` and `exp_avg_sq`, like the parameters; `left_factor`, `left_basis`,
    `right_factor` and `right_basis`, see `shampoo_basis`.

    Raises:
        ValueError: for hyperparameters out of range; from init, for a parameter of three dimensions
            that `as_matrix` does not describe, or of more than five.
        TypeError: if betas is not a pair; from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_soap()
        >>> w, g = torch.zeros(2, 2), torch.diag(torch.tensor([100.0, 1.0]))
        >>> u, state = tx.update(g, tx.init(w), w)
        >>> torch.allclose(tx.update(g, state, w)[0], torch.eye(2), atol=1e-3)
        True
    """
    b1, b2 = check_betas(betas)
    beta = b2 if shampoo_beta is None else shampoo_beta
    basis = shampoo_basis(
        beta, precondition_frequency, max_precond_dim, merge_dims=merge_dims, refresh=refresh
    )

    def correction(count: Any) -> Any:
        t, n = count + 1, numeric.maximum(count, 1.0)
        a, b = numeric.at(b1, t), numeric.at(b2, t)
        return numeric.sqrt(1 - numeric.power(b, n)) / (1 - numeric.power(a, n))

    turned = turned_back(basis, scale_by_adam((b1, b2), eps, debias=False), normalize_grads)
    corrected = scale_by_schedule(correction) if correct_bias else identity()
    return Leafwise((*turned.placements, *corrected.placements))


def turned_back(basis: Basis, inner: Leafwise, normalize_grads: bool) -> GradientTransformation:
    """The update of rules in a basis; normalize_grads: divided by its root mean square."""
    return chain(in_basis(basis, inner), unit_rms() if normalize_grads else identity())


def late_descent(
    adapt: GradientTransformation, lr: numeric.Hyper, weight_decay: numeric.Hyper, views: Any
) -> GradientTransformation:
    """The chain around a rule whose first step only begins its basis."""
    return seen(chain(adapt, step_then_decay(lr, weight_decay), after_the_first()), views)


def unit_rms() -> Leafwise:
    """Divide the update of each tensor, or of each matrix of a stack, by its root mean square."""

    def update(u: Tensor, slots: Any, p: Any) -> tuple[Tensor, Any]:
        square = (u * u).mean([*range(1, u.dim())], keepdim=True) if u.dim() > 1 else u * u
        return u / square.masked_fill(square == 0, 1.0).sqrt(), slots  # 0 has no derivative

    runs, storage = Runs(batched=True), Storage(view=TENSORS._replace(most=None))
    return leafwise(None, update, runs=runs, storage=storage, name="unit_rms")


@factory
def soap(
    lr: numeric.Hyper = 3e-3,
    betas: Betas = (0.95, 0.95),
    shampoo_beta: numeric.Hyper | None = None,
    eps: numeric.Hyper = 1e-8,
    weight_decay: numeric.Hyper = 0.01,
    precondition_frequency: Any = 10,
    max_precond_dim: int = 10000,
    normalize_grads: bool = False,
    correct_bias: bool = True,
    *,
    merge_dims: bool = False,
    refresh: Refresh = "together",
    views: Views | torch.nn.Module | None = None,
) -> GradientTransformation:
    """SOAP, with the arguments and defaults of the authors' code. The first step does not change
    the parameters.

    Vectors and scalars get Adam. Each dimension of the kernel of a convolution has a separate
    basis. Use `as_matrix` to describe stacks of matrices and fused projections.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the averages of the gradient and of its square in the basis, each in
            [0, 1).
        shampoo_beta: decay rate of the averages of G Gᵀ and Gᵀ G, in [0, 1). None: β₂. The authors'
            code uses −1 instead of None.
        eps: added to the root of the second moment before its bias is corrected, ≥ 0.
        weight_decay: decay coefficient, ≥ 0; after the step, `lr * weight_decay` of each weight is
            subtracted.
        precondition_frequency: number of steps between updates of the bases, ≥ 1.
        max_precond_dim: a side longer than this has the identity as its basis.
        normalize_grads: divide the update of each tensor by its root mean square. According to the
            authors, it helps if bases are updated every 100 steps, and hurts at 10.
        correct_bias: multiply by √(1 − β₂ᵗ) / (1 − β₁ᵗ), where t counts from the second step on.
        merge_dims: merge adjacent dimensions of a kernel while their product is at most
            max_precond_dim, so that small kernels are matrices.
        refresh: "together": all bases are updated in the same step; "spread": some in each step, so
            that all steps take similar times.
        views: descriptions of stacks of matrices, kernels and fused projections: from path patterns
            to arguments of `as_matrix`, or the model. None: parameters with two dimensions are
            matrices, those with four and five are kernels.

        Floats may also be 0-dim tensors or schedules.

    State: `exp_avg` and `exp_avg_sq`, like the parameters; `left_factor`, `left_basis`,
    `right_factor` and `right_basis`, see `shampoo_basis`.

    Raises:
        ValueError: for hyperparameters out of range; from init, for a parameter of three dimensions
            that `as_matrix` does not describe, or of more than five.
        TypeError: if betas is not a pair; from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.soap(lr=0.1, weight_decay=0.0)
        >>> w, g = torch.ones(2, 2), torch.diag(torch.tensor([100.0, 1.0]))
        >>> state = tx.init(w)
        >>> for _ in range(2):
        ...     updates, state = tx.update(g, state, w)
        ...     w = fo.apply_updates(w, updates)
        >>> w
        tensor([[0.9000, 1.0000],
                [1.0000, 0.9000]])
    """
    adapt = scale_by_soap(
        betas, eps, precondition_frequency, max_precond_dim, normalize_grads, correct_bias,
        shampoo_beta=shampoo_beta, merge_dims=merge_dims, refresh=refresh,
    )  # fmt: skip
    return late_descent(adapt, lr, weight_decay, views)
