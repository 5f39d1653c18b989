"""PSGD Kron: gradients whitened by a Kronecker product of triangular matrices.

Li, "Preconditioned Stochastic Gradient Descent", https://arxiv.org/abs/1512.04202; Pooladzandi,
Li, "Curvature-Informed SGD via General Purpose Lie-Group Preconditioners",
https://arxiv.org/abs/2402.04553. Followed is
https://github.com/evanatyourservice/kron_torch, kron_torch/kron.py at 884427c.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric, schedules
from functional_optim.combinators.as_matrix import Views, seen
from functional_optim.core import base, draws, randomness
from functional_optim.core.base import GradientTransformation
from functional_optim.core.calls import check_choice
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.rule import Runs
from functional_optim.core.storage import Storage, wide_dtype
from functional_optim.core.views import MATRICES
from functional_optim.linalg import symmetric_product, triangular_product, triangular_times
from functional_optim.transforms.averaging import ema
from functional_optim.transforms.scaling import check_lr, scale_by_lr
from functional_optim.transforms.weight_decay import add_decayed_weights

MemorySaveMode = Literal["smart_one_diag", "one_diag", "all_diag"] | None
"""Sides that have a diagonal factor independently of their size: see `scale_by_psgd_kron`."""

MODES = (None, "smart_one_diag", "one_diag", "all_diag")

DAMPING = torch.finfo(torch.float32).eps ** 0.5
"""The relative size of the noise that is added to the target of the factors."""

BALANCED_EVERY = 100
"""Number of renewals after which the factors are scaled to equal size; at random in the source."""


class KronSlots(NamedTuple):
    Q_left: Tensor
    """Upper triangular factor of the rows, (m, m), or its diagonal, (m,)."""
    Q_right: Tensor | None
    """That of the columns, (n, n) or (n,); none for a vector."""


class KronCount(NamedTuple):
    steps_since_renewal: int
    renewals: int


class Factor(NamedTuple):
    """Q of several matrices (k, m, n). right: whether it acts on their columns."""

    Q: Tensor
    """Upper triangular, or its diagonal as a column."""
    triangular: bool
    right: bool

    def times(self, X: Tensor) -> Tensor:
        """Q X, or X Qᵀ."""
        if self.right:
            return X @ self.Q.mT if self.triangular else X * self.Q.mT
        return triangular_times(self.Q, X) if self.triangular else self.Q * X

    def whitened(self, X: Tensor) -> Tensor:
        """Qᵀ Q X, or X Qᵀ Q."""
        if not self.triangular:
            return self.times(self.times(X))
        if self.right:
            return self.times(X) @ self.Q
        return triangular_times(self.Q, self.times(X), transposed=True)

    def divided(self, X: Tensor) -> Tensor:
        """Q⁻ᵀ X, or X Q⁻¹."""
        if not self.triangular:
            return X / (self.Q.mT if self.right else self.Q)
        if self.right:
            return torch.linalg.solve_triangular(self.Q, X, upper=True, left=False)
        return torch.linalg.solve_triangular(self.Q.mT, X, upper=False)

    def learned(self, A: Tensor, B: Tensor, precond_lr: Any) -> tuple[Tensor, Tensor]:
        """Q after a step that brings A Aᵀ to B Bᵀ, and the norm by which the step is divided."""
        if self.right:
            A, B = A.mT, B.mT
        tiny = torch.finfo(A.dtype).tiny
        if not self.triangular:
            a, b = (A * A).sum(-1, keepdim=True), (B * B).sum(-1, keepdim=True)
            norm = (a + b).amax(-2, keepdim=True)
            return self.Q - precond_lr * (a - b) / norm.clamp(min=tiny) * self.Q, norm
        AA, BB = symmetric_product(A, A), symmetric_product(B, B)
        norm = norm_bound(AA + BB)
        return self.Q - (precond_lr / norm.clamp(min=tiny)) * triangular_product(
            AA - BB, self.Q
        ), norm


@factory
def scale_by_psgd_kron(
    b1: numeric.Hyper = 0.9,
    preconditioner_update_probability: numeric.Hyper | None = None,
    max_size_triangular: int = 8192,
    min_ndim_triangular: int = 2,
    memory_save_mode: MemorySaveMode = None,
    precond_lr: numeric.Hyper = 0.1,
    clip_rms: numeric.Hyper = 1.1,
    *,
    seed: int = 0,
) -> Leafwise:
    """The average gradient, whitened by a Kronecker product that is learned, and clipped.

    Args:
        b1: decay rate of the average m, in [0, 1).
        preconditioner_update_probability: the fraction of steps in which the factors are learned,
            in (0, 1]: they are as soon as 1 / p steps have passed since the last time. None: 1 for
            500 steps, then e^(−0.001 (t − 500)), down to 0.03.
        max_size_triangular: sides longer than this have a diagonal factor.
        min_ndim_triangular: parameters with fewer dimensions have diagonal factors: vectors, if 2.
        memory_save_mode: None: all other factors are triangular. "one_diag": the factor of the
            longest side is diagonal, for two equal sides the second; "smart_one_diag": the same, if
            it is longer than the other; "all_diag": all are diagonal.
        precond_lr: learning rate of the factors, ≥ 0.
        clip_rms: largest root mean square of the update of a matrix, > 0.
        seed: of the normal values for fitting the factors, ≥ 0. They are functions of the seed, the
            step, and the shape: matrices of one shape share them.

    Kernels of convolutions are matrices (out, in · height · width), unless `as_matrix` describes
    them. Defaults are the source's.

    State: `ema`, like the parameters; `Q_left`, (m, m) or (m,), and `Q_right`, (n, n) or (n,), in
    float32 for half types; the counts `steps_since_renewal` and `renewals`.

    Raises:
        ValueError: for hyperparameters out of range, or an unknown mode.
        TypeError: from init, for a complex parameter.

    Source: https://github.com/evanatyourservice/kron_torch.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_psgd_kron()
        >>> w = torch.zeros(2, 2)
        >>> u, state = tx.update(torch.diag(torch.tensor([1.0, 9.0])), tx.init(w), w)
        >>> bool(u[0, 0] / u[1, 1] > 1 / 9)  # less uneven than the gradient
        True
    """
    name = "scale_by_psgd_kron"
    share = preconditioner_update_probability
    if share is None:
        share = schedules.exponential_decay(1.0, 1000, math.exp(-1.0), 500, end_value=0.03)
    numeric.check_range(name, "in (0, 1]", preconditioner_update_probability=share)
    numeric.check_range(name, "of 0 or more", precond_lr=precond_lr)
    numeric.check_range(name, "positive", clip_rms=clip_rms)
    numeric.check_count(name, 0, max_size_triangular=max_size_triangular, seed=seed)
    numeric.check_count(name, 0, min_ndim_triangular=min_ndim_triangular)
    check_choice(name, MODES, memory_save_mode=memory_save_mode)
    real = base.real_only(name)

    def triangular(*shape: int) -> list[bool]:
        """Whether the factor is, for each side of a matrix or a vector."""
        diagonal = [memory_save_mode == "all_diag"] * len(shape)
        if memory_save_mode == "one_diag" or (
            memory_save_mode == "smart_one_diag" and len({*shape}) == 2
        ):
            diagonal[-1 if shape[-1] == max(shape) else 0] = True
        small = len(shape) < min_ndim_triangular
        sides = zip(diagonal, shape, strict=True)
        return [not (x or small or n == 1 or n > max_size_triangular) for x, n in sides]

    def init(p: Tensor) -> KronSlots:
        real(p)
        shape = tuple(p.shape) or (1,)
        like = {"dtype": wide_dtype(p), "device": p.device}
        first = [
            torch.eye(n, **like) if full else torch.ones(n, **like)
            for n, full in zip(shape, triangular(*shape), strict=True)
        ]
        return KronSlots(first[0], first[1] if len(first) > 1 else None)

    def scalars(t, count, *, preconditioner_update_probability, precond_lr, clip_rms):
        due = is_due(count, preconditioner_update_probability)
        since = numeric.where(due, 0.0, count.steps_since_renewal + 1)
        renewals = count.renewals + numeric.where(due, 1.0, 0.0)
        return (precond_lr, t, clip_rms), KronCount(since, renewals)

    def choose(t, count, *, preconditioner_update_probability):
        uneven = numeric.where(count.renewals % BALANCED_EVERY == BALANCED_EVERY - 1, 2, 1)
        return numeric.where(is_due(count, preconditioner_update_probability), uneven, 0)

    def opened(u: Tensor, x: KronSlots) -> tuple[Tensor, list[Factor]]:
        """Matrices (k, m, n) and their factors. A vector is a column, and has one factor."""
        if x.Q_right is None:
            m, n = x.Q_left.shape[-1], 1
            known = triangular(m)
        else:
            m, n = u.shape[-2:]
            known = triangular(m, n)
        factors = [
            Factor(q.reshape(-1, size, size if full else 1), full, i == 1)
            for i, (q, size, full) in enumerate(zip(factors_of(x), (m, n), known, strict=False))
        ]
        return u.reshape(-1, m, n), factors

    def closed(factors: list[Factor], x: KronSlots) -> KronSlots:
        """The inverse for the factors."""
        left, *right = [f.Q.reshape(q.shape) for f, q in zip(factors, factors_of(x), strict=True)]
        return KronSlots(left, right[0] if right else None)

    def plain(u: Tensor, x: KronSlots, p: Any, *numbers: Any) -> tuple[Tensor, KronSlots]:
        if u.numel() == 0:
            return u, x
        mu, factors = opened(u, x)
        return whitened(mu, factors, numbers[-1]).reshape(u.shape), x

    def whitened(mu: Tensor, factors: list[Factor], clip_rms: Any) -> Tensor:
        """Matrices (k, m, n) whitened, each with a root mean square of at most clip_rms."""
        for f in factors:
            mu = f.whitened(mu)
        square = (mu * mu).mean((-2, -1), keepdim=True)  # whose root has no derivative at 0
        return mu * (square / (clip_rms * clip_rms)).clamp(min=1.0).rsqrt()

    def renew(
        u: Tensor, x: KronSlots, p: Any, precond_lr: Any, t: Any, clip_rms: Any
    ) -> tuple[Tensor, KronSlots]:
        if u.numel() == 0:
            return u, x
        mu, factors = opened(u, x)
        shape = tuple(mu.shape[-2:])
        key = draws.stream(torch.full((), seed, device=u.device), count_of(t), *shape)
        V = randomness.normal(key, shape, mu.dtype, mu.device)
        size = mu.abs().mean((-2, -1), keepdim=True)
        A, B = mu + DAMPING * size * V, V
        for f in factors:
            A, B = f.times(A), f.divided(B)
        found = [f.learned(A, B, precond_lr) for f in factors]
        good = size > 0
        for _, norm in found:
            good = good & norm.isfinite()
        factors = [
            f._replace(Q=torch.where(good, Q, f.Q))
            for f, (Q, _) in zip(factors, found, strict=True)
        ]
        return whitened(mu, factors, clip_rms).reshape(u.shape), closed(factors, x)

    def balance(u: Tensor, x: KronSlots, p: Any, *numbers: Any) -> tuple[Tensor, KronSlots]:
        """`renew` with factors that were scaled to equal size."""
        if u.numel() == 0 or x.Q_right is None:
            return renew(u, x, p, *numbers)
        _, (left, right) = opened(u, x)
        a, b = [f.Q.abs().amax((-2, -1), keepdim=True) for f in (left, right)]
        ratio = (b / a).sqrt()
        even = [left._replace(Q=left.Q * ratio), right._replace(Q=right.Q / ratio)]
        return renew(u, closed(even, x), p, *numbers)

    hyper = {
        **{"preconditioner_update_probability": share, "precond_lr": precond_lr},
        "clip_rms": clip_rms,
    }
    whiten = leafwise(
        init,
        [plain, renew, balance],
        scalars,
        carry=KronCount(0, 0),
        hyper=hyper,
        runs=Runs(choose=choose, shared=True, batched=True),
        storage=Storage(view=MATRICES),
        name=name,
    )
    return Leafwise((*ema(b1).placements, *whiten.placements))


def is_due(count: KronCount, share: Any) -> Any:
    """Whether the factors are learned in this step."""
    return count.steps_since_renewal + 1 >= numeric.divide(1.0, share)


def factors_of(x: KronSlots) -> list[Tensor]:
    """The factors, without None."""
    return [q for q in x if q is not None]


def count_of(t: Any) -> Any:
    """The number of a step as the counter of a stream."""
    return t.to(torch.int64) if isinstance(t, Tensor) else int(t)


def norm_bound(S: Tensor) -> Tensor:
    """A lower bound of the spectral norms of symmetric matrices (k, n, n), as (k, 1, 1).

    One step of the power method from the longest row.
    """
    largest = S.abs().amax((-2, -1), keepdim=True)
    S = S / largest.clamp(min=torch.finfo(S.dtype).tiny)
    i = (S * S).sum(-1).argmax(-1)
    x = torch.take_along_dim(S, i[..., None, None], -2) @ S
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    x = x / length.clamp(min=torch.finfo(S.dtype).tiny) @ S
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True) * largest


@factory
def psgd_kron(
    lr: numeric.Hyper = 3e-4,
    b1: numeric.Hyper = 0.9,
    weight_decay: numeric.Hyper = 0.0,
    preconditioner_update_probability: numeric.Hyper | None = None,
    max_size_triangular: int = 8192,
    min_ndim_triangular: int = 2,
    memory_save_mode: MemorySaveMode = None,
    precond_lr: numeric.Hyper = 0.1,
    clip_rms: numeric.Hyper = 1.1,
    *,
    seed: int = 0,
    views: Views | torch.nn.Module | None = None,
) -> GradientTransformation:
    """PSGD Kron: the average gradient, whitened by a Kronecker product that is learned.

    Args:
        lr: learning rate, ≥ 0.
        b1: decay rate of the average m, in [0, 1).
        weight_decay: decoupled decay, ≥ 0, of parameters with two dimensions or more.
        preconditioner_update_probability: the fraction of steps in which the factors are learned,
            in (0, 1]: they are as soon as 1 / p steps have passed since the last time. None: 1 for
            500 steps, then e^(−0.001 (t − 500)), down to 0.03.
        max_size_triangular: sides longer than this have a diagonal factor.
        min_ndim_triangular: parameters with fewer dimensions have diagonal factors: vectors, if 2.
        memory_save_mode: None: all other factors are triangular. "one_diag": the factor of the
            longest side is diagonal, for two equal sides the second; "smart_one_diag": the same, if
            it is longer than the other; "all_diag": all are diagonal.
        precond_lr: learning rate of the factors, ≥ 0.
        clip_rms: largest root mean square of the update of a matrix, > 0.
        seed: of the normal values for fitting the factors, ≥ 0.
        views: descriptions of stacks of matrices, kernels and fused projections: from path patterns
            to arguments of `as_matrix`, or the model. None: parameters with two dimensions are
            matrices, those with four and five are kernels.

        Hyperparameters may also be 0-dim tensors or schedules. Defaults are the source's.

    State: `ema`, like the parameters; `Q_left`, (m, m) or (m,), and `Q_right`, (n, n) or (n,), in
    float32 for half types; the counts `steps_since_renewal` and `renewals`.

    Raises:
        ValueError: for hyperparameters out of range, or an unknown mode.
        TypeError: from init, for a complex parameter.

    Source: https://github.com/evanatyourservice/kron_torch.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.psgd_kron(lr=0.1)
        >>> w = torch.ones(2, 2)
        >>> updates, state = tx.update(torch.eye(2), tx.init(w), w)
        >>> bool((fo.apply_updates(w, updates).diag() < 1).all())
        True
    """
    check_lr(lr)
    whiten = scale_by_psgd_kron(
        b1, preconditioner_update_probability, max_size_triangular, min_ndim_triangular,
        memory_save_mode, precond_lr, clip_rms, seed=seed,
    )  # fmt: skip
    decay = add_decayed_weights(weight_decay, mask=lambda path, p: p.dim() >= 2)
    return seen(chain(whiten, decay, scale_by_lr(lr)), views)
