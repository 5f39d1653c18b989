"""APOLLO: scales rows of the gradient by Adam's factors for a random projection.

Zhu et al., "APOLLO: SGD-like Memory, AdamW-level Performance", https://arxiv.org/abs/2412.05270,
Algorithm 1, as in https://github.com/zhuhanqing/APOLLO. The bound on the growth of norms: Chen et
al., "Fira", https://arxiv.org/abs/2410.01623, section 3.3.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas, check_betas
from functional_optim.algorithms.galore import due, low_rank, of_matrices, tall
from functional_optim.combinators.as_matrix import Views, seen
from functional_optim.core import randomness
from functional_optim.core.base import GradientTransformation
from functional_optim.core.calls import check_choice
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.rule import Runs
from functional_optim.transforms.orthogonal import matrix_rule
from functional_optim.transforms.rules import SQUARES, root

ScaleType = Literal["channel", "tensor"]
"""The unit with a separate factor: each index of the longer side, or the whole matrix."""


class ApolloSlots(NamedTuple):
    exp_avg: Tensor
    """Average M of the projected gradient: (longer side, r)."""
    exp_avg_sq: Tensor
    """Average V of its square: (longer side, r)."""
    projector: Tensor
    """P, random: (shorter side, r)."""
    update_norm: Tensor
    """Norm of the last scaled gradient, (1, 1)."""


@factory
def scale_by_apollo(
    rank: int = 256,
    update_proj_gap: int = 200,
    scale: numeric.Hyper = 1.0,
    scale_type: ScaleType = "channel",
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-6,
    *,
    growth: numeric.Hyper = 1.01,
    seed: int = 0,
) -> Leafwise:
    """Multiply the gradient by the factors by which Adam scales a random projection of it.

    The projection is drawn in the first step and then every `update_proj_gap` steps, from the seed
    and the step. Parameters of one shape share it.

    Args:
        rank: columns of the projection, ≥ 1, at most the shorter side. A Python number.
        update_proj_gap: steps from one projection to the next, ≥ 1.
        scale: its root multiplies the update, ≥ 0. The authors use 128 for a rank of 1.
        scale_type: "channel": each index of the longer side has a separate factor; "tensor": the
            matrix has one.
        betas: decay rates of Adam's averages, each in [0, 1).
        eps: added to the root before it is corrected for bias, ≥ 0.
        growth: largest ratio of the norms of successive scaled gradients, ≥ 1.
        seed: the seed of the projections, a Python integer.

        `scale`, `betas`, `eps` and `growth` may also be 0-dim tensors or schedules. The defaults
            are those of the authors' code and examples.

    State: `exp_avg`, `exp_avg_sq`, `projector` and `update_norm`, see `ApolloSlots`.

    Raises:
        ValueError: for hyperparameters out of range, or an unknown option; from init, for a
            parameter with fewer than two dimensions, or with three that `as_matrix` does not
            describe.
        TypeError: if the seed is not an integer; from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_apollo(rank=2)
        >>> w = torch.zeros(5, 3)
        >>> u, state = tx.update(torch.ones(5, 3), tx.init(w), w)
        >>> state.slots["projector"].shape, bool((u > 0).all())
        (torch.Size([3, 2]), True)
    """
    numeric.check_count("scale_by_apollo", 1, rank=rank, update_proj_gap=update_proj_gap)
    check_choice("scale_by_apollo", ("channel", "tensor"), scale_type=scale_type)
    numeric.check_range("scale_by_apollo", "of 0 or more", eps=eps, scale=scale)
    numeric.check_range("scale_by_apollo", "of 1 or more", growth=growth)
    if isinstance(seed, Tensor):
        raise TypeError("scale_by_apollo needs a Python integer as its seed, but got a tensor.")
    seed = randomness.whole_seed("scale_by_apollo", seed)
    hyper: dict[str, Any] = {"betas": check_betas(betas), "eps": eps, "scale": scale}
    hyper |= {"growth": growth, "update_proj_gap": update_proj_gap}
    across = -1 if scale_type == "channel" else (-2, -1)

    def init(p: Tensor) -> ApolloSlots:
        return ApolloSlots(*low_rank(p, rank), p.new_zeros(1, 1))

    def scalars(t, *, betas, eps, scale, growth, update_proj_gap):
        b1, b2 = betas
        correction = numeric.sqrt(1 - b2**t) / (1 - b1**t)
        draw = (t - 1 - (t - 1) % update_proj_gap) / update_proj_gap
        return 1 - b1, 1 - b2, correction, eps, numeric.sqrt(scale), growth, draw

    def norm(x: Tensor, dim: Any) -> Tensor:
        return torch.linalg.vector_norm(x, dim=dim, keepdim=True)

    def step(G: Tensor, P: Tensor, x: ApolloSlots, *numbers: Any) -> tuple[Tensor, ApolloSlots]:
        a1, a2, correction, eps, factor, growth, _ = numbers
        X = tall(G)
        R = X @ P
        M, V = x.exp_avg.lerp(R, a1), x.exp_avg_sq.lerp(R * R, a2)
        N = M / (root(V) + eps)
        U = X * (norm(N, across) / (norm(R, across) + 1e-8))
        size, last = norm(U, (-2, -1)), x.update_norm
        excess = (size / ((last + 1e-8) * growth)).clamp(min=1.0)
        excess = excess.masked_fill(last == 0, 1.0)
        new = ApolloSlots(M, V, P, size / excess)
        return tall(correction * factor * (U / excess), like=G), new

    def plain(G: Tensor, x: ApolloSlots, p: Any, *numbers: Any) -> tuple[Tensor, ApolloSlots]:
        return step(G, x.projector, x, *numbers)

    def renew(G: Tensor, x: ApolloSlots, p: Any, *numbers: Any) -> tuple[Tensor, ApolloSlots]:
        *_, draw = numbers
        rows, columns = x.projector.shape[-2:]
        P = projection(seed, draw, rows, columns, x.projector)
        return step(G, P.expand_as(x.projector).clone(), x, *numbers)

    runs = Runs(choose=due, start=(renew, ["projector"]))
    return matrix_rule("scale_by_apollo", init, [plain, renew], scalars, hyper, SQUARES, runs)


def projection(seed: int, draw: Any, rows: int, columns: int, like: Tensor) -> Tensor:
    """A matrix of independent normal values of variance 1/columns, a different one for each
    draw."""
    at = torch.as_tensor(draw, device=like.device).to(torch.int64)
    key = torch.full((), seed, dtype=torch.int64, device=like.device)
    key = randomness.derived(randomness.derived(key, at), rows * 2**32 + columns)
    found = randomness.normal(key, (rows, columns), like.dtype, like.device)
    return found / math.sqrt(max(columns, 1))


@factory
def apollo(
    lr: numeric.Hyper = 1e-3,
    betas: Betas = (0.9, 0.999),
    eps: numeric.Hyper = 1e-6,
    weight_decay: numeric.Hyper = 0.0,
    rank: int = 256,
    update_proj_gap: int = 200,
    scale: numeric.Hyper = 1.0,
    scale_type: ScaleType = "channel",
    *,
    growth: numeric.Hyper = 1.01,
    seed: int = 0,
    maximize: bool = False,
    views: Views | torch.nn.Module | None = None,
) -> GradientTransformation:
    """APOLLO for matrices, AdamW for all others.

    APOLLO-Mini is `apollo(rank=1, scale=128.0, scale_type="tensor")`. Embeddings and heads are
    matrices, too; exclude them by `partition`, as the authors do.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of the averages, each in [0, 1).
        eps: added to the root of the second moment, ≥ 0.
        weight_decay: decoupled decay, ≥ 0.
        rank: columns of the projection, ≥ 1, at most the shorter side. A Python number.
        update_proj_gap: steps from one projection to the next, ≥ 1.
        scale: its root multiplies the updates of matrices, ≥ 0.
        scale_type: "channel": each index of the longer side has a separate factor; "tensor": the
            matrix has one.
        growth: largest ratio of the norms of successive scaled gradients, ≥ 1.
        seed: the seed of the projections, a Python integer.
        maximize: ascend instead of descend.
        views: descriptions of stacks of matrices, kernels and fused projections: from path patterns
            to arguments of `as_matrix`, or the model. None: parameters with two dimensions are
            matrices, those with four and five are kernels.

        Hyperparameters may also be 0-dim tensors or schedules, except rank, update_proj_gap and
            seed. The defaults are those of the authors' code and examples.

    State: of matrices `exp_avg`, `exp_avg_sq`, `projector` and `update_norm`, see
    `scale_by_apollo`; of others `exp_avg` and `exp_avg_sq`, like them.

    Raises:
        ValueError: for hyperparameters out of range, or an unknown option.
        TypeError: if the seed is not an integer; from init, for a complex parameter.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.apollo(lr=0.1, rank=1)
        >>> w = torch.ones(4, 2)
        >>> updates, state = tx.update(torch.ones(4, 2), tx.init(w), w)
        >>> bool((fo.apply_updates(w, updates) < 1.0).all())
        True
    """
    adapt = scale_by_apollo(
        rank, update_proj_gap, scale, scale_type, betas, eps, growth=growth, seed=seed
    )
    return seen(of_matrices("apollo", adapt, lr, betas, eps, weight_decay, maximize), views)
