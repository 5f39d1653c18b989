"""Dion2: Muon on the largest rows of the momentum.

Ahn, Amsel, Langford, "Dion2: A Simple Method to Shrink Matrix in Muon",
https://arxiv.org/abs/2512.16928, as in https://github.com/microsoft/dion/blob/main/dion/dion2.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.muon import MuonSlots, matrix_chain
from functional_optim.combinators.as_matrix import Views, seen
from functional_optim.core.base import GradientTransformation
from functional_optim.core.calls import check_choice
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.scalars import given
from functional_optim.linalg import Coefficients
from functional_optim.transforms.orthogonal import (
    SCALES,
    Scale,
    matrix_rule,
    polar_factor,
    shape_factor,
)
from functional_optim.transforms.rules import zeros


@factory
def scale_by_dion2(
    fraction: float = 0.25,
    ef_decay: numeric.Hyper = 0.95,
    ns_coefficients: Coefficients = "polar_express",
    ns_steps: int = 5,
    *,
    ns_eps: float = 1e-8,
    scale: Scale = "spectral",
    ns_dtype: torch.dtype = torch.bfloat16,
) -> Leafwise:
    """Add the gradient to a sum, and orthogonalize the largest rows of the sum.

    These rows are then multiplied by `ef_decay`; the others stay unchanged in the sum, and their
    update is 0. For a matrix with more rows than columns it selects columns.

    Args:
        fraction: of the rows, in (0, 1]; rounded up, at least one. A Python number, a constant of
            the kernel.
        ef_decay: remaining factor of the selected rows in the sum, ≥ 0: a number, a 0-dim tensor,
            or a schedule.
        ns_coefficients: of the Newton–Schulz quintic, see `orthogonalize`.
        ns_steps: number of its repetitions, below 100.
        ns_eps: lower bound of the norm in its division.
        scale: factor for an m × n matrix (out, in), see `scale_by_muon`: "spectral", the authors'
            "spectral_norm"; "match_rms_adamw", their "rms_norm"; "original"; None. m and n are
            those of the whole matrix.
        ns_dtype: dtype of its products: torch.bfloat16, float32, or float64.

        The defaults are the authors'.

    State: `momentum_buffer`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range, or an unknown option; from init, for a
            parameter with fewer than two dimensions, or with three that `as_matrix` does not
            describe.
        TypeError: for an unsupported dtype; from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_dion2(fraction=0.5)
        >>> w = torch.zeros(2, 2)
        >>> u, state = tx.update(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), tx.init(w), w)
        >>> u.abs() > 0.5
        tensor([[False, False],
                [False,  True]])
        >>> state.slots["momentum_buffer"]
        tensor([[1.0000, 0.0000],
                [0.0000, 1.9000]])
    """
    if not (isinstance(fraction, (int, float)) and 0.0 < fraction <= 1.0):
        raise ValueError(
            f"scale_by_dion2 needs as fraction a Python number in (0, 1], but got {fraction!r}."
        )
    numeric.check_range("scale_by_dion2", "of 0 or more", ef_decay=ef_decay)
    polar = polar_factor("scale_by_dion2", ns_coefficients, ns_eps, ns_steps, ns_dtype)
    check_choice("scale_by_dion2", SCALES, scale=scale)

    def update(G: Tensor, slots: MuonSlots, p: Any, decay: Any) -> tuple[Tensor, MuonSlots]:
        M = slots.momentum_buffer + G
        m, n = M.shape[-2:]
        tall = m > n
        rows = M.mT if tall else M
        k = min(max(1, math.ceil(fraction * min(m, n))), min(m, n))
        largest = rows.abs().sum(-1).topk(k, sorted=False).indices
        at = largest[..., None].expand(*largest.shape, rows.shape[-1])
        taken = rows.gather(-2, at)
        O = polar(taken.mT).mT if tall else polar(taken)  # noqa: E741
        U = torch.zeros_like(rows).scatter(-2, at, O)
        rows = rows.scatter(-2, at, decay * taken)
        U, M = (U.mT, rows.mT) if tall else (U, rows)
        return shape_factor(scale, m, n) * U, MuonSlots(M)

    hyper = {"ef_decay": ef_decay}
    return matrix_rule("scale_by_dion2", zeros(MuonSlots), update, given, hyper)


@factory
def dion2(
    lr: numeric.Hyper = 0.01,
    fraction: float = 0.25,
    ef_decay: numeric.Hyper = 0.95,
    weight_decay: numeric.Hyper = 0.01,
    ns_coefficients: Coefficients = "polar_express",
    ns_steps: int = 5,
    *,
    ns_eps: float = 1e-8,
    scale: Scale = "spectral",
    ns_dtype: torch.dtype = torch.bfloat16,
    views: Views | torch.nn.Module | None = None,
) -> GradientTransformation:
    """Dion2, with the defaults of the authors' code. For matrices of hidden layers only.

    Use another optimizer, such as `adamw`, for embeddings, heads, biases and norms. Use `as_matrix`
    to describe stacks of matrices and fused projections.

    Args:
        lr: learning rate, ≥ 0.
        fraction: of the rows to step, in (0, 1]; rounded up, at least one. A Python number. For a
            matrix with more rows than columns: of the columns.
        ef_decay: remaining factor of the stepped rows in the sum, ≥ 0.
        weight_decay: decoupled decay of all rows, ≥ 0.
        ns_coefficients: of the Newton–Schulz quintic, see `orthogonalize`.
        ns_steps: number of its repetitions, below 100.
        ns_eps: lower bound of the norm in its division.
        scale: factor for an m × n matrix (out, in), see `scale_by_dion2`.
        ns_dtype: dtype of its products: torch.bfloat16, float32, or float64.
        views: descriptions of stacks of matrices, kernels and fused projections: from path patterns
            to arguments of `as_matrix`, or the model. None: parameters with two dimensions are
            matrices, those with four and five are kernels.

        `lr`, `ef_decay` and `weight_decay` may also be 0-dim tensors or schedules.

    State: `momentum_buffer`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range, or an unknown option; from init, for a
            parameter with fewer than two dimensions, or with three that `as_matrix` does not
            describe.
        TypeError: for an unsupported dtype; from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.dion2(lr=0.1, fraction=1.0)
        >>> w = torch.eye(2)
        >>> updates, state = tx.update(torch.tensor([[1.0, 0.0], [0.0, 5.0]]), tx.init(w), w)
        >>> bool((fo.apply_updates(w, updates).diag() < 0.95).all())
        True
    """
    adapt = scale_by_dion2(
        fraction, ef_decay, ns_coefficients, ns_steps, ns_eps=ns_eps, scale=scale, ns_dtype=ns_dtype
    )
    return seen(matrix_chain(adapt, lr, weight_decay), views)
