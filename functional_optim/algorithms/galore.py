"""GaLore: Adam on a few directions of the gradient, which are recomputed periodically.

Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection",
https://arxiv.org/abs/2403.03507, Algorithm 2, as in https://github.com/jiaweizzhao/GaLore.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import linalg, numeric
from functional_optim.algorithms.adam import Betas, check_betas, scale_by_adam
from functional_optim.combinators.as_matrix import Views, seen
from functional_optim.combinators.partition import partition
from functional_optim.core.base import GradientTransformation, real_only
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.rule import Runs
from functional_optim.transforms.descent import descent
from functional_optim.transforms.orthogonal import matrix_rule
from functional_optim.transforms.rules import SQUARES, root


class GaloreSlots(NamedTuple):
    exp_avg: Tensor
    """Average M of the projected gradient: (longer side, r)."""
    exp_avg_sq: Tensor
    """Average V of its square: (longer side, r)."""
    projector: Tensor
    """P, whose r columns are the basis of the projection: (shorter side, r)."""


@factory
def scale_by_galore(
    rank: int = 128,
    update_proj_gap: int = 200,
    scale: numeric.Hyper = 0.25,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-6,
) -> Leafwise:
    """Adam's update of the gradient projected on its first singular vectors, projected back.

    The vectors are those of the shorter side, computed in the first step and then every
    `update_proj_gap` steps. The averages are not changed when the vectors change; each vector has
    the sign that is closer to the previous vector.

    Args:
        rank: number of vectors, ≥ 1, at most the shorter side. A Python number.
        update_proj_gap: steps from one decomposition to the next, ≥ 1.
        scale: factor of the update, ≥ 0.
        betas: decay rates of Adam's averages, each in [0, 1).
        eps: added to the root before it is corrected for bias, ≥ 0.

        `scale`, `betas` and `eps` may also be 0-dim tensors or schedules. The defaults are those of
            the authors' examples.

    State: `exp_avg`, `exp_avg_sq` and `projector`, see `GaloreSlots`.

    Raises:
        ValueError: for hyperparameters out of range; from init, for a parameter with fewer than two
            dimensions, or with three that `as_matrix` does not describe.
        TypeError: from init, for a complex parameter.

    Warns:
        RuntimeWarning: once, if a gradient that is not finite would determine new vectors; the old
            ones are kept.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_galore(rank=1, scale=1.0)
        >>> w = torch.zeros(2, 2)
        >>> u, state = tx.update(torch.tensor([[5.0, 0.0], [0.0, 1.0]]), tx.init(w), w)
        >>> u.round(decimals=3)
        tensor([[1., 0.],
                [0., 0.]])
        >>> state.slots["exp_avg"].shape
        torch.Size([2, 1])
    """
    numeric.check_count("scale_by_galore", 1, rank=rank, update_proj_gap=update_proj_gap)
    numeric.check_range("scale_by_galore", "of 0 or more", eps=eps, scale=scale)
    hyper: dict[str, Any] = {"betas": check_betas(betas), "eps": eps, "scale": scale}
    hyper["update_proj_gap"] = update_proj_gap

    def init(p: Tensor) -> GaloreSlots:
        return GaloreSlots(*low_rank(p, rank))

    def scalars(t, *, betas, eps, scale):
        b1, b2 = betas
        correction = numeric.sqrt(1 - b2**t) / (1 - b1**t)
        return 1 - b1, 1 - b2, correction, eps, scale

    def step(X: Tensor, P: Tensor, x: GaloreSlots, *numbers: Any) -> tuple[Tensor, GaloreSlots]:
        a1, a2, correction, eps, scale = numbers
        R = X @ P
        M, V = x.exp_avg.lerp(R, a1), x.exp_avg_sq.lerp(R * R, a2)
        N = correction * M / (root(V) + eps)
        return scale * (N @ P.mT), GaloreSlots(M, V, P)

    def plain(G: Tensor, x: GaloreSlots, p: Any, *numbers: Any) -> tuple[Tensor, GaloreSlots]:
        U, x = step(tall(G), x.projector, x, *numbers)
        return tall(U, like=G), x

    def renew(G: Tensor, x: GaloreSlots, p: Any, *numbers: Any) -> tuple[Tensor, GaloreSlots]:
        X, r = tall(G), x.projector.shape[-1]
        _, vectors, finite = linalg.eigh(linalg.symmetric_product(X.mT, X.mT))
        linalg.tell_not_finite("scale_by_galore", finite)
        first = vectors.flip(-1)[..., :r].contiguous()
        # the sign of a vector that is consistent with the averages
        turned = (first * x.projector).sum(-2, keepdim=True) < 0
        first = torch.where(turned, -first, first)
        U, x = step(X, torch.where(finite[..., None, None], first, x.projector), x, *numbers)
        return tall(U, like=G), x

    runs = Runs(choose=due, start=(renew, ["projector"]))
    return matrix_rule("scale_by_galore", init, [plain, renew], scalars, hyper, SQUARES, runs)


def due(t: Any, *, update_proj_gap: Any) -> Any:
    """The variant for step t: 1, with a new projector, every `update_proj_gap` steps."""
    return numeric.where((t - 1) % update_proj_gap == 0, 1, 0)


def tall(G: Tensor, like: Tensor | None = None) -> Tensor:
    """A matrix with the shorter side last; or the inverse, for another one of this shape."""
    m, n = (G if like is None else like).shape[-2:]
    return G if m >= n else G.mT


def low_rank(p: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros for two averages of a projected matrix, and for its projector."""
    longer, shorter = max(p.shape), min(p.shape)
    r = min(rank, shorter)
    zero = p.new_zeros(longer, r)
    return zero, torch.zeros_like(zero), p.new_zeros(shorter, r)


def of_matrices(
    name: str,
    adapt: Leafwise,
    lr: numeric.Hyper,
    betas: Betas,
    eps: numeric.Hyper,
    weight_decay: numeric.Hyper,
    maximize: bool,
) -> GradientTransformation:
    """A transform for matrices and kernels, with Adam for all others, a learning rate and decay."""
    real = real_only(name)

    def label(path: str, p: Tensor) -> str:
        real(p)
        return "matrix" if p.dim() >= 2 else "other"

    parts = {"matrix": adapt, "other": scale_by_adam(betas, eps)}
    both: Any = partition(parts, label)
    return descent(both, lr, weight_decay, decoupled=True, maximize=maximize)


@factory
def galore(
    lr: numeric.Hyper = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-6,
    weight_decay: numeric.Hyper = 0.0,
    rank: int = 128,
    update_proj_gap: int = 200,
    scale: numeric.Hyper = 0.25,
    *,
    maximize: bool = False,
    views: Views | torch.nn.Module | None = None,
) -> GradientTransformation:
    """GaLore: Adam on the first singular vectors of gradients for matrices, AdamW for all others.

    Embeddings and heads are matrices, too; exclude them by `partition`, as the authors do.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the averages, each in [0, 1).
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: decoupled decay, ≥ 0.
        rank: number of vectors, ≥ 1, at most the shorter side. A Python number.
        update_proj_gap: steps from one decomposition to the next, ≥ 1.
        scale: factor of the updates of matrices, ≥ 0.
        maximize: ascend instead of descend.
        views: descriptions of stacks of matrices, kernels and fused projections: from path patterns
            to arguments of `as_matrix`, or the model. None: parameters with two dimensions are
            matrices, those with four and five are kernels.

        Hyperparameters may also be 0-dim tensors or schedules, except rank and update_proj_gap.
            The defaults of the last three are those of the authors' examples.

    State: of matrices `exp_avg`, `exp_avg_sq` and `projector`, see `scale_by_galore`; of others
    `exp_avg` and `exp_avg_sq`, like them.

    Raises:
        ValueError: for hyperparameters out of range.
        TypeError: from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.galore(lr=0.1, rank=1, scale=1.0)
        >>> w = torch.eye(2)
        >>> updates, state = tx.update(torch.tensor([[5.0, 0.0], [0.0, 1.0]]), tx.init(w), w)
        >>> fo.apply_updates(w, updates)
        tensor([[0.9000, 0.0000],
                [0.0000, 1.0000]])
    """
    adapt = scale_by_galore(rank, update_proj_gap, scale, betas, eps)
    return seen(of_matrices("galore", adapt, lr, betas, eps, weight_decay, maximize), views)
