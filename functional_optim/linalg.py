"""Linear algebra for matrix optimizers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from functional_optim.core import modes, sharding
from functional_optim.core.memory import has_address
from functional_optim.kernels import callers, isa_levels
from functional_optim.kernels import newton_schulz as library

Triple = tuple[float, float, float]
"""The coefficients (a, b, c) of a step X ← a X + (b A + c A²) X, where A = X Xᵀ."""

Coefficients = str | Triple | Sequence[Triple]
"""The steps of a Newton–Schulz iteration: the name of a set in `COEFFICIENTS`, one triple for all
steps, or one for each of the first steps, the last of which is repeated."""


class Polynomials(NamedTuple):
    """The steps of a Newton–Schulz iteration. margin: a factor on the norm before the first step.

    Example::

        >>> from functional_optim.linalg import Polynomials, newton_schulz
        >>> import torch
        >>> cubic = Polynomials(((1.5, -0.5, 0.0),))
        >>> newton_schulz(torch.eye(2), cubic, steps=20).float().diag()
        tensor([1., 1.])
    """

    triples: tuple[Triple, ...]
    margin: float = 1.0

    def at(self, step: int) -> Triple:
        """The triple of a step, from 0."""
        return self.triples[min(step, len(self.triples) - 1)]


MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic with the steepest slope at 0,
https://kellerjordan.github.io/posts/muon/."""

COEFFICIENTS = {
    "jordan": Polynomials((MUON_COEFFICIENTS,)),
    "leloykun": Polynomials(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        )
    ),
    "polar_express": Polynomials(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        margin=1.02,
    ),
}
"""Sets of coefficients by name, all for five steps. They map singular values of at least 0.01 into

* "jordan": [0.68, 1.13], https://kellerjordan.github.io/posts/muon/;
* "leloykun": [0.978, 1.032], https://leloykun.github.io/ponder/muon-opt-coeffs/;
* "polar_express": [0.85, 1.14], also for values of at least 0.001: Amsel et al., "The Polar
  Express", https://arxiv.org/abs/2505.16932.
"""


def polynomials(coefficients: Coefficients | Polynomials) -> Polynomials:
    """The steps of some coefficients.

    Raises:
        ValueError: for an unknown name, or anything but triples of numbers.

    Example::

        >>> from functional_optim.linalg import polynomials
        >>> polynomials("leloykun").at(4)
        (2.8366, -3.0525, 1.2012)
    """
    if isinstance(coefficients, Polynomials):
        return coefficients
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            raise ValueError(
                f"there are no Newton–Schulz coefficients called {coefficients!r}; pass one of "
                f"{', '.join(COEFFICIENTS)}, or a custom (a, b, c)."
            )
        return COEFFICIENTS[coefficients]
    given: tuple[Any, ...] = tuple(coefficients) if isinstance(coefficients, Sequence) else ()
    triples = given if given and all(isinstance(x, Sequence) for x in given) else (given,)
    if not all(len(x) == 3 and all(map(_is_finite, x)) for x in triples):
        raise ValueError(
            "Coefficients must be a tuple of exactly 3 values, or several such tuples, one for "
            f"each step, all of them finite numbers, but got {coefficients!r}."
        )
    return Polynomials(triples)


def _is_finite(x: Any) -> bool:
    return isinstance(x, (int, float)) and math.isfinite(x)


def newton_schulz(
    G: Tensor,
    coefficients: Coefficients | Polynomials = "jordan",
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Map all singular values of a matrix close to 1: approximately U Vᵀ of its SVD U S Vᵀ.

    Repeats X ← a X + (b A + c A²) X with A = X Xᵀ, where X is G or its transpose, whichever is
    wide. Every rank gathers a sharded matrix (a DTensor) and keeps its shard of the result, which
    is that of a single process.

    Args:
        G: a matrix (m, n), or a batch of them.
        coefficients: (a, b, c), one such triple for each step, or the name of a set in
            `COEFFICIENTS`: "jordan", "leloykun", "polar_express".
        steps: repetitions, 0 to 99.
        eps: lower bound of the Frobenius norm in the division.
        dtype: of X, A and A². Default: the source's and torch.optim.Muon's. In float32 and float64,
            matrices wider than 1.5 times their height take less work. On a CPU a compiled library
            iterates on float32 matrices, in this dtype or with less rounding.

    Returns:
        A matrix of this dtype and G's shape, with singular values in about [0.7, 1.2].

    Raises:
        ValueError: for an unknown name, or anything but triples.

    Source: Keller Jordan et al., "Muon", https://kellerjordan.github.io/posts/muon/.

    Example::

        >>> import torch
        >>> from functional_optim.linalg import newton_schulz
        >>> X = newton_schulz(torch.diag(torch.tensor([1.0, 100.0])))
        >>> bool((torch.linalg.svdvals(X.float()) > 0.6).all())
        True
    """
    _check_matrix("newton_schulz", G)
    return orthogonalized(G, polynomials(coefficients), steps, eps, dtype).to(dtype)


def orthogonalized(
    G: Tensor, known: Polynomials, steps: int, eps: float, dtype: torch.dtype
) -> Tensor:
    """`newton_schulz` for coefficients that are already read, without the last cast.

    Args:
        G: a matrix (m, n), or a batch of them.
        known: of `polynomials`.
        steps, eps, dtype: as in `newton_schulz`.

    Returns:
        A matrix of G's shape with values of `dtype`, in it or in G's dtype.

    Example::

        >>> import torch
        >>> from functional_optim.linalg import orthogonalized, polynomials
        >>> G = torch.diag(torch.tensor([1.0, 2.0]))
        >>> orthogonalized(G, polynomials("jordan"), 5, 1e-7, torch.float32).dtype
        torch.float32
    """
    if hasattr(G, "full_tensor"):
        return sharding.placed_like(orthogonalized(sharding.whole(G), known, steps, eps, dtype), G)
    if G.dim() > 3:
        X = orthogonalized(G.flatten(0, -3), known, steps, eps, dtype)
        return X.unflatten(0, G.shape[:-2])
    triples = [known.at(k) for k in range(steps)]
    if _has_library(G, dtype):
        m, n = sorted(G.shape[-2:])
        together = _together_in_library(triples, m, n, dtype)
        matrices = G.contiguous().view(-1, *G.shape[-2:])
        rounds = dtype is torch.bfloat16
        found = library.run(matrices, triples, eps, known.margin, together, rounds=rounds)
        if found is not None:
            return found.view(G.shape)
    X = G.to(dtype)
    tall = G.shape[-2] > G.shape[-1]
    if tall:
        X = X.mT
    norm = torch.linalg.matrix_norm(X, keepdim=True)
    X = X / (norm if known.margin == 1.0 else known.margin * norm).clamp(min=eps)
    if _in_software(X):
        X = X.float()
    most = 1
    if 2 * X.shape[-1] > 3 * X.shape[-2]:
        most = _together(max([1.0, *[a for a, _, _ in triples]]), dtype)
    for done in range(0, steps, most):
        X = _repeated(X, triples[done : done + most], dtype)
    return (X.mT if tall else X).to(dtype)


def _has_library(G: Tensor, dtype: torch.dtype) -> bool:
    """Whether a library of C++ iterates on matrices, and they are large enough for it."""
    if modes.traced():
        return False
    return (
        dtype in (torch.bfloat16, torch.float32)
        and G.dtype is torch.float32
        and G.device.type == "cpu"
        and G.shape[-2] * G.shape[-1] > SMALL
        and library.serves()
        and has_address(G)
        and not G.is_neg()
        and not (G.requires_grad and torch.is_grad_enabled())
        and unpack_dual(G).tangent is None
    )


IN_HARDWARE = not isa_levels.features().isdisjoint(("avx512_bf16", "amx_tile"))
"""Whether this processor multiplies bfloat16."""

SMALL = 1 << 10
"""Size of a matrix, in elements, up to which ATen's products in its dtype are as fast as others."""


def _in_software(X: Tensor) -> bool:
    """Whether products in X's dtype are far slower than in float32: bfloat16 on most CPUs.

    They sum in float32 anyway, and round the sum, as `_repeated` does.
    """
    here = X.device.type == "cpu" and X.dtype is torch.bfloat16 and not IN_HARDWARE
    return here and X.shape[-2] * X.shape[-1] > SMALL


def _together(a: float, dtype: torch.dtype) -> int:
    """The number of repetitions for which X Xᵀ may be updated instead of recomputed.

    Each repetition multiplies its rounding error by up to a²; the final error must stay below 0.05.
    """
    growth = max(a * a, math.e)
    return max(1, int(math.log(0.05 / torch.finfo(dtype).eps) / math.log(growth)))


def _together_in_library(triples: Sequence[Triple], m: int, n: int, dtype: torch.dtype) -> int:
    """The same for m × n matrices in the library, which updates X Xᵀ in float32 only: products of
    bfloat16 take half of the time if the processor has them."""
    wide = n > 4 * m if dtype is torch.bfloat16 and IN_HARDWARE else 2 * n > 3 * m
    return _together(max([1.0, *[a for a, _, _ in triples]]), torch.float32) if wide else 1


def _repeated(X: Tensor, triples: Sequence[Triple], dtype: torch.dtype) -> Tensor:
    """Some repetitions at once. All products except

    the first and the last are products of small square matrices: the steps multiply X by
    polynomials in A = X Xᵀ, which commute, so a step that maps X to Q X maps A to A Q². This takes
    less work for widths above 1.5 times the height. dtype: the dtype to which results are rounded.
    """
    (a, b, c), *others = triples
    product = torch.addmm if X.dim() == 2 else torch.baddbmm

    def rounded(Y: Tensor) -> Tensor:
        return Y.to(dtype).to(X.dtype)

    A = rounded(symmetric_product(X, X))
    Q = rounded(symmetric_product(A, A, A, beta=b, alpha=c))  # without the term a I
    if not others:
        return rounded(product(X, Q, X, beta=a))
    P = Q + a * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    for following in others:
        AQ = symmetric_product(A, Q, A, beta=a)
        A = symmetric_product(AQ, Q, AQ, beta=a)
        a, b, c = following
        Q = symmetric_product(A, A, A, beta=b, alpha=c)
        P = symmetric_product(Q, P, P, beta=a)
    return P @ X


WHOLE = 256
"""Rows up to which a symmetric product or a triangular matrix is multiplied as a whole."""


def symmetric_product(
    X: Tensor, Y: Tensor, plus: Tensor | None = None, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """α X Yᵀ + β plus of two symmetric terms, with two thirds of the operations on a CPU.

    Args:
        X, Y: (…, m, n). X Yᵀ must be symmetric, as it is if X is Y, or for symmetric matrices that
            commute. Only its diagonal blocks, and those above them, are computed.
        plus: (…, m, m), symmetric; None: 0. With it, X has two or three dimensions.
        beta, alpha: the factors; alpha has an effect only with `plus`.

    Example::

        >>> import torch
        >>> from functional_optim.linalg import symmetric_product
        >>> X = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        >>> symmetric_product(X, X)
        tensor([[5., 2.],
                [2., 1.]])
    """
    m = X.shape[-2]
    if m <= WHOLE or X.device.type != "cpu" or not X.numel():
        return _product(X, Y, plus, beta, alpha)
    if X.dim() > 2:  # a batch of blocks takes longer than its blocks
        rest = [None] * len(X) if plus is None else plus.unbind()
        each = zip(X.unbind(), Y.unbind(), rest, strict=True)
        return torch.stack([symmetric_product(*x, beta=beta, alpha=alpha) for x in each])

    def block(i: slice, j: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        return X[i], Y[j], None if plus is None else plus[i, j]

    first, second = slice(m // 2), slice(m // 2, m)
    upper = symmetric_product(*block(first, first), beta=beta, alpha=alpha)
    lower = symmetric_product(*block(second, second), beta=beta, alpha=alpha)
    corner = _product(*block(first, second), beta, alpha)
    return torch.cat([torch.cat([upper, corner], 1), torch.cat([corner.T, lower], 1)])


def _product(X: Tensor, Y: Tensor, plus: Tensor | None, beta: float, alpha: float) -> Tensor:
    if plus is None:
        return X @ Y.mT
    product = torch.addmm if X.dim() == 2 else torch.baddbmm
    return product(plus, X, Y.mT, beta=beta, alpha=alpha)


def triangular_times(Q: Tensor, X: Tensor, *, transposed: bool = False) -> Tensor:
    """Q X for an upper triangular Q; skips products with the zeros of large matrices.

    Args:
        Q: (…, m, m); the part below the diagonal must be 0.
        X: (…, m, n).
        transposed: Qᵀ X instead.

    Example::

        >>> import torch
        >>> from functional_optim.linalg import triangular_times
        >>> triangular_times(torch.ones(2, 2).triu(), torch.tensor([[1.0], [2.0]]))
        tensor([[3.],
                [2.]])
    """
    if Q.shape[-1] <= WHOLE:
        return (Q.mT if transposed else Q) @ X
    h = Q.shape[-1] // 2
    corner, high, low = Q[..., :h, h:], X[..., :h, :], X[..., h:, :]
    top = triangular_times(Q[..., :h, :h], high, transposed=transposed)
    bottom = triangular_times(Q[..., h:, h:], low, transposed=transposed)
    if transposed:
        return torch.cat([top, corner.mT @ high + bottom], -2)
    return torch.cat([top + corner @ low, bottom], -2)


def triangular_product(T: Tensor, Q: Tensor) -> Tensor:
    """triu(T) Q for an upper triangular Q, in a third of the work for large matrices.

    Args:
        T: (…, n, n); the part below the diagonal is ignored.
        Q: (…, n, n); the part below the diagonal must be 0.

    Example::

        >>> import torch
        >>> from functional_optim.linalg import triangular_product
        >>> triangular_product(torch.ones(2, 2), torch.eye(2))
        tensor([[1., 1.],
                [0., 1.]])
    """
    if Q.shape[-1] <= WHOLE:
        return T.triu() @ Q
    h = Q.shape[-1] // 2
    T11, T12, T22 = T[..., :h, :h], T[..., :h, h:], T[..., h:, h:]
    Q11, Q12, Q22 = Q[..., :h, :h], Q[..., :h, h:], Q[..., h:, h:]
    right = T11.triu() @ Q12 + T12 @ Q22
    top = torch.cat([triangular_product(T11, Q11), right], -1)
    low = triangular_product(T22, Q22)
    return torch.cat([top, torch.nn.functional.pad(low, (h, 0))], -2)


def eigh(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The eigenvalues of symmetric matrices, ascending, and their eigenvectors as columns.

    Computed in A's dtype, float32 or float64; in float64 if float32 fails, and in traced steps on a
    CPU. LAPACK's float32 routine fails for most matrices with many zero rows: by an error, or NaN.

    Args:
        A: symmetric matrices (…, n, n).

    Returns:
        Values (…, n), vectors (…, n, n), and bools (…), False for a matrix with NaN or infinite
        elements, or if the routine returned NaN on a GPU. Its eigenvectors are then those of the
        identity, and its eigenvalues 1.

    Example::

        >>> import torch
        >>> from functional_optim.linalg import eigh
        >>> values, vectors, finite = eigh(torch.diag(torch.tensor([3.0, 1.0])))
        >>> values, bool(finite)
        (tensor([1., 3.]), True)
    """
    _check_matrix("eigh", A)
    finite = A.isfinite().flatten(-2).all(-1)
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    safe = torch.where(finite[..., None, None], A, identity)
    unseen = safe.is_cpu and modes.traced()  # a failure would be
    pair = None if unseen else _decomposed(safe)
    if pair is None:
        pair = [x.to(A.dtype) for x in torch.linalg.eigh(safe.double())]
    values, vectors = pair
    found = values.isfinite().all(-1) & vectors.isfinite().flatten(-2).all(-1)
    values = torch.where(found[..., None], values, 1.0)
    vectors = torch.where(found[..., None, None], vectors, identity)
    return values, vectors, finite & found


def _decomposed(A: Tensor) -> Sequence[Tensor] | None:
    """Values and vectors in A's dtype; None if the routine failed. On a GPU only its errors are
    seen: a step does not wait for values."""
    try:
        values, vectors = torch.linalg.eigh(A)
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        return None
    if A.is_cpu and not bool(values.isfinite().all() & vectors.isfinite().all()):
        return None
    return values, vectors


_told: set[str] = set()


def _check_matrix(name: str, x: Any) -> None:
    """Raise TypeError for anything but a matrix or a batch of matrices."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        what = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
        raise TypeError(f"{name} takes a matrix, or a batch of matrices, but got {what}.")


def tell_not_finite(name: str, finite: Tensor) -> None:
    """Warn once per process that a rule has kept its old basis.

    name: of the rule. finite: bools, False for a matrix with NaN or infinite elements. No warning
    is issued if values are not known, as in a traced step.

    Example::

        >>> import torch
        >>> from functional_optim.linalg import eigh, tell_not_finite
        >>> _, _, finite = eigh(torch.eye(2))
        >>> tell_not_finite("my_rule", finite)
    """
    if name in _told or modes.traced() or finite.device.type != "cpu" or bool(finite.all()):
        return
    _told.add(name)
    callers.warn(
        f"{name} found NaN or infinite values in the matrix whose basis it would renew, and "
        "keeps the old basis; look for gradients that are not finite, or put the recipe into "
        "apply_if_finite."
    )
