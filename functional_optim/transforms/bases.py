"""Bases in which a matrix is preconditioned: from averages of G Gᵀ and Gᵀ G.

Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", https://arxiv.org/abs/2409.11321.
Lin et al., "Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization",
https://arxiv.org/abs/2509.03378.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base
from functional_optim.core.factory import Made, factory
from functional_optim.core.storage import compute_dtype
from functional_optim.linalg import eigh, tell_not_finite
from functional_optim.transforms.orthogonal import matrices_only

Refresh = Literal["together", "spread"]
"""When bases are renewed: those of all parameters in one step, or some in each step."""

Sides = tuple[Tensor | None, Tensor | None]
"""Something for the rows and something for the columns of a matrix; None: the identity."""


class BasisFunctions(NamedTuple):
    """The fields of `Basis`."""

    name: str
    slots: tuple[str, ...]
    hyper: dict[str, Any]
    init: Callable[[Tensor], tuple[Any, ...]]
    scalars: Callable[..., Any]
    sides: Callable[[Any], Sides]
    first: Callable[..., Any]
    observe: Callable[..., Any]
    renew: Callable[..., tuple[Any, Sides]]
    weigh: Callable[..., Tensor]
    turns: int | None
    made_first: tuple[str, ...] = ()


class Basis(Made, BasisFunctions):
    """How the basis of a matrix is made and renewed, for `in_basis`.

    All functions work on one matrix, or on several with one dimension more in front.

    * name: for messages.
    * slots: the names of what `init(p)` returns, in its order; None for a slot that this parameter
      does not need. These are fields of the slots `x` that the other functions get.
    * hyper: its hyperparameters by name; one of them is `precondition_frequency`.
    * scalars: `scalars(t, **hyper)` returns the numbers `s` of step t, a tuple.
    * sides: `sides(x)` are the matrices Q_L and Q_R, whose columns are the basis; None for the
      identity.
    * first: `first(G, x, s)` returns x after the first gradient.
    * observe: `observe(G, half, seen, x, s)` returns x after a later one, of which half is Q_Lᵀ G,
      and seen Q_Lᵀ G Q_R.
    * renew: `renew(x, s)` returns x with new sides, and for each side the order in which its
      columns continue the old ones; None where it is the old order.
    * weigh: `weigh(u, x, s)` is applied to the update in the basis.
    * turns: over how many steps the renewals are spread; None: they come together.
    * made_first: the names of slots that are zeros until `first` has made them, so that a matrix
      whose first gradient comes late is begun then; without any, step 1 alone begins.

    Example::

        >>> import functional_optim as fo
        >>> fo.shampoo_basis().slots
        ('left_factor', 'right_factor', 'left_basis', 'right_basis')
    """


@factory
def shampoo_basis(
    shampoo_beta: numeric.Hyper = 0.95,
    precondition_frequency: Any = 10,
    max_precond_dim: int = 10000,
    *,
    refresh: Refresh = "together",
) -> Basis:
    """The eigenvectors of the averages L of G Gᵀ and R of Gᵀ G, as Shampoo has them.

    The first gradient makes them, by a decomposition. After that they follow by one step of
    orthogonal iteration: Q ← qr(L Q), with the columns sorted before by their shares of L.

    Args:
        shampoo_beta: decay rate of the averages, in [0, 1).
        precondition_frequency: every how many steps the basis is renewed, ≥ 1.
        max_precond_dim: a side longer than this keeps the identity as its basis.
        refresh: "together": all bases in the same step; "spread": some in each step, so that no
            step takes much longer than others.

    Vectors and scalars have no basis. Numbers may also be 0-dim tensors or schedules, but for
    max_precond_dim, and with "spread" precondition_frequency.

    State: `left_factor` and `left_basis`, L and Q_L, (m, m); `right_factor` and `right_basis`, R
    and Q_R, (n, n); float32 for half types.

    Raises:
        ValueError: for numbers out of range, or another refresh; from init, for a parameter of more
            than two dimensions.
        TypeError: from init, for a complex parameter.

    Source: https://github.com/nikhilvyas/SOAP; the defaults are its.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.in_basis(fo.shampoo_basis(precondition_frequency=5), fo.scale_by_adam())
        >>> w = torch.zeros(3, 2)
        >>> {name: x.shape[0] for name, x in tx.init(w).slots.items()}["right_basis"]
        2
    """
    name = "shampoo_basis"
    _check_beta(shampoo_beta)
    numeric.check_count(name, 1, max_precond_dim=max_precond_dim)
    real = base.real_only(name)

    def init(p: Tensor) -> tuple[Any, ...]:
        real(p)
        if p.dim() > 2:
            raise ValueError(
                f"{name} takes matrices and vectors, but got a parameter of shape "
                f"{tuple(p.shape)}; say how it is a matrix, with as_matrix, or give it another "
                "rule, with partition."
            )
        known: list[Tensor | None] = [None, None]
        if p.dim() == 2:
            known = [None if n > max_precond_dim else _square(p, n) for n in p.shape]
        return (*known, *[x if x is None else x.clone() for x in known])

    def scalars(t, *, shampoo_beta, **others):
        return (1 - shampoo_beta,)

    def grams(G: Tensor, x: Any, weight: Any) -> dict[str, Tensor | None]:
        left, right = x.left_factor, x.right_factor
        return {
            "left_factor": None if left is None else left.lerp(G @ G.mT, weight),
            "right_factor": None if right is None else right.lerp(G.mT @ G, weight),
        }

    def first(G: Tensor, x: Any, s: tuple[Any]) -> Any:
        return _begun(name, G, x._replace(**grams(G, x, *s)))

    def observe(G: Tensor, half: Tensor, seen: Tensor, x: Any, s: tuple[Any]) -> Any:
        return x._replace(**grams(G, x, *s))

    def renew(x: Any, s: tuple[Any]) -> tuple[Any, Sides]:
        left, rows = _followed(name, x.left_factor, x.left_basis, ordered=True)
        right, columns = _followed(name, x.right_factor, x.right_basis, ordered=True)
        return x._replace(left_basis=left, right_basis=right), (rows, columns)

    return Basis(
        name=name,
        slots=("left_factor", "right_factor", "left_basis", "right_basis"),
        hyper={"shampoo_beta": shampoo_beta, "precondition_frequency": precondition_frequency},
        init=init,
        scalars=scalars,
        sides=_sides,
        first=first,
        observe=observe,
        renew=renew,
        weigh=_as_it_is,
        turns=_turns(name, precondition_frequency, refresh),
        made_first=("left_basis", "right_basis"),
    )


@factory
def kl_basis(
    shampoo_beta: numeric.Hyper = 0.98,
    precondition_frequency: Any = 10,
    init_factor: numeric.Hyper = 0.1,
    max_clamp_value: int | None = 4000,
    eps: numeric.Hyper | None = None,
    *,
    refresh: Refresh = "together",
) -> Basis:
    """The eigenvectors of factors that estimate each other: L averages G R⁻¹ Gᵀ, R Gᵀ L⁻¹ G.

    L and R are then the Kronecker factors nearest to the covariance of G by the Kullback–Leibler
    divergence. Their eigenvalues are averaged in each step; the eigenvectors follow by one step of
    orthogonal iteration, Q ← qr(L Q), now and then.

    Args:
        shampoo_beta: decay rate of the averages, in [0, 1).
        precondition_frequency: every how many steps the basis is renewed, ≥ 1.
        init_factor: the first eigenvalues, > 0.
        max_clamp_value: 1 / √λ is at most the length d of its side, or this if it is less, or 10 if
            d is less than that. None: there is no bound.
        eps: None: the basis only rotates. A number ε ≥ 0: it also multiplies by S / (1 + ε S),
            where S has the entries 1 / √(λ_L λ_R), which is KL-Shampoo.
        refresh: "together": all bases in the same step; "spread": some in each step, so that no
            step takes much longer than others.

    For matrices only: give all else another rule, with `partition`. Numbers may also be 0-dim
    tensors or schedules, but for max_clamp_value, and with "spread" precondition_frequency.

    State: `left_factor` and `left_basis`, L and Q_L, (m, m); `right_factor` and `right_basis`, R
    and Q_R, (n, n); `left_eigenvalues`, (m,), and `right_eigenvalues`, (n,); float32 for half
    types.

    Raises:
        ValueError: for numbers out of range, or another refresh; from init, for a parameter that is
            not a matrix.
        TypeError: from init, for a complex parameter.

    Source: https://github.com/yorkerlin/KL-Methods; the defaults are its.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.in_basis(fo.kl_basis(), fo.scale_by_lion())
        >>> tx.init(torch.zeros(3, 2)).slots["right_eigenvalues"]
        tensor([0., 0.])
    """
    name = "kl_basis"
    _check_beta(shampoo_beta)
    numeric.check(lambda x: x > 0.0, init_factor, name + " needs a positive init_factor, not {}.")
    if max_clamp_value is not None:
        numeric.check_count(name, 1, max_clamp_value=max_clamp_value)
    if eps is not None:
        numeric.check(lambda x: x >= 0.0, eps, "Invalid epsilon value: {}")

    def init(p: Tensor) -> tuple[Any, ...]:
        known = [_square(p, n) for n in p.shape]
        vectors = [x.new_zeros(x.shape[:1]) for x in known]
        return (*known, *[x.clone() for x in known], *vectors)

    hyper: dict[str, Any] = {
        "shampoo_beta": shampoo_beta,
        "precondition_frequency": precondition_frequency,
        "init_factor": init_factor,
    }
    if eps is not None:
        hyper["eps"] = eps

    def scalars(t, *, shampoo_beta, init_factor, eps=0.0, **others):
        return 1 - shampoo_beta, init_factor, eps

    def first(G: Tensor, x: Any, s: tuple[Any, Any, Any]) -> Any:
        weight, value, _ = s
        m, n = G.shape[-2:]
        x = x._replace(
            left_factor=x.left_factor.lerp(G @ G.mT / max(n, 1), weight),
            right_factor=x.right_factor.lerp(G.mT @ G / max(m, 1), weight),
            left_eigenvalues=torch.zeros_like(x.left_eigenvalues) + value,
            right_eigenvalues=torch.zeros_like(x.right_eigenvalues) + value,
        )
        return _begun(name, G, x)

    def observe(G: Tensor, half: Tensor, seen: Tensor, x: Any, s: tuple[Any, Any, Any]) -> Any:
        weight, *_ = s
        m, n = G.shape[-2:]
        a = _inverse_root(x.left_eigenvalues)[..., :, None]
        b = _inverse_root(x.right_eigenvalues)[..., None, :]
        rows, columns = (G @ x.right_basis) * b, half * a
        by_row = (seen * b).square().sum(-1) / max(n, 1)
        by_column = (seen * a).square().sum(-2) / max(m, 1)
        return x._replace(
            left_factor=x.left_factor.lerp(rows @ rows.mT / max(n, 1), weight),
            right_factor=x.right_factor.lerp(columns.mT @ columns / max(m, 1), weight),
            left_eigenvalues=bounded(x.left_eigenvalues.lerp(by_row, weight)),
            right_eigenvalues=bounded(x.right_eigenvalues.lerp(by_column, weight)),
        )

    def bounded(values: Tensor) -> Tensor:
        if max_clamp_value is None:
            return values
        most = max(10, min(values.shape[-1], max_clamp_value))
        return values.clamp(min=most**-2.0)

    def renew(x: Any, s: tuple[Any, Any, Any]) -> tuple[Any, Sides]:
        left, _ = _followed(name, x.left_factor, x.left_basis)
        right, _ = _followed(name, x.right_factor, x.right_basis)
        return x._replace(left_basis=left, right_basis=right), (None, None)

    def divide(u: Tensor, x: Any, s: tuple[Any, Any, Any]) -> Tensor:
        *_, eps = s
        a = _inverse_root(x.left_eigenvalues)[..., :, None]
        S = a * _inverse_root(x.right_eigenvalues)[..., None, :]
        return u * (S / (1 + eps * S))

    return Basis(
        name=name,
        slots=(
            *("left_factor", "right_factor", "left_basis", "right_basis"),
            *("left_eigenvalues", "right_eigenvalues"),
        ),
        hyper=hyper,
        init=matrices_only(name, init),
        scalars=scalars,
        sides=_sides,
        first=first,
        observe=observe,
        renew=renew,
        weigh=_as_it_is if eps is None else divide,
        turns=_turns(name, precondition_frequency, refresh),
        made_first=("left_basis", "right_basis"),
    )


def _check_beta(shampoo_beta: numeric.Hyper) -> None:
    numeric.check(lambda x: 0.0 <= x < 1.0, shampoo_beta, "Invalid shampoo_beta value: {}")


def _turns(name: str, precondition_frequency: Any, refresh: str) -> int | None:
    """Over how many steps renewals are spread.

    Raises:
        ValueError: for another refresh, or a frequency that cannot be.
    """
    if refresh not in ("together", "spread"):
        raise ValueError(f"{name} needs a refresh 'together' or 'spread', but got {refresh!r}.")
    if refresh == "spread":
        numeric.check_count(name, 1, precondition_frequency=precondition_frequency)
        return precondition_frequency
    numeric.check_range(name, "of 1 or more", precondition_frequency=precondition_frequency)
    return None


def _square(p: Tensor, n: int) -> Tensor:
    """The first factor of a side of length n."""
    return torch.zeros(n, n, dtype=compute_dtype(p), device=p.device)


def _sides(x: Any) -> Sides:
    return x.left_basis, x.right_basis


def _as_it_is(u: Tensor, x: Any, s: Any) -> Tensor:
    return u


def _inverse_root(values: Tensor) -> Tensor:
    """1 / √λ, and 0 where λ is 0."""
    null = values == 0
    return values.masked_fill(null, 1.0).rsqrt().masked_fill(null, 0.0)


def _begun(name: str, G: Tensor, x: Any) -> Any:
    """The slots with the eigenvectors of G Gᵀ and Gᵀ G, those of the largest eigenvalues first."""
    left, right = x.left_basis, x.right_basis
    return x._replace(
        left_basis=None if left is None else _eigenvectors(name, G @ G.mT),
        right_basis=None if right is None else _eigenvectors(name, G.mT @ G),
    )


def _eigenvectors(name: str, A: Tensor) -> Tensor:
    _, vectors, finite = eigh(A)
    tell_not_finite(name, finite)
    return vectors.flip(-1).contiguous()


def _followed(name: str, A: Tensor | None, Q: Tensor | None, *, ordered: bool = False) -> Sides:
    """The basis after one step of orthogonal iteration, and the order of its columns.

    It stays as it is where A is zero, or not finite. ordered: whether the columns are sorted first,
    by the diagonal of Qᵀ A Q, the largest first.
    """
    if A is None or Q is None:
        return None, None
    trace = A.diagonal(dim1=-2, dim2=-1).sum(-1)  # no entry of A Q is larger
    finite = trace.isfinite()
    tell_not_finite(name, finite)
    known = (finite & (trace > 0))[..., None, None]
    AQ, order = torch.where(known, A @ Q, Q), None
    if ordered:
        shares = (Q * AQ).sum(-2)
        order = shares.argsort(dim=-1, descending=True, stable=True)
        AQ = AQ.gather(-1, order[..., None, :].expand(AQ.shape))
    new, _ = torch.linalg.qr(AQ)
    return torch.where(known, new, Q).contiguous(), order
