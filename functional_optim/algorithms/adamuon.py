"""AdaMuon: Muon with a second moment of the orthogonal matrix, element by element.

Si, Zhang, Shen, "AdaMuon: Adaptive Muon Optimizer", https://arxiv.org/abs/2507.11005, as in
https://github.com/Chongjie-Si/AdaMuon/blob/main/gpt2/models/optimizers/adamuon.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.muon import Nesterov, matrix_chain, matrix_momentum
from functional_optim.algorithms.normuon import frobenius
from functional_optim.combinators.as_matrix import Views, seen
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.storage import Storage
from functional_optim.linalg import Coefficients
from functional_optim.transforms.normalizing import sign
from functional_optim.transforms.orthogonal import matrix_rule, polar_factor
from functional_optim.transforms.rules import root, zeros


class AdaMuonSlots(NamedTuple):
    v_buffer: Tensor
    """Average v of the orthogonal matrices' squares, like p."""


@factory
def scale_by_adamuon(
    momentum: numeric.Hyper = 0.95,
    eps: numeric.Hyper = 1e-8,
    nesterov: Nesterov = True,
    ns_coefficients: Coefficients = "jordan",
    ns_steps: int = 5,
    *,
    ns_eps: float = 1e-7,
    ns_dtype: torch.dtype = torch.bfloat16,
) -> Leafwise:
    """The orthogonalized sign of the momentum, divided by the root of its average square.

    A factor then scales the root mean square of the matrix to 0.2, about that of AdamW's updates.

    Args:
        momentum: decay rate μ of the momentum and of the average square, in [0, 1).
        eps: added to the root of the average square and to the norm after the division, ≥ 0.
        nesterov: True, or "classic": take the sign of the momentum after one more step with the
            same gradient; "grokfast": of g + m; False: of m.
        ns_coefficients: of the Newton–Schulz quintic, see `orthogonalize`.
        ns_steps: number of its repetitions, below 100.
        ns_eps: lower bound of the norm in its division.
        ns_dtype: dtype of its products: torch.bfloat16, float32, or float64.

        `momentum` and `eps` may also be 0-dim tensors or schedules. The defaults are the authors'.

    State: `momentum_buffer` and `v_buffer`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range, or an unknown option; from init, for a
            parameter with fewer than two dimensions, or with three that `as_matrix` does not
            describe.
        TypeError: for an unsupported dtype; from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_adamuon()
        >>> w = torch.zeros(2, 3)
        >>> u, state = tx.update(torch.randn(2, 3), tx.init(w), w)
        >>> u.square().mean().sqrt()
        tensor(0.2000)
    """
    numeric.check_range("scale_by_adamuon", "in [0, 1)", momentum=momentum)
    numeric.check_range("scale_by_adamuon", "of 0 or more", eps=eps)
    polar = polar_factor("scale_by_adamuon", ns_coefficients, ns_eps, ns_steps, ns_dtype)

    def scalars(t, *, momentum, eps):
        return 1 - momentum, eps

    def update(S: Tensor, slots: AdaMuonSlots, p: Any, *numbers: Any) -> tuple[Tensor, Any]:
        a, eps = numbers
        O = polar(S)  # noqa: E741
        v = slots.v_buffer.lerp(O * O, a)
        U = O / (root(v) + eps)
        size = 0.2 * math.sqrt(S.shape[-2] * S.shape[-1])
        return U * (size / (frobenius(U) + eps)), AdaMuonSlots(v)

    init, hyper = zeros(AdaMuonSlots), {"momentum": momentum, "eps": eps}
    storage = Storage(nonnegative=AdaMuonSlots._fields)
    second = matrix_rule("scale_by_adamuon", init, update, scalars, hyper, storage)
    mix = matrix_momentum("scale_by_adamuon", momentum, nesterov)
    return Leafwise((*mix.placements, *sign().placements, *second.placements))


@factory
def adamuon(
    lr: numeric.Hyper = 0.02,
    weight_decay: numeric.Hyper = 0.01,
    momentum: numeric.Hyper = 0.95,
    eps: numeric.Hyper = 1e-8,
    nesterov: Nesterov = True,
    ns_coefficients: Coefficients = "jordan",
    ns_steps: int = 5,
    *,
    ns_eps: float = 1e-7,
    ns_dtype: torch.dtype = torch.bfloat16,
    views: Views | torch.nn.Module | None = None,
) -> GradientTransformation:
    """AdaMuon, with the defaults of the authors' code. For matrices of hidden layers only.

    Use another optimizer, such as `adamw`, for embeddings, heads, biases and norms. Use `as_matrix`
    to describe stacks of matrices and fused projections.

    Args:
        lr: learning rate, ≥ 0; AdamW's rate is suitable, since updates have about the same size.
        weight_decay: decoupled decay, ≥ 0.
        momentum: decay rate μ of the momentum and of the average square, in [0, 1).
        eps: added to the root of the average square and to the norm after the division, ≥ 0.
        nesterov: True, or "classic": take the sign of the momentum after one more step with the
            same gradient; "grokfast": of g + m; False: of m.
        ns_coefficients: of the Newton–Schulz quintic, see `orthogonalize`.
        ns_steps: number of its repetitions, below 100.
        ns_eps: lower bound of the norm in its division.
        ns_dtype: dtype of its products: torch.bfloat16, float32, or float64.
        views: descriptions of stacks of matrices, kernels and fused projections: from path patterns
            to arguments of `as_matrix`, or the model. None: parameters with two dimensions are
            matrices, those with four and five are kernels.

    State: `momentum_buffer` and `v_buffer`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range, or an unknown option; from init, for a
            parameter with fewer than two dimensions, or with three that `as_matrix` does not
            describe.
        TypeError: for an unsupported dtype; from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.adamuon(lr=0.1, weight_decay=0.0)
        >>> w = torch.eye(2)
        >>> updates, state = tx.update(torch.tensor([[1.0, 0.0], [0.0, 5.0]]), tx.init(w), w)
        >>> bool((fo.apply_updates(w, updates).diag() < 0.98).all())
        True
    """
    adapt = scale_by_adamuon(
        momentum, eps, nesterov, ns_coefficients, ns_steps, ns_eps=ns_eps, ns_dtype=ns_dtype
    )
    return seen(matrix_chain(adapt, lr, weight_decay), views)
