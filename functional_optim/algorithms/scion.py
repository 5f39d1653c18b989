"""Scion: steps to the boundary of a norm ball, with a suitable norm for each layer.

Pethick, Xie, Antonakopoulos, Zhu, Silveti-Falls, Cevher, "Training Deep Learning Models with
Norm-Constrained LMOs", https://arxiv.org/abs/2502.07529, Algorithms 1 and 2, as in
https://github.com/LIONS-EPFL/scion/blob/main/scion.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.muon import matrix_momentum
from functional_optim.combinators.as_matrix import Views, seen
from functional_optim.combinators.partition import partition
from functional_optim.core.base import EmptyState, GradientTransformation, real_only
from functional_optim.core.calls import check_choice
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, identity, leafwise
from functional_optim.core.rule import Runs
from functional_optim.core.scalars import given
from functional_optim.core.storage import Storage
from functional_optim.core.views import MATRICES, TENSORS
from functional_optim.linalg import Coefficients
from functional_optim.transforms.orthogonal import matrices_only, polar_factor
from functional_optim.transforms.scaling import check_lr, scale, scale_by_lr
from functional_optim.transforms.weight_decay import add_decayed_weights

Norm = Literal["auto", "spectral", "spectral_conv", "sign", "col", "row", "bias_rms"]
"""The norm of a layer's ball, see `scale_by_scion`."""

NORMALIZED = {"spectral": True, "sign": True, "col": False, "row": True}
"""Norms of matrices, and whether the authors divide by the number of inputs by default."""


@factory
def scale_by_scion(
    norm: Norm = "auto",
    normalized: bool | None = None,
    eps: numeric.Hyper = 1e-8,
    ns_coefficients: Coefficients = "jordan",
    ns_steps: int = 5,
    *,
    ns_eps: float = 1e-7,
    ns_dtype: torch.dtype = torch.bfloat16,
) -> Leafwise:
    """Replace an update by the point of a norm's unit ball with the largest inner product with it.

    In the following, G is a matrix with m outputs and n inputs.

    Args:
        norm: "spectral": √(m/n) times the orthogonalized G. "sign": the signs of G, over n. "col":
            each column over its root mean square. "row": each row over its norm and √n.
            "spectral_conv", for kernels (m, n, …): √(m/n) times the orthogonalized (m, n …) matrix,
            over the size of the window. "bias_rms", for vectors and scalars: all elements over
            their root mean square. "auto": "spectral" for matrices, "spectral_conv" for kernels,
            and "bias_rms" for others.
        normalized: for matrices: whether the norm counts inputs. False leaves the division by √n
            ("spectral", "row") or n ("sign") out, True divides "col" by n. Default: as above,
            the authors'.
        eps: added to roots of mean squares and to norms of rows, ≥ 0: a number, a 0-dim tensor, or
            a schedule.
        ns_coefficients: of the Newton–Schulz quintic, see `orthogonalize`.
        ns_steps: number of its repetitions, below 100.
        ns_eps: lower bound of the norm in its division.
        ns_dtype: dtype of its products: torch.bfloat16, float32, or float64.

    For matrices that are stored as (inputs, outputs), such as embeddings, wrap it in `as_matrix(…,
    orientation="in_out")`. The authors' `max` of the spectral norm is
    `orthogonalize(scale="original")`.

    Raises:
        ValueError: for hyperparameters out of range, or an unknown option; from init, for a
            parameter that has too few or too many dimensions for its norm.
        TypeError: for an unsupported dtype; from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_scion("sign")
        >>> w = torch.zeros(1, 2)
        >>> tx.update(torch.tensor([[3.0, -4.0]]), tx.init(w), w)[0]
        tensor([[ 0.5000, -0.5000]])
    """
    check_choice("scale_by_scion", get_args(Norm), norm=norm)
    if normalized is not None and norm not in NORMALIZED:
        raise ValueError(
            f"scale_by_scion takes normalized={normalized!r} only for the norms of matrices, "
            f"{', '.join(NORMALIZED)}; leave it out for {norm!r}."
        )
    numeric.check_range("scale_by_scion", "of 0 or more", eps=eps)
    polar = polar_factor("scale_by_scion", ns_coefficients, ns_eps, ns_steps, ns_dtype)
    if norm == "auto":
        parts = {
            "spectral": _of_matrices("spectral", True, polar, eps),
            "spectral_conv": _of_kernels(polar),
            "bias_rms": _of_vectors(eps),
        }
        made: Any = partition(parts, _by_dimensions)
        return made
    if norm == "spectral_conv":
        return _of_kernels(polar)
    if norm == "bias_rms":
        return _of_vectors(eps)
    return _of_matrices(norm, NORMALIZED[norm] if normalized is None else normalized, polar, eps)


def _by_dimensions(path: str, p: Tensor) -> str:
    if p.dim() < 2:
        return "bias_rms"
    return "spectral" if p.dim() == 2 else "spectral_conv"


def _of_matrices(
    norm: str, normalized: bool, polar: Callable[[Tensor], Tensor], eps: numeric.Hyper
) -> Leafwise:
    """The rule for a norm of matrices."""

    def update(G: Tensor, slots: Any, p: Any, eps: Any) -> tuple[Tensor, Any]:
        m, n = G.shape[-2], max(G.shape[-1], 1)
        if norm == "spectral":
            return math.sqrt(m / n if normalized else m) * polar(G), slots
        if norm == "sign":
            return torch.where(G.isnan(), G, G.sign()) / (n if normalized else 1), slots
        if norm == "col":
            rms = torch.linalg.vector_norm(G, dim=-2, keepdim=True) / math.sqrt(max(m, 1))
            return G / ((n * rms if normalized else rms) + eps), slots
        size = torch.linalg.vector_norm(G, dim=-1, keepdim=True)
        return G / ((math.sqrt(n) * size if normalized else size) + eps), slots

    init = matrices_only(f"scale_by_scion with the norm {norm!r}", lambda p: EmptyState())
    runs, storage = Runs(batched=True), Storage(view=MATRICES)
    return leafwise(
        init, update, given, hyper={"eps": eps}, runs=runs, storage=storage, name="scale_by_scion"
    )


def _of_kernels(polar: Callable[[Tensor], Tensor]) -> Leafwise:
    """The rule for kernels of convolutions; a matrix is a kernel with a window of size 1."""
    name = "scale_by_scion"
    real = real_only(name)

    def init(p: Tensor) -> EmptyState:
        if p.dim() < 2:
            raise ValueError(
                "scale_by_scion with the norm 'spectral_conv' takes kernels (out, in, …), but got "
                f"a parameter of shape {tuple(p.shape)}; give it the norm 'bias_rms'."
            )
        return real(p)

    def update(G: Tensor, slots: Any, p: Any) -> tuple[Tensor, Any]:
        _, m, n, *window = G.shape
        factor = math.sqrt(m / max(n, 1)) / max(math.prod(window), 1)
        return factor * polar(G.flatten(2)).reshape(G.shape), slots

    runs, storage = Runs(batched=True), Storage(view=TENSORS._replace(most=None))
    return leafwise(init, update, runs=runs, storage=storage, name=name)


def _of_vectors(eps: numeric.Hyper) -> Leafwise:
    """The rule for biases: all elements of a tensor have the same weight."""

    def update(u: Tensor, slots: Any, p: Tensor, eps: Any) -> tuple[Tensor, Any]:
        S = (u * u).mean()
        rms = S.masked_fill(S == 0, 1.0).sqrt()  # the root of 0 has no derivative
        return u / (rms + eps), slots

    real = real_only("scale_by_scion")
    hyper = {"eps": eps}
    return leafwise(real, update, given, hyper=hyper, name="scale_by_scion")


@factory
def scion(
    lr: numeric.Hyper = 1e-3,
    momentum: numeric.Hyper = 0.9,
    norm: Norm = "auto",
    normalized: bool | None = None,
    radius: numeric.Hyper = 1.0,
    unconstrained: bool = False,
    eps: numeric.Hyper = 1e-8,
    ns_coefficients: Coefficients = "jordan",
    ns_steps: int = 5,
    *,
    ns_eps: float = 1e-7,
    ns_dtype: torch.dtype = torch.bfloat16,
    views: Views | torch.nn.Module | None = None,
) -> GradientTransformation:
    """Scion: weights stay in a ball around 0, in a norm that is chosen for each layer.

    Args:
        lr: the fraction of the step to the boundary of the ball, in [0, 1]; without the constraint
            the learning rate, ≥ 0.
        momentum: decay rate of the average gradient, ≥ 0. **1 minus the authors' `momentum`**, for
            which they recommend 0.1, the default here. The Python number 0 drops the average.
        norm: "auto", "spectral", "spectral_conv", "sign", "col", "row" or "bias_rms", see
            `scale_by_scion`. Set norms and radii per layer with `partition`, or with the groups of
            an optimizer object.
        normalized: for matrices: whether the norm counts inputs, see `scale_by_scion`.
        radius: of the ball, ≥ 0; the authors' `scale`. An example of theirs has 50 for hidden
            layers and 3000 for the last, with the norm "sign".
        unconstrained: disable the constraint: weights are not pulled toward 0.
        eps: added to roots of mean squares and to norms of rows, ≥ 0.
        ns_coefficients: of the Newton–Schulz quintic, see `orthogonalize`.
        ns_steps: number of its repetitions, below 100.
        ns_eps: lower bound of the norm in its division.
        ns_dtype: dtype of its products: torch.bfloat16, float32, or float64.
        views: descriptions of stacks of matrices, kernels and fused projections: from path patterns
            to arguments of `as_matrix`, or the model. None: parameters with two dimensions are
            matrices, those with four and five are kernels.

        Numbers may also be 0-dim tensors or schedules, except for those of the iteration.

    State: `momentum_buffer`, like the parameters, if there is momentum.

    Raises:
        ValueError: for hyperparameters out of range, or an unknown option; from init, for a
            parameter that has too few or too many dimensions for its norm.
        TypeError: for an unsupported dtype; from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scion(lr=0.1, radius=2.0)
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([3.0, -3.0]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([0.7000, 1.1000])
    """
    check_lr(lr, "Learning rate should be >= 0 but is: {}")
    if not unconstrained:
        numeric.check_range("scion", "in [0, 1]", lr=lr)
    numeric.check(lambda x: x >= 0.0, momentum, "momentum should be >= 0 but is: {}")
    numeric.check_range("scion", "of 0 or more", radius=radius)
    farthest = scale_by_scion(
        norm, normalized, eps, ns_coefficients, ns_steps, ns_eps=ns_eps, ns_dtype=ns_dtype
    )
    average = matrix_momentum("scion", momentum, nesterov=False)
    return seen(
        chain(
            identity() if numeric.is_zero(momentum) else average,
            farthest,
            scale(radius),
            add_decayed_weights(0.0 if unconstrained else 1.0),
            scale_by_lr(lr),
        ),
        views,
    )
