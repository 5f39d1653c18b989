"""Orthogonalized updates of matrices, and their scale factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base
from functional_optim.core.calls import check_choice
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.rule import Runs, Update
from functional_optim.core.storage import Storage
from functional_optim.core.traits import ANOTHER_RULE
from functional_optim.core.views import MATRICES
from functional_optim.linalg import Coefficients, orthogonalized, polynomials

Scale = Literal["original", "match_rms_adamw", "spectral"] | None
"""The scale of the step of an m × n matrix, see `shape_factor`."""

SCALES = ("original", "match_rms_adamw", "spectral", None)


@factory
def orthogonalize(
    ns_coefficients: Coefficients = "jordan",
    eps: float = 1e-7,
    ns_steps: int = 5,
    scale: Scale = None,
    *,
    ns_dtype: torch.dtype = torch.bfloat16,
) -> Leafwise:
    """Replace the update of a matrix by an approximation of the nearest orthogonal matrix.

    Muon does this to its average gradient, by a Newton–Schulz iteration. Parameters of one shape
    are processed as one batch.

    Args:
        ns_coefficients: of the Newton–Schulz quintic: "jordan", "leloykun", "polar_express", see
            `functional_optim.linalg.COEFFICIENTS`; or a custom (a, b, c), or one such triple for
            each step. Python numbers, constants of the kernel.
        eps: lower bound of the norm in its division.
        ns_steps: number of repetitions, below 100.
        scale: factor for an m × n matrix (out, in). None: 1; "original": √max(1, m/n);
            "match_rms_adamw": 0.2 √max(m, n); "spectral": √(m/n).
        ns_dtype: dtype of its products: torch.bfloat16, float32, or float64.

    Accepts matrices and kernels: use `partition` to assign other parameters to another rule. Use
    `as_matrix` to describe stacks of matrices and fused projections.

    Raises:
        ValueError: for an unknown `scale`, too many steps, or a number of coefficients other than
            three; from init, for a parameter with fewer than two dimensions, or with three that
            `as_matrix` does not describe.
        TypeError: for an unsupported dtype; from init, for a complex parameter.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
    https://kellerjordan.github.io/posts/muon/.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.trace(0.9), fo.orthogonalize())
        >>> w = torch.zeros(2, 2)
        >>> u, state = tx.update(torch.diag(torch.tensor([1.0, 100.0])), tx.init(w), w)
        >>> bool((torch.linalg.svdvals(u) > 0.6).all())
        True
    """
    polar = polar_factor("orthogonalize", ns_coefficients, eps, ns_steps, ns_dtype)
    check_choice("orthogonalize", SCALES, scale=scale)

    def update(G: Tensor, slots: Any, p: Any) -> tuple[Tensor, Any]:
        factor, U = shape_factor(scale, *G.shape[-2:]), polar(G)
        return U if factor == 1.0 else factor * U, slots

    return matrix_rule("orthogonalize", lambda p: base.EmptyState(), update)


def matrix_rule(
    name: str,
    init: Callable[[Tensor], Any],
    update: Update | Sequence[Update],
    scalars: Callable[..., Any] | None = None,
    hyper: Any = None,
    storage: Storage = Storage(),
    runs: Runs = Runs(),
) -> Leafwise:
    """A rule that takes real matrices only, in batches of one shape.

    Kernels of convolutions are matrices (out, in · height · width), unless `as_matrix` describes
    them.
    """
    runs, storage = runs._replace(batched=True), storage._replace(view=MATRICES)
    return leafwise(
        matrices_only(name, init),
        update,
        scalars,
        hyper=hyper,
        runs=runs,
        storage=storage,
        name=name,
    )


def matrices_only(name: str, init: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """The `init` of a rule that takes real matrices only. init: the slots of one matrix.

    Raises:
        ValueError: for a parameter that is not a matrix.
        TypeError: for a complex parameter.
    """
    real = base.real_only(name)

    def checked(p: Tensor) -> Any:
        if p.dim() != 2:
            raise ValueError(
                f"{name} takes matrices, but got a parameter of shape {tuple(p.shape)}; "
                f"{ANOTHER_RULE}."
            )
        real(p)
        return init(p)

    return checked


def polar_factor(
    name: str, ns_coefficients: Coefficients, eps: float, ns_steps: int, ns_dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """Newton–Schulz with these settings; results have the dtype of the argument. name: for errors.

    Raises:
        ValueError: for invalid coefficients, eps or steps.
        TypeError: for an unsupported dtype.
    """
    known = polynomials(ns_coefficients)
    numeric.check(
        lambda x: x >= 0.0, eps, name + " divides by a norm of at least eps, so not by {}."
    )
    numeric.check_count(name, 0, ns_steps=ns_steps)
    if ns_steps >= 100:
        raise ValueError("Number of steps must be less than 100 for computational efficiency")
    if ns_dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(
            f"{name} needs an ns_dtype of torch.bfloat16, torch.float32 or torch.float64, but got "
            f"{ns_dtype!r}."
        )

    def polar(G: Tensor) -> Tensor:
        return orthogonalized(G, known, ns_steps, eps, ns_dtype).to(G.dtype)

    return polar


def shape_factor(scale: Scale, m: int, n: int) -> float:
    """The factor on the step of an m × n matrix (out, in).

    "original": √max(1, m/n), https://kellerjordan.github.io/posts/muon/; "match_rms_adamw":
    0.2 √max(m, n), https://arxiv.org/abs/2502.16982; "spectral": √(m/n), for which the operator
    norm of the step between root mean squares is 1, https://arxiv.org/abs/2502.07529; None: 1.
    """
    if scale == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    if scale == "original":
        return math.sqrt(max(1, m / max(n, 1)))
    return math.sqrt(m / max(n, 1)) if scale == "spectral" else 1.0
