"""Linear solvers of (JᵀJ + μ D²) p = −g, for one problem or many, in float64.

J is stored as its transpose, `columns` of shape (..., n, m): n parameters, m residuals. The result
of a problem does not depend on the others: up to `UNROLLED` parameters all operations are
element-wise, and above that each matrix is padded, so that all have the same alignment. (The order
of summation in some of MKL's kernels depends on it.)

Kernel form: Rasmussen, Williams, "Gaussian Processes for Machine Learning" (2006), (A.11). LSMR:
Fong, Saunders, "LSMR: An iterative algorithm for sparse least-squares problems", SIAM J. Sci.
Comput. 33 (2011), https://arxiv.org/abs/1006.0758, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_optim.core import modes

Kind = Literal["auto", "cholesky", "qr", "kernel", "cg", "lsmr"]
KINDS = ("auto", "cholesky", "qr", "kernel", "cg", "lsmr")

UNROLLED = 6
"""Parameters up to which Gram matrices are decomposed element by element, over all problems."""
WHOLE = 256
"""Rows up to which both halves of a symmetric product are computed: faster than copies."""
PAD = 8
"""Matrices are padded to multiples of this: 64 bytes of float64."""
SMALL = 1e-100
"""Instead of a scale that is zero."""
TOLERANCE = 1e-10
"""Relative residual at which CG and LSMR stop."""
ROUNDED = 4
"""CG also stops at this multiple of the rounding of products, whose errors would then grow in
directions of little curvature."""
MOST = 500
"""Maximum number of iterations of CG and LSMR."""


class System(NamedTuple):
    """The linear problem. A solver reads the parts that it needs.

    r: residuals, (..., m). g: the gradient Jᵀr, (..., n). gram: JᵀJ, (..., n, n), or None.
    columns: Jᵀ, (..., n, m), or None. products: v ↦ J v and u ↦ Jᵀ u without a batch, or None.
    eps: relative rounding of the products.
    """

    r: Tensor
    g: Tensor
    gram: Tensor | None = None
    columns: Tensor | None = None
    products: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None
    eps: float = 0.0

    def along(self, p: Tensor) -> Tensor:
        """pᵀ JᵀJ p: (...,)."""
        if self.gram is not None:
            return ((self.gram * p.unsqueeze(-2)).sum(-1) * p).sum(-1)
        u = self.push(p)
        return (u * u).sum(-1)

    def predicted(self, p: Tensor) -> Tensor:
        """The decrease of ½ ‖r + J p‖² by a step p: (...,)."""
        return -(self.g * p).sum(-1) - 0.5 * self.along(p)

    def push(self, v: Tensor) -> Tensor:
        """J v."""
        if self.products is not None:
            return self.products[0](v)
        assert self.columns is not None
        return times_columns(self.columns, v)

    def pull(self, u: Tensor) -> Tensor:
        """Jᵀ u."""
        if self.products is not None:
            return self.products[1](u)
        assert self.columns is not None
        return gradient(self.columns, u)


def choose(kind: Kind, n: int, m: int) -> str:
    """The solver of "auto": "kernel" for fewer residuals than parameters."""
    if kind == "auto":
        return "kernel" if m < n else "cholesky"
    return kind


def check_kind(kind: Any) -> None:
    """Raise ValueError for an unknown linear solver."""
    if kind not in KINDS:
        raise ValueError(
            f"unknown linear_solver {kind!r}; choose one of {', '.join(map(repr, KINDS))}."
        )


def solve(kind: str, system: System, mu: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """p with (JᵀJ + μ D²) p = −g, and whether it was found.

    Args:
        kind: one of `KINDS`, except "auto".
        system: the problem.
        mu: damping, (...,), ≥ 0.
        D: scales of the parameters, (..., n), > 0.

    Returns:
        p, (..., n), and a bool for each problem, (...,).
    """
    p = SOLVERS[kind](system, mu, D)
    ok = p.isfinite().all(-1)
    return torch.where(ok.unsqueeze(-1), p, 0.0), ok


def rounding(x: Tensor, r: Tensor) -> float:
    """The relative rounding of products with the Jacobian of residuals r of parameters x."""
    return max(torch.finfo(x.dtype).eps, torch.finfo(r.dtype).eps)


def none_of(which: Tensor) -> bool:
    """Whether no problem is in a mask, so that work for them can be left out. False where
    operations are recorded."""
    unknown = torch.compiler.is_compiling() or modes.recorded()
    return not unknown and not bool(which.any())


# ---------------------------------------------------------------- products


def norm(x: Tensor) -> Tensor:
    """The Euclidean norm along the last dimension."""
    return (x * x).sum(-1).sqrt()


def padded(x: Tensor, *dims: int) -> Tensor:
    """x padded with zeros, so that its last dimensions (all of `dims`) are multiples of PAD.

    A single problem, also one that is recorded, is not padded.
    """
    if x.dim() == len(dims) or modes.recorded():
        return x
    widths = [-x.shape[dim] % PAD if dim in dims else 0 for dim in (-1, -2)]
    if not any(widths):
        return x.contiguous()
    return F.pad(x, (0, widths[0], 0, widths[1])) if x.dim() > 1 else F.pad(x, (0, widths[0]))


def gradient(columns: Tensor, r: Tensor) -> Tensor:
    """Jᵀ r: (..., n). Without torch's products in batches, which differ from those of single
    ones."""
    if columns.dim() == 2:
        return columns @ r
    if columns.shape[-2] <= UNROLLED:
        return torch.stack([(row * r).sum(-1) for row in columns.unbind(-2)], -1)
    return (columns * r.unsqueeze(-2)).contiguous().sum(-1)


def times_columns(columns: Tensor, v: Tensor) -> Tensor:
    """J v: (..., m)."""
    m = columns.shape[-1]
    wide = padded(columns, -1, -2).mT @ padded(v, -1).unsqueeze(-1)
    return wide[..., :m, 0]


def gram(columns: Tensor) -> Tensor:
    """JᵀJ: (..., n, n)."""
    n = columns.shape[-2]
    if n <= UNROLLED:
        rows = columns.unbind(-2)
        known = {(i, j): (rows[i] * rows[j]).sum(-1) for i in range(n) for j in range(i + 1)}
        flat = [known[max(i, j), min(i, j)] for i in range(n) for j in range(n)]
        return torch.stack(flat, -1).unflatten(-1, (n, n))
    return _symmetric(padded(columns, -1, -2))[..., :n, :n]


def _symmetric(A: Tensor) -> Tensor:
    """A Aᵀ. Of a large one, blocks above the diagonal are copied."""
    n = A.shape[-2]
    if n <= WHOLE:
        return A @ A.mT
    half = n // 2 // PAD * PAD
    above, below = A[..., :half, :], A[..., half:, :]
    cross = below @ above.mT
    top = torch.cat([_symmetric(above), cross.mT], -1)
    return torch.cat([top, torch.cat([cross, _symmetric(below)], -1)], -2)


# ---------------------------------------------------------------- direct


def cholesky(system: System, mu: Tensor, D: Tensor) -> Tensor:
    """By JᵀJ, scaled to a unit diagonal; NaN if it is not positive definite."""
    G = system.gram
    assert G is not None
    d = mu.unsqueeze(-1) * D * D
    diagonal = G.diagonal(dim1=-2, dim2=-1) + d
    s = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    n = G.shape[-1]
    if n <= UNROLLED:
        return s * _unrolled(G, d, s, -s * system.g)
    A = G * s.unsqueeze(-1) * s.unsqueeze(-2)
    A = A + torch.diag_embed(d * s * s)
    return s * spd_solve(A, -s * system.g)


def spd_solve(A: Tensor, b: Tensor) -> Tensor:
    """A⁻¹ b of positive definite matrices: (..., n); NaN for others."""
    n = A.shape[-1]
    wide = padded(A, -1, -2)
    if wide.shape[-1] > n:
        tail = torch.arange(wide.shape[-1], device=A.device) >= n
        wide = wide + torch.diag(tail.to(A.dtype))
    L, info = torch.linalg.cholesky_ex(wide)
    z = torch.linalg.solve_triangular(L, padded(b, -1).unsqueeze(-1), upper=False)
    p = torch.linalg.solve_triangular(L.mT, z, upper=True)[..., :n, 0]
    return torch.where((info == 0).unsqueeze(-1), p, float("nan"))


def _unrolled(G: Tensor, d: Tensor, s: Tensor, b: Tensor) -> Tensor:
    """(S (G + diag d) S)⁻¹ b by operations on single elements of all problems."""
    n = b.shape[-1]
    S, damping, right = s.unbind(-1), d.unbind(-1), b.unbind(-1)
    L: list[list[Tensor]] = []
    z: list[Tensor] = []
    for i in range(n):
        row: list[Tensor] = []
        for j in range(i + 1):
            a = G[..., i, j] + damping[i] if i == j else G[..., i, j]
            a = a * S[i] * S[j]
            for k in range(j):
                a = a - row[k] * (row[k] if i == j else L[j][k])
            row.append(a.sqrt() if i == j else a / L[j][j])
        L.append(row)
        y = right[i]
        for k in range(i):
            y = y - row[k] * z[k]
        z.append(y / row[i])
    p: list[Tensor] = z
    for i in reversed(range(n)):
        x = z[i]
        for k in range(i + 1, n):
            x = x - L[k][i] * p[k]
        p[i] = x / L[i][i]
    return torch.stack(p, -1)


def qr(system: System, mu: Tensor, D: Tensor) -> Tensor:
    """By a decomposition of J above √μ D, which does not square its condition."""
    columns = system.columns
    assert columns is not None
    n = D.shape[-1]
    tail = torch.diag_embed(mu.sqrt().unsqueeze(-1) * D)
    A = torch.cat([columns, tail], -1)
    size = norm(A)
    s = 1 / torch.where(size > 0, size, 1.0)
    rows = padded(A * s.unsqueeze(-1), -1).mT
    b = F.pad(-system.r, (0, rows.shape[-2] - system.r.shape[-1]))
    Q, R = torch.linalg.qr(rows)
    y = (Q * b.unsqueeze(-1)).mT.contiguous().sum(-1)
    small = R.diagonal(dim1=-2, dim2=-1).abs() <= 1e-15 * n
    p = torch.linalg.solve_triangular(R, y.unsqueeze(-1), upper=True)[..., 0]
    return torch.where(small.any(-1, keepdim=True), float("nan"), s * p)


def kernel(system: System, mu: Tensor, D: Tensor) -> Tensor:
    """By (J D⁻² Jᵀ + μ) of the residuals' size: p = −D⁻² Jᵀ (J D⁻² Jᵀ + μ)⁻¹ r."""
    columns = system.columns
    assert columns is not None
    W = columns / D.unsqueeze(-1)
    K = gram(W.mT.contiguous())
    diagonal = K.diagonal(dim1=-2, dim2=-1) + mu.unsqueeze(-1)
    s = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    A = K * s.unsqueeze(-1) * s.unsqueeze(-2)
    A = A + torch.diag_embed(mu.unsqueeze(-1) * s * s)
    y = s * spd_solve(A, -s * system.r)
    return gradient(W, y) / D


# ---------------------------------------------------------------- iterative


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def cg(system: System, mu: Tensor, D: Tensor) -> Tensor:
    """By conjugate gradients on the scaled normal equations, up to 500 products with J and Jᵀ."""
    damping = mu.unsqueeze(-1)
    b = -system.g / D
    q, rest = torch.zeros_like(b), b
    direction, size = rest, _dot(rest, rest)
    goal = size * max(TOLERANCE, ROUNDED * system.eps) ** 2
    for _ in range(min(MOST, 2 * b.shape[-1])):
        going = size > goal
        if not modes.traced() and none_of(going):
            break
        product = system.pull(system.push(direction / D)) / D + damping * direction
        curvature = _dot(direction, product)
        step = torch.where(going & (curvature > 0), size / curvature, 0.0)
        q = q + step * direction
        rest = rest - step * product
        new = _dot(rest, rest)
        direction = torch.where(going, rest + (new / size) * direction, direction)
        size = torch.where(going, new, size)
    return q / D


def lsmr(system: System, mu: Tensor, D: Tensor) -> Tensor:
    """By LSMR on J D⁻¹ above √μ, up to 500 products with J and Jᵀ."""
    damp = mu.sqrt().unsqueeze(-1)
    u, beta = _unit(-system.r)
    v, alpha = _unit(system.pull(u) / D)
    zetabar, alphabar = alpha * beta, alpha
    rho = rhobar = cbar = torch.ones_like(alpha)
    sbar = torch.zeros_like(alpha)
    h, hbar, x = v, torch.zeros_like(v), torch.zeros_like(v)
    goal = zetabar.abs() * TOLERANCE
    for _ in range(min(MOST, 2 * v.shape[-1])):
        going = zetabar.abs() > goal
        if not modes.traced() and none_of(going):
            break
        u, beta = _unit(system.push(v / D) - alpha * u)
        v, alpha = _unit(system.pull(u) / D - beta * v)
        hat = torch.hypot(alphabar, damp)
        rho_old, rho = rho, torch.hypot(hat, beta)
        c, s = hat / rho, beta / rho
        theta, alphabar = s * alpha, c * alpha
        rhobar_old, thetabar = rhobar, sbar * rho
        rhobar = torch.hypot(cbar * rho, theta)
        cbar, sbar = cbar * rho / rhobar, theta / rhobar
        zeta, zetabar = cbar * zetabar, torch.where(going, -sbar * zetabar, zetabar)
        hbar = h - (thetabar * rho / (rho_old * rhobar_old)) * hbar
        x = torch.where(going, x + (zeta / (rho * rhobar)) * hbar, x)
        h = v - (theta / rho) * h
    return x / D


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as a vector of length 1 (or 0), and its length."""
    size = norm(x).unsqueeze(-1)
    return torch.where(size > 0, x / size, 0.0), size


SOLVERS: dict[str, Callable[[System, Tensor, Tensor], Tensor]] = {
    "cholesky": cholesky,
    "qr": qr,
    "kernel": kernel,
    "cg": cg,
    "lsmr": lsmr,
}
