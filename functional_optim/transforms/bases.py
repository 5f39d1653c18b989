"""Bases in which a matrix is preconditioned: from averages of G Gᵀ and Gᵀ G.

Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", https://arxiv.org/abs/2409.11321.
Lin et al., "Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization",
https://arxiv.org/abs/2509.03378.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base
from functional_optim.core.calls import check_choice
from functional_optim.core.factory import Reconstructible, factory
from functional_optim.core.modes import differentiable
from functional_optim.core.storage import compute_dtype
from functional_optim.core.traits import ANOTHER_RULE
from functional_optim.core.views import MATRICES, TENSORS, MatrixView, Merged
from functional_optim.linalg import eigh, tell_not_finite
from functional_optim.transforms.sides import (
    BASES,
    EIGENVALUES,
    FACTORS,
    Sides,
    along,
    for_each,
    gram,
    others,
    turned,
)

Refresh = Literal["together", "spread"]
"""When bases are renewed: all in one step, or some in each step."""


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
    view: MatrixView = MATRICES


class Basis(Reconstructible, BasisFunctions):
    """How the basis of a matrix, or of a tensor with more dimensions, is computed and renewed, for
    `in_basis`.

    All functions except `init` take batches, with an additional leading dimension.

    * name: for messages.
    * slots: the names of the tensors that `init(p)` returns, in this order; None for a slot that
      this parameter does not need. These are fields of the slots `x` that the other functions
      receive. The state stores those of the third and later dimensions, such as `third_basis`, in
      the slot of the second, `right_basis`.
    * hyper: its hyperparameters by name; one of them is `precondition_frequency`.
    * scalars: `scalars(t, **hyper)` returns the scalars `s` of step t, a tuple.
    * sides: `sides(x)` are the matrices Q_L and Q_R, whose columns are the basis, and one for each
      further dimension; None for the identity. Missing ones are identities, too.
    * first: `first(G, x, s)` returns x after the first gradient.
    * observe: `observe(G, half, seen, x, s)` returns x after a later gradient G, with half = Q_Lᵀ G
      and seen = Q_Lᵀ G Q_R.
    * renew: `renew(x, s)` returns x with new sides, and for each side the order in which its
      columns continue the old ones; None if the order is unchanged.
    * weigh: `weigh(u, x, s)` is applied to the update in the basis.
    * turns: the number of steps over which renewals are staggered; None: all in one step.
    * made_first: the names of slots that are zeros until `first` has computed them, so that a
      matrix whose first gradient comes in a later step is initialized then; without any, only step
      1 initializes.
    * view: the default view of a parameter, which `as_matrix` replaces. Default: kernels of
      convolutions as matrices.

    Example::

        >>> import functional_optim as fo
        >>> fo.shampoo_basis().slots[:2]
        ('left_factor', 'right_factor')
    """


@factory
def shampoo_basis(
    shampoo_beta: numeric.Hyper = 0.95,
    precondition_frequency: Any = 10,
    max_precond_dim: int = 10000,
    *,
    merge_dims: bool = False,
    refresh: Refresh = "together",
) -> Basis:
    """The eigenvectors of the averages L of G Gᵀ and R of Gᵀ G, as in Shampoo.

    A decomposition of the first gradient's products computes them. After that, each renewal is one
    step of orthogonal iteration: Q ← qr(L Q), with the columns first sorted by their shares of L.

    Args:
        shampoo_beta: decay rate of the averages, in [0, 1).
        precondition_frequency: number of steps between renewals of the basis, ≥ 1.
        max_precond_dim: sides longer than this have the identity as their basis.
        merge_dims: merge neighbouring dimensions of a kernel up to a length of max_precond_dim.
            False, the authors' default: each dimension has a separate basis.
        refresh: "together": all bases in the same step; "spread": some in each step, so that no
            step takes much longer than others.

    Vectors and scalars have no basis. Hyperparameters may also be 0-dim tensors or schedules,
    except max_precond_dim, and with "spread" precondition_frequency.

    State: `left_factor` and `left_basis`, L and Q_L, (m, m); `right_factor` and `right_basis`, R
    and Q_R, (n, n); float32 for half types. For kernels of convolutions the last two are vectors,
    which concatenate the matrices of all further dimensions.

    Raises:
        ValueError: for hyperparameters out of range, or an unknown refresh; from init, for a
            parameter with three dimensions that `as_matrix` does not describe, or with more than
            five.
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
    numeric.check_range(None, "in [0, 1)", shampoo_beta=shampoo_beta)
    numeric.check_count(name, 1, max_precond_dim=max_precond_dim)
    real = base.real_only(name)

    def init(p: Tensor) -> tuple[Any, ...]:
        real(p)
        sides = p.shape if p.dim() > 1 else ()
        known = for_each(name, sides, lambda n: None if n > max_precond_dim else _square(p, n))
        return (*known, *[x if x is None else x.clone() for x in known])

    def scalars(t, *, shampoo_beta, **others):
        return (1 - shampoo_beta,)

    def averaged(G: Tensor, x: Any, weight: Any) -> Any:
        factors = enumerate(_values(x, FACTORS))
        new = [None if A is None else A.lerp(gram(G, i, A), weight) for i, A in factors]
        return _put(x, FACTORS, new)

    def first(G: Tensor, x: Any, s: tuple[Any]) -> Any:
        return _begun(name, G, averaged(G, x, *s))

    def observe(G: Tensor, half: Tensor, seen: Tensor, x: Any, s: tuple[Any]) -> Any:
        return averaged(G, x, *s)

    def renew(x: Any, s: tuple[Any]) -> tuple[Any, Sides]:
        pairs = zip(_values(x, FACTORS), _values(x, BASES), strict=True)
        found = [_followed(name, A, Q, ordered=True) for A, Q in pairs]
        return _put(x, BASES, [Q for Q, _ in found]), tuple([order for _, order in found])

    merged = Merged(max_precond_dim) if merge_dims else None
    return Basis(
        name=name,
        slots=(*FACTORS, *BASES),
        hyper={"shampoo_beta": shampoo_beta, "precondition_frequency": precondition_frequency},
        init=init,
        scalars=scalars,
        sides=_sides,
        first=first,
        observe=observe,
        renew=renew,
        weigh=_as_it_is,
        turns=_turns(name, precondition_frequency, refresh),
        made_first=BASES,
        view=TENSORS._replace(merged=merged),
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
    """The eigenvectors of factors that depend on each other: L averages G R⁻¹ Gᵀ, R averages Gᵀ L⁻¹
    G.

    L and R are then the Kronecker factors closest to the covariance of G in Kullback–Leibler
    divergence. Their eigenvalues are averaged in each step; a step of orthogonal iteration, Q ←
    qr(L Q), renews the eigenvectors every few steps.

    Args:
        shampoo_beta: decay rate of the averages, in [0, 1).
        precondition_frequency: number of steps between renewals of the basis, ≥ 1.
        init_factor: the first eigenvalues, > 0.
        max_clamp_value: 1 / √λ is at most max(10, min(d, max_clamp_value)) for a side of length d.
            None: no bound.
        eps: None: the basis only rotates. A number ε ≥ 0: it also multiplies by S / (1 + ε S),
            where S has the elements 1 / √(λ_L λ_R), which is KL-Shampoo.
        refresh: "together": all bases in the same step; "spread": some in each step, so that no
            step takes much longer than others.

    Each dimension of a kernel longer than 1 has a factor; all factors and eigenvalues of a step are
    computed from the previous ones. Accepts matrices and kernels: use `partition` to assign other
    parameters to another rule. Hyperparameters may also be 0-dim tensors or schedules, except
    max_clamp_value, and with "spread" precondition_frequency.

    State: `left_factor` and `left_basis`, L and Q_L, (m, m); `right_factor` and `right_basis`, R
    and Q_R, (n, n); `left_eigenvalues`, (m,), and `right_eigenvalues`, (n,); float32 for half
    types.

    Raises:
        ValueError: for hyperparameters out of range, or an unknown refresh; from init, for a
            parameter with fewer than two dimensions, or with three that `as_matrix` does not
            describe.
        TypeError: from init, for a complex parameter.

    Source: https://github.com/yorkerlin/KL-Methods; the defaults are its.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.in_basis(fo.kl_basis(), fo.scale_by_lion())
        >>> tx.init(torch.zeros(3, 2)).slots["right_eigenvalues"]
        tensor([0., 0.])
    """
    name = "kl_basis"
    numeric.check_range(None, "in [0, 1)", shampoo_beta=shampoo_beta)
    numeric.check(lambda x: x > 0.0, init_factor, name + " needs a positive init_factor, not {}.")
    if max_clamp_value is not None:
        numeric.check_count(name, 1, max_clamp_value=max_clamp_value)
    if eps is not None:
        numeric.check_range(None, "of 0 or more", eps=eps)

    real = base.real_only(name)

    def init(p: Tensor) -> tuple[Any, ...]:
        if p.dim() < 2:
            raise ValueError(
                f"{name} takes matrices and kernels, but got a parameter of shape "
                f"{tuple(p.shape)}; {ANOTHER_RULE}."
            )
        real(p)
        known = for_each(name, p.shape, lambda n: _square(p, n))
        vectors = [x if x is None else x.new_zeros(x.shape[:1]) for x in known]
        return (*known, *[x if x is None else x.clone() for x in known], *vectors)

    hyper: dict[str, Any] = {
        "shampoo_beta": shampoo_beta,
        "precondition_frequency": precondition_frequency,
        "init_factor": init_factor,
    }
    if eps is not None:
        hyper["eps"] = eps

    def scalars(t, *, shampoo_beta, init_factor, eps=0.0, **others):
        return 1 - shampoo_beta, init_factor, eps

    def kept(x: Any, keys: tuple[str, ...]) -> list[Tensor]:
        """The values for the dimensions of a tensor, without None."""
        return [one for one in _values(x, keys) if one is not None]

    def first(G: Tensor, x: Any, s: tuple[Any, Any, Any]) -> Any:
        weight, value, _ = s
        factors = [
            A.lerp(gram(G, i, A) / others(G, i, A), weight) for i, A in enumerate(kept(x, FACTORS))
        ]
        values = [torch.zeros_like(v) + value for v in kept(x, EIGENVALUES)]
        return _begun(name, G, _put(_put(x, FACTORS, factors), EIGENVALUES, values))

    def observe(G: Tensor, half: Tensor, seen: Tensor, x: Any, s: tuple[Any, Any, Any]) -> Any:
        weight, *_ = s
        bases, values = kept(x, BASES), kept(x, EIGENVALUES)
        roots = [_inverse_root(v) for v in values]
        factors, means = [], []
        for i, A in enumerate(kept(x, FACTORS)):
            white, n = G, others(G, i, A)
            for j, (Q, root) in enumerate(zip(bases, roots, strict=True)):
                if j != i:
                    start = half if len(bases) == 2 and j == 0 else turned(white, j, Q)
                    white = start * along(root, j, len(bases))
            factors.append(A.lerp(gram(white, i, A) / n, weight))
            squares = seen
            for j, root in enumerate(roots):
                squares = squares if j == i else squares * along(root, j, len(bases))
            dims = [j - len(bases) for j in range(len(bases)) if j != i]
            means.append(squares.square().sum(dims) / n)
        pairs = zip(values, means, strict=True)
        values = [bounded(v.lerp(mean, weight)) for v, mean in pairs]
        return _put(_put(x, FACTORS, factors), EIGENVALUES, values)

    def bounded(values: Tensor) -> Tensor:
        if max_clamp_value is None:
            return values
        most = max(10, min(values.shape[-1], max_clamp_value))
        return values.clamp(min=most**-2.0)

    def renew(x: Any, s: tuple[Any, Any, Any]) -> tuple[Any, Sides]:
        pairs = zip(kept(x, FACTORS), kept(x, BASES), strict=True)
        found = [_followed(name, A, Q)[0] for A, Q in pairs]
        return _put(x, BASES, found), ()

    def divide(u: Tensor, x: Any, s: tuple[Any, Any, Any]) -> Tensor:
        *_, eps = s
        roots = [_inverse_root(v) for v in kept(x, EIGENVALUES)]
        S = functools.reduce(torch.mul, [along(r, i, len(roots)) for i, r in enumerate(roots)])
        return u * (S / (1 + eps * S))

    return Basis(
        name=name,
        slots=(*FACTORS, *BASES, *EIGENVALUES),
        hyper=hyper,
        init=init,
        scalars=scalars,
        sides=_sides,
        first=first,
        observe=observe,
        renew=renew,
        weigh=_as_it_is if eps is None else divide,
        turns=_turns(name, precondition_frequency, refresh),
        made_first=BASES,
        view=TENSORS._replace(merged=Merged(1)),
    )


def _turns(name: str, precondition_frequency: Any, refresh: str) -> int | None:
    """The number of steps over which renewals are staggered.

    Raises:
        ValueError: for an unknown refresh, or an invalid frequency.
    """
    check_choice(name, ("together", "spread"), refresh=refresh)
    if refresh == "spread":
        numeric.check_count(name, 1, precondition_frequency=precondition_frequency)
        return precondition_frequency
    check_frequency(name, precondition_frequency)
    return None


def check_frequency(name: str, precondition_frequency: Any) -> None:
    """Raise ValueError unless it is a whole number of 1 or more, a tensor or a schedule."""
    whole = "that is a whole number of 1 or more"
    numeric.check_range(name, whole, precondition_frequency=precondition_frequency)


def _square(p: Tensor, n: int) -> Tensor:
    """The first factor of a side of length n."""
    return torch.zeros(n, n, dtype=compute_dtype(p), device=p.device)


def _values(x: Any, keys: tuple[str, ...]) -> Sides:
    return tuple([getattr(x, key) for key in keys])


def _put(x: Any, keys: tuple[str, ...], new: Sequence[Tensor | None]) -> Any:
    return x._replace(**dict(zip(keys, new, strict=False)))


def _sides(x: Any) -> Sides:
    return _values(x, BASES)


def _as_it_is(u: Tensor, x: Any, s: Any) -> Tensor:
    return u


def _inverse_root(values: Tensor) -> Tensor:
    """1 / √λ, or 0 if λ is 0."""
    null = values == 0
    return values.masked_fill(null, 1.0).rsqrt().masked_fill(null, 0.0)


def _begun(name: str, G: Tensor, x: Any) -> Any:
    """The slots with the eigenvectors of G Gᵀ and Gᵀ G, those of the largest eigenvalues first."""
    old = enumerate(_sides(x))
    new = [None if Q is None else _eigenvectors(name, gram(G, i, Q)) for i, Q in old]
    return _put(x, BASES, new)


def _eigenvectors(name: str, A: Tensor) -> Tensor:
    _, vectors, finite = eigh(A)
    tell_not_finite(name, finite)
    return vectors.flip(-1).contiguous()


def _followed(name: str, A: Tensor | None, Q: Tensor | None, *, ordered: bool = False) -> Sides:
    """The basis after one step of orthogonal iteration, and the order of its columns.

    It is unchanged if A is zero or not finite. ordered: whether the columns are sorted first,
    by the diagonal of Qᵀ A Q, the largest first.
    """
    if A is None or Q is None:
        return None, None
    trace = A.diagonal(dim1=-2, dim2=-1).sum(-1)  # no element of A Q is larger
    finite = trace.isfinite()
    tell_not_finite(name, finite)
    known = (finite & (trace > 0))[..., None, None]
    AQ, order = torch.where(known, A @ Q, Q), None
    if differentiable(A):  # a variant that is not chosen sees Q = 0, whose QR has no derivative
        eye = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
        AQ = torch.where(Q.flatten(-2).any(-1)[..., None, None], AQ, eye)
    if ordered:
        shares = (Q * AQ).sum(-2)
        order = shares.argsort(dim=-1, descending=True, stable=True)
        AQ = AQ.gather(-1, order[..., None, :].expand(AQ.shape))
    new, _ = torch.linalg.qr(AQ)
    return torch.where(known, new, Q).contiguous(), order
