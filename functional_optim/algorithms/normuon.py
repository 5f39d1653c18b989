"""NorMuon: Muon with normalized rows.

Li, Liu, Liang, Chen, Zhao, "NorMuon: Making Muon more efficient and scalable",
https://arxiv.org/abs/2510.05491, as in https://github.com/zichongli5/NorMuon/blob/main/normuon.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adafactor import mean
from functional_optim.algorithms.muon import Nesterov, matrix_chain, matrix_momentum
from functional_optim.combinators.as_matrix import Views, seen
from functional_optim.core.base import GradientTransformation
from functional_optim.core.calls import check_choice
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.storage import Storage
from functional_optim.linalg import Coefficients
from functional_optim.transforms.orthogonal import (
    SCALES,
    Scale,
    matrix_rule,
    polar_factor,
    shape_factor,
)
from functional_optim.transforms.rules import root


class NorMuonSlots(NamedTuple):
    second_momentum_buffer: Tensor
    """Average v of the rows' mean squares, (m, 1)."""


@factory
def scale_by_normuon(
    momentum: numeric.Hyper = 0.95,
    beta2: numeric.Hyper = 0.95,
    eps: numeric.Hyper = 1e-10,
    nesterov: Nesterov = True,
    ns_coefficients: Coefficients = "jordan",
    ns_steps: int = 5,
    *,
    ns_eps: float = 1e-7,
    scale: Scale = "original",
    ns_dtype: torch.dtype = torch.bfloat16,
) -> Leafwise:
    """The orthogonalized momentum, each row divided by the root of its average mean square.

    A factor then restores the norm of the matrix before the division.

    Args:
        momentum: decay rate μ of the momentum, ≥ 0.
        beta2: decay rate β₂ of the rows' mean squares, in [0, 1).
        eps: added to their roots and to the norm after the division, ≥ 0.
        nesterov: True, or "classic": orthogonalize the momentum after one more step with the same
            gradient; "grokfast": g + m; False: m.
        ns_coefficients: of the Newton–Schulz quintic, see `orthogonalize`.
        ns_steps: number of its repetitions, below 100.
        ns_eps: lower bound of the norm in its division.
        scale: factor for an m × n matrix (out, in), see `scale_by_muon`.
        ns_dtype: dtype of its products: torch.bfloat16, float32, or float64.

        Those that are numbers may also be 0-dim tensors or schedules, but for those of the
            iteration. The defaults are the authors'.

    State: `momentum_buffer`, like the parameters, and `second_momentum_buffer`, (m, 1).

    Raises:
        ValueError: for hyperparameters out of range, or an unknown option; from init, for a
            parameter with fewer than two dimensions, or with three that `as_matrix` does not
            describe.
        TypeError: for an unsupported dtype; from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_normuon(ns_dtype=torch.float64)
        >>> w = torch.zeros(3, 1)
        >>> u, state = tx.update(torch.tensor([[3.0], [4.0], [0.1]]), tx.init(w), w)
        >>> u.abs().flatten() / u.norm()  # the rows are of one length
        tensor([0.5774, 0.5774, 0.5774])
    """
    numeric.check_range("scale_by_normuon", "in [0, 1)", beta2=beta2)
    numeric.check_range("scale_by_normuon", "of 0 or more", eps=eps, momentum=momentum)
    polar = polar_factor("scale_by_normuon", ns_coefficients, ns_eps, ns_steps, ns_dtype)
    check_choice("scale_by_normuon", SCALES, scale=scale)

    def init(p: Tensor) -> NorMuonSlots:
        return NorMuonSlots(p.new_zeros(len(p), 1))

    def scalars(t, *, beta2, eps):
        return 1 - beta2, eps

    def update(M: Tensor, slots: NorMuonSlots, p: Any, *numbers: Any) -> tuple[Tensor, Any]:
        a, eps = numbers
        O = polar(M)  # noqa: E741
        v = slots.second_momentum_buffer.lerp(mean(O * O, -1), a)
        U = O / (root(v) + eps)
        U = U * (frobenius(O) / (frobenius(U) + eps))
        return shape_factor(scale, *M.shape[-2:]) * U, NorMuonSlots(v)

    hyper, storage = {"beta2": beta2, "eps": eps}, Storage(nonnegative=NorMuonSlots._fields)
    rows = matrix_rule("scale_by_normuon", init, update, scalars, hyper, storage)
    mix = matrix_momentum("scale_by_normuon", momentum, nesterov)
    return Leafwise((*mix.placements, *rows.placements))


def frobenius(X: Tensor) -> Tensor:
    """The norms of matrices, (…, 1, 1)."""
    return torch.linalg.matrix_norm(X, keepdim=True)


@factory
def normuon(
    lr: numeric.Hyper = 0.02,
    weight_decay: numeric.Hyper = 0.0,
    momentum: numeric.Hyper = 0.95,
    beta2: numeric.Hyper = 0.95,
    eps: numeric.Hyper = 1e-10,
    nesterov: Nesterov = True,
    ns_coefficients: Coefficients = "jordan",
    ns_steps: int = 5,
    *,
    ns_eps: float = 1e-7,
    scale: Scale = "original",
    ns_dtype: torch.dtype = torch.bfloat16,
    views: Views | torch.nn.Module | None = None,
) -> GradientTransformation:
    """NorMuon, with the defaults of the authors' code. For matrices of hidden layers only.

    Use another optimizer, such as `adamw`, for embeddings, heads, biases and norms. Use `as_matrix`
    to describe stacks of matrices and fused projections.

    Args:
        lr: learning rate, ≥ 0.
        weight_decay: decoupled decay, ≥ 0.
        momentum: decay rate μ of the momentum, ≥ 0.
        beta2: decay rate β₂ of the rows' mean squares, in [0, 1).
        eps: added to their roots and to the norm after the division, ≥ 0.
        nesterov: True, or "classic": orthogonalize what the momentum is after one more step with
            the same gradient; "grokfast": g + m; False: m.
        ns_coefficients: of the Newton–Schulz quintic, see `orthogonalize`.
        ns_steps: number of its repetitions, below 100.
        ns_eps: lower bound of the norm in its division.
        scale: factor for an m × n matrix (out, in), see `scale_by_muon`.
        ns_dtype: dtype of its products: torch.bfloat16, float32, or float64.
        views: descriptions of stacks of matrices, kernels and fused projections: from path patterns
            to arguments of `as_matrix`, or the model. None: parameters with two dimensions are
            matrices, those with four and five are kernels.

    State: `momentum_buffer`, like the parameters, and `second_momentum_buffer`, (m, 1).

    Raises:
        ValueError: for hyperparameters out of range, or an unknown option; from init, for a
            parameter with fewer than two dimensions, or with three that `as_matrix` does not
            describe.
        TypeError: for an unsupported dtype; from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.normuon(lr=0.1)
        >>> w = torch.eye(2)
        >>> updates, state = tx.update(torch.tensor([[1.0, 0.0], [0.0, 5.0]]), tx.init(w), w)
        >>> bool((fo.apply_updates(w, updates).diag() < 0.95).all())
        True
    """
    adapt = scale_by_normuon(
        momentum, beta2, eps, nesterov, ns_coefficients, ns_steps,
        ns_eps=ns_eps, scale=scale, ns_dtype=ns_dtype,
    )  # fmt: skip
    return seen(matrix_chain(adapt, lr, weight_decay), views)
