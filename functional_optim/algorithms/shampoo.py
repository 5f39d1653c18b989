"""Shampoo: gradients multiplied by inverse roots of the sums of G Gᵀ and Gᵀ G.

Gupta, Koren, Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization",
https://arxiv.org/abs/1802.09568, Algorithm 1; Anil et al., "Scalable Second Order Optimization for
Deep Learning", https://arxiv.org/abs/2002.09018; Shi et al., "A Distributed Data-Parallel PyTorch
Implementation of the Distributed Shampoo Optimizer", https://arxiv.org/abs/2309.06497. This module
follows the last one: https://github.com/facebookresearch/optimizers at f606606.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.algorithms.adam import Betas
from functional_optim.combinators.as_matrix import Views, seen
from functional_optim.core import base
from functional_optim.core.base import GradientTransformation
from functional_optim.core.calls import check_choice
from functional_optim.core.chain import chain
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.rule import Runs
from functional_optim.core.storage import Storage, wide_dtype
from functional_optim.core.views import MATRICES, TENSORS, Merged
from functional_optim.linalg import eigh, tell_not_finite
from functional_optim.transforms.bases import Refresh
from functional_optim.transforms.momentum import trace
from functional_optim.transforms.rules import root
from functional_optim.transforms.scaling import check_lr, scale_by_lr
from functional_optim.transforms.sides import behind, each_behind, for_each, gram, turned
from functional_optim.transforms.weight_decay import add_decayed_weights

Grafting = Literal["sgd", "adagrad", "rmsprop", "adam"] | None
"""The source of the length of steps."""

WeightDecayType = Literal["l2", "decoupled", "corrected", "independent"]
"""The kind of weight decay, see `shampoo`."""

Exponents = tuple[float, float] | None
"""The powers of the two factors of a matrix."""

PLAIN, RENEW, EARLY = range(3)


class ShampooSlots(NamedTuple):
    exp_avg: Tensor
    """Average of the gradients M, like p."""
    left: Tensor
    """Sum or average L of G Gᵀ, (m, m)."""
    right: Tensor
    """Sum or average R of Gᵀ G, (n, n)."""
    left_root: Tensor
    """Inverse root of L, (m, m)."""
    right_root: Tensor
    """Inverse root of R, (n, n)."""


class GraftedSlots(NamedTuple):
    exp_avg: Tensor
    left: Tensor
    right: Tensor
    left_root: Tensor
    right_root: Tensor
    exp_avg_sq: Tensor
    """Sum or average v of the squares of the gradients, like p."""


class ShampooScalars(NamedTuple):
    weight: Any
    """Weight of the gradient in the average M."""
    weight_now: Any
    """The same in the average that this step uses."""
    correction: Any
    """The divisor of that average."""
    decay_sq: Any
    weight_sq: Any
    correction_sq: Any
    left_power: Any
    right_power: Any
    eps: Any
    grafted_decay: Any
    grafted_weight: Any
    grafted_correction: Any
    grafted_eps: Any


@factory
def scale_by_shampoo(
    betas: Betas = (0.9, 1.0),
    eps: numeric.Hyper = 1e-12,
    *,
    beta3: numeric.Hyper | None = None,
    max_preconditioner_dim: int | None = 1024,
    precondition_frequency: int = 1,
    start_preconditioning_step: int | None = None,
    use_bias_correction: bool = True,
    grafting: Grafting = None,
    grafting_beta2: numeric.Hyper | None = None,
    grafting_eps: numeric.Hyper = 1e-10,
    exponents: Exponents = None,
    target_parameter_dimensionality: float | None = None,
    refresh: Refresh = "together",
) -> Leafwise:
    """Multiply the average gradient by inverse roots of the sums of G Gᵀ and Gᵀ G.

    Args:
        betas: decay rates of M, in [0, 1), and of L and R, in [0, 1]. 1: these are sums, as in
            Adagrad.
        eps: added to the eigenvalues of L and R, > 0.
        beta3: decay rate of the average that a step uses, in [0, 1). None: the first of betas, so
            that it uses M.
        max_preconditioner_dim: larger matrices are divided into blocks with at most this number of
            rows and columns, ≥ 1. None: no blocks.
        precondition_frequency: number of steps between computations of the roots, ≥ 1.
        start_preconditioning_step: the first step that computes roots, at least
            precondition_frequency. Earlier steps are those of `grafting`, or M without it. None:
            precondition_frequency.
        use_bias_correction: whether to correct the bias of M, and of L and R if these are averages.
        grafting: the method that determines the length of the step of each block: "sgd": M;
            "adagrad", "rmsprop", "adam": M divided by a root of squares. None: no grafting.
        grafting_beta2: its decay rate of squares, in [0, 1]. None: 0.99 for "rmsprop", 0.999 for
            "adam". "adagrad" has no decay.
        grafting_eps: added to its roots, ≥ 0.
        exponents: powers of L and R, whose inverses are taken, ≥ 0: (0.5, 0.0) for rows only.
            None: a quarter for each, a half if one side has length 1; 1 / 2k for each of k sides.
        target_parameter_dimensionality: the number of dimensions to merge a parameter to, each with
            a factor: adjacent dimensions are merged, from the last on, while their product is at
            most max_preconditioner_dim, until this number remains; dimensions of length 1 are
            dropped. The source has 1; `math.inf` merges none. None: kernels of convolutions are
            matrices (out, in · height · width), and matrices are unchanged.
        refresh: "together": roots of all parameters in one step; "spread": a part of them in each.

    Vectors are columns, unless `as_matrix` changes that. Other defaults are the source's.

    State: `exp_avg`, like the parameters; `left`, `left_root`, (m, m), and `right`, `right_root`,
    (n, n), in float32 for half types, and (0, 0) for a side without a factor; `exp_avg_sq`, like
    the parameters, if grafting needs it. All slots of a parameter with blocks have blocks. With
    more than two dimensions `right` and `right_root` are vectors: the concatenated matrices of all
    dimensions after the first.

    Raises:
        ValueError: for hyperparameters out of range, or unknown options; from init, for a parameter
            of three dimensions that `as_matrix` does not describe, or of more than five.
        TypeError: if betas is not a pair; from init, for a complex parameter.

    Papers: Gupta, Koren, Singer, https://arxiv.org/abs/1802.09568; Anil et al.,
    https://arxiv.org/abs/2002.09018; Shi et al., https://arxiv.org/abs/2309.06497.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_shampoo()
        >>> w = torch.zeros(2, 2)
        >>> u, state = tx.update(torch.diag(torch.tensor([1.0, 9.0])), tx.init(w), w)
        >>> u.abs().round(decimals=4)  # at the first step the nearest orthogonal matrix
        tensor([[1., 0.],
                [0., 1.]])
    """
    name = "scale_by_shampoo"
    _check_choices(name, grafting, exponents, refresh)
    numeric.check(lambda x: x > 0.0, eps, f"{name} needs eps above 0, but got {{}}.")
    if beta3 is not None:
        numeric.check_range(name, "in [0, 1)", beta3=beta3)
    if grafting_beta2 is not None:
        numeric.check_range(name, "in [0, 1]", grafting_beta2=grafting_beta2)
    numeric.check_range(name, "of 0 or more", grafting_eps=grafting_eps)
    numeric.check_count(name, 1, precondition_frequency=precondition_frequency)
    if max_preconditioner_dim is not None:
        numeric.check_count(name, 1, max_preconditioner_dim=max_preconditioner_dim)
    every, start = precondition_frequency, start_preconditioning_step
    start = every if start is None else start
    numeric.check_count(name, every, start_preconditioning_step=start)
    b1, b2 = numeric.pair(betas, "betas", "(0.9, 1.0)")
    numeric.check(lambda x: 0.0 <= x < 1.0, b1, f"{name} needs betas[0] in [0, 1), but got {{}}.")
    numeric.check(lambda x: 0.0 <= x <= 1.0, b2, f"{name} needs betas[1] in [0, 1], but got {{}}.")
    until = target_parameter_dimensionality
    if until is not None and not (until == math.inf or (type(until) is int and until >= 1)):
        raise ValueError(
            f"{name} needs a target_parameter_dimensionality of None, a number of 1 or more, or "
            f"math.inf, but got {until!r}."
        )
    squares = grafting in ("adagrad", "rmsprop", "adam")
    if grafting == "adagrad":
        grafting_beta2 = 1.0
    elif grafting_beta2 is None:
        grafting_beta2 = 0.99 if grafting == "rmsprop" else 0.999
    powers = (0.25, 0.25) if exponents is None else exponents
    on_left, on_right = powers[0] > 0, powers[1] > 0
    ahead = beta3 is not None
    real = base.real_only(name)

    def sides(m: int, n: int, *others: int) -> list[int]:
        """The sizes of the factors of a tensor; 0 for a side without one."""
        if others:
            longer = [k * (k != 1) for k in (m, n, *others)]
            return longer if any(longer) or 0 in (m, n, *others) else [1, *longer[1:]]
        left = n == 1 or (m > 1 and on_left)
        right = n > 1 and (m == 1 or on_right)
        return [m * left, n * right]

    def init(p: Tensor) -> ShampooSlots | GraftedSlots:
        real(p)
        like = {"dtype": wide_dtype(p), "device": p.device}
        sizes = sides(*p.shape)
        left, right = divided_sides(for_each(name, sizes, lambda k: torch.zeros(k, k, **like)))
        left_root, right_root = divided_sides(for_each(name, sizes, lambda k: torch.eye(k, **like)))
        plain = ShampooSlots(torch.zeros_like(p), left, right, left_root, right_root)
        return GraftedSlots(*plain, torch.zeros_like(p)) if squares else plain

    def divided_sides(own: Sequence[Tensor | None], lead: int = 0) -> tuple[Tensor, Tensor]:
        """The slots of the first dimension, and of all later ones."""
        first, right = own[0], behind(own, lead)
        assert first is not None
        assert right is not None
        return first, right

    def each(G: Tensor, left: Tensor, right: Tensor) -> list[Tensor]:
        """The values of these slots for each dimension."""
        shapes = [torch.Size((1, k, k)) for k in sides(*G.shape[1:])]
        return [left, *[x for x in each_behind(right, shapes[1:]) if x is not None]]

    def known(G: Tensor, x: Any) -> list[tuple[int, Tensor, Tensor]]:
        """The dimensions that have a factor, with this and its root."""
        pairs = zip(each(G, x.left, x.right), each(G, x.left_root, x.right_root), strict=True)
        return [(i, A, R) for i, (A, R) in enumerate(pairs) if A.shape[-1]]

    def put(G: Tensor, x: Any, what: str, new: dict[int, Tensor]) -> Any:
        """The slots with new factors, or roots, of some dimensions."""
        left, right = f"left{what}", f"right{what}"
        old = each(G, getattr(x, left), getattr(x, right))
        pair = divided_sides([new.get(i, one) for i, one in enumerate(old)], 1)
        return x._replace(**dict(zip((left, right), pair, strict=True)))

    def scalars(t, *, betas, beta3, eps, grafting_beta2, grafting_eps):
        b1, b2 = betas
        b3 = beta3 if ahead else b1
        lacking = 1 - b3 * numeric.power(b1, t - 1) if use_bias_correction else 1.0
        v, v_weight, v_lacking = average_of(grafting_beta2, t, grafting == "adam")
        return ShampooScalars(
            1 - b1,
            1 - b3,
            lacking,
            *average_of(b2, t, use_bias_correction),
            *powers,
            eps,
            v,
            v_weight,
            v_lacking,
            grafting_eps,
        )

    def choose(t, *, turn=0):
        due = numeric.where(t % every == turn, RENEW, PLAIN)
        due = numeric.where(t == start, RENEW, due)
        return numeric.where(t < start, EARLY if squares else PLAIN, due)

    def seen(G: Tensor, x: Any, s: ShampooScalars) -> tuple[Tensor, Tensor | None, Any]:
        """M without bias, M divided by the root of the squares, and the updated slots."""
        m = x.exp_avg.lerp(G, s.weight)
        now = (x.exp_avg.lerp(G, s.weight_now) if ahead else m) / s.correction
        x = x._replace(exp_avg=m)
        new = {i: s.decay_sq * A + s.weight_sq * gram(G, i, A) for i, A, _ in known(G, x)}
        x = put(G, x, "", new)
        if not squares:
            return now, None, x
        v = s.grafted_decay * x.exp_avg_sq + s.grafted_weight * G * G
        divided = now / (root(v / s.grafted_correction) + s.grafted_eps)
        return now, divided, x._replace(exp_avg_sq=v)

    def grafted(M: Tensor, divided: Tensor | None, x: Any) -> Tensor:
        """M multiplied by the roots, with the length of the step of `grafting`."""
        W = M
        for i, _, R in known(M, x):
            W = turned(W, i, R)
        if grafting is None:
            return W
        dims = [*range(1, M.dim())]
        length = torch.linalg.vector_norm(M if divided is None else divided, dim=dims, keepdim=True)
        return W * (length / (torch.linalg.vector_norm(W, dim=dims, keepdim=True) + 1e-16))

    def plain(G: Tensor, x: Any, p: Any, s: ShampooScalars) -> tuple[Tensor, Any]:
        M, divided, x = seen(G, x, s)
        return grafted(M, divided, x), x

    def renew(G: Tensor, x: Any, p: Any, s: ShampooScalars) -> tuple[Tensor, Any]:
        if G.numel() == 0:
            return G, x
        M, divided, x = seen(G, x, s)
        found, new = known(G, x), {}
        matrix = G.dim() == 3 and 1 not in G.shape[1:]
        for i, A, R in found:
            power = (s.left_power, s.right_power)[i] if matrix else 0.5 / len(found)
            new[i] = renewed(A / s.correction_sq, power, s.eps, R)
        x = put(G, x, "_root", new)
        return grafted(M, divided, x), x

    def renewed(A: Tensor, power: Any, eps: Any, old: Tensor) -> Tensor:
        root, finite = inverse_root(A, power, eps)
        tell_not_finite(name, finite)
        return torch.where(finite[..., None, None], root, old)

    def early(G: Tensor, x: Any, p: Any, s: ShampooScalars) -> tuple[Tensor, Any]:
        """The step of `grafting`."""
        M, divided, x = seen(G, x, s)
        return M if divided is None else divided, x

    hyper = {
        **{"betas": (b1, b2), "eps": eps, "beta3": beta3 if ahead else b1},
        **{"grafting_beta2": grafting_beta2, "grafting_eps": grafting_eps},
    }
    runs = Runs(choose=choose, turns=every if refresh == "spread" else None, batched=True)
    storage = Storage(nonnegative=("exp_avg_sq",) if squares else ())
    rule = leafwise(
        init, [plain, renew, early], scalars, hyper=hyper, runs=runs, storage=storage, name=name
    )
    block = max_preconditioner_dim or sys.maxsize
    view = MATRICES if until is None else TENSORS._replace(merged=Merged(block, until))
    view = view._replace(block=block, most=5)
    return Leafwise(tuple([x.seen_as(view) for x in rule.placements]))


def average_of(beta: Any, t: Any, corrected: bool) -> tuple[Any, Any, Any]:
    """The decay of an average, or of a sum if beta is 1; the weight of the input; the bias
    correction at step t."""
    lacking = numeric.where(beta < 1, 1 - numeric.power(beta, t), 1.0) if corrected else 1.0
    return beta, numeric.where(beta < 1, 1 - beta, 1.0), lacking


def inverse_root(A: Tensor, power: Any, eps: Any) -> tuple[Tensor, Tensor]:
    """(A + ε I) to a negative power; and whether A is finite.

    Eigenvalues are at least ε, and at least the rounding error of the largest one, λ n times the
    machine epsilon: below that they are noise.
    """
    n = A.shape[-1]
    identity = torch.eye(n, dtype=A.dtype, device=A.device)
    values, Q, finite = eigh(A + eps * identity)
    least, floor = values[..., :1], values[..., -1:] * (torch.finfo(A.dtype).eps * n)
    floor = floor.clamp(min=eps)
    values = torch.where(least < floor, values - least + floor, values)
    return (Q * values.pow(-power)[..., None, :]) @ Q.mT, finite


def _check_choices(name: str, grafting: Any, exponents: Any, refresh: Any) -> None:
    """Raise ValueError for unknown options or invalid exponents."""
    check_choice(name, (None, "sgd", "adagrad", "rmsprop", "adam"), grafting=grafting)
    if exponents is not None and not (
        isinstance(exponents, tuple)
        and len(exponents) == 2
        and all(isinstance(x, (int, float)) and x >= 0.0 for x in exponents)
    ):
        raise ValueError(
            f"{name} needs exponents of None or two numbers of 0 or more, e.g. (0.25, 0.25), but "
            f"got {exponents!r}."
        )
    check_choice(name, ("together", "spread"), refresh=refresh)


@factory
def shampoo(
    lr: numeric.Hyper = 1e-2,
    betas: Betas = (0.9, 1.0),
    eps: numeric.Hyper = 1e-12,
    weight_decay: numeric.Hyper = 0.0,
    *,
    weight_decay_type: WeightDecayType = "decoupled",
    peak_lr: numeric.Hyper | None = None,
    momentum: numeric.Hyper = 0.0,
    nesterov: bool = False,
    beta3: numeric.Hyper | None = None,
    max_preconditioner_dim: int | None = 1024,
    precondition_frequency: int = 1,
    start_preconditioning_step: int | None = None,
    use_bias_correction: bool = True,
    grafting: Grafting = None,
    grafting_beta2: numeric.Hyper | None = None,
    grafting_eps: numeric.Hyper = 1e-10,
    exponents: Exponents = None,
    target_parameter_dimensionality: float | None = None,
    refresh: Refresh = "together",
    views: Views | torch.nn.Module | None = None,
) -> GradientTransformation:
    """Shampoo: the average gradient multiplied by inverse roots of the sums of G Gᵀ and Gᵀ G.

    Args:
        lr: learning rate, ≥ 0.
        betas: decay rates of M, in [0, 1), and of L and R, in [0, 1]. 1: these are sums, as in
            Adagrad.
        eps: added to the eigenvalues of L and R, > 0.
        weight_decay: λ, ≥ 0.
        weight_decay_type: "l2": λ p is added to the gradient; "decoupled": a step subtracts lr λ of
            each weight; "corrected": lr² λ / peak_lr; "independent": lr λ / peak_lr.
        peak_lr: the largest learning rate, which the last two need, > 0.
        momentum: decay rate of a sum of steps, ≥ 0.
        nesterov: whether to use Nesterov momentum.
        beta3: decay rate of the average that a step uses, in [0, 1). None: the first of betas, so
            that it uses M.
        max_preconditioner_dim: larger matrices are divided into blocks with at most this number of
            rows and columns, ≥ 1. None: no blocks.
        precondition_frequency: number of steps between computations of the roots, ≥ 1.
        start_preconditioning_step: the first step that computes roots, at least
            precondition_frequency. Earlier steps are those of `grafting`, or M without it. None:
            precondition_frequency.
        use_bias_correction: whether to correct the bias of M, and of L and R if these are averages.
        grafting: the method that determines the length of the step of each block: "sgd": M;
            "adagrad", "rmsprop", "adam": M divided by a root of squares. None: no grafting.
        grafting_beta2: its decay rate of squares, in [0, 1]. None: 0.99 for "rmsprop", 0.999 for
            "adam". "adagrad" has no decay.
        grafting_eps: added to its roots, ≥ 0.
        exponents: powers of L and R, whose inverses are taken, ≥ 0: (0.5, 0.0) for rows only.
            None: a quarter for each, a half if one side has length 1; 1 / 2k for each of k sides.
        target_parameter_dimensionality: the number of dimensions to merge a parameter to, each with
            a factor, see `scale_by_shampoo`. The source has 1; `math.inf` merges none. None:
            kernels of convolutions are matrices (out, in · height · width).
        refresh: "together": roots of all parameters in one step; "spread": a part of them in each.
        views: descriptions of stacks of matrices, kernels and fused projections: from path patterns
            to arguments of `as_matrix`, or the model. None: parameters with two dimensions are
            matrices, those with four and five are kernels.

        Hyperparameters may also be 0-dim tensors or schedules. Other defaults are the source's.

    State: that of `scale_by_shampoo`, and with momentum `momentum_buffer`, like the parameters.

    Raises:
        ValueError: for hyperparameters out of range, unknown options, or a decay that needs peak_lr
            without it.
        TypeError: if betas is not a pair; from init, for a complex parameter.

    Papers: Gupta, Koren, Singer, https://arxiv.org/abs/1802.09568; Anil et al.,
    https://arxiv.org/abs/2002.09018; Shi et al., https://arxiv.org/abs/2309.06497.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.shampoo(lr=0.1)
        >>> w = torch.eye(2)
        >>> updates, state = tx.update(torch.diag(torch.tensor([1.0, 9.0])), tx.init(w), w)
        >>> fo.apply_updates(w, updates).diag().round(decimals=4)
        tensor([0.9000, 0.9000])
    """
    check_lr(lr)
    kinds = ("l2", "decoupled", "corrected", "independent")
    check_choice("shampoo", kinds, weight_decay_type=weight_decay_type)
    decay = add_decayed_weights(weight_decay)
    if weight_decay_type in ("corrected", "independent"):
        if peak_lr is None:
            raise ValueError(
                f"shampoo was asked for a decay that is {weight_decay_type} without peak_lr; pass "
                "the largest learning rate of the schedule."
            )
        numeric.check(lambda x: x > 0.0, peak_lr, "shampoo needs peak_lr above 0, but got {}.")

        def share(count: Any) -> Any:
            t = count + 1
            rate = numeric.at(lr, t) if weight_decay_type == "corrected" else 1.0
            return numeric.at(weight_decay, t) * rate / numeric.at(peak_lr, t)

        if decay.placements:
            decay = add_decayed_weights(share)
    precondition = scale_by_shampoo(
        betas, eps, beta3=beta3, max_preconditioner_dim=max_preconditioner_dim,
        precondition_frequency=precondition_frequency,
        start_preconditioning_step=start_preconditioning_step,
        use_bias_correction=use_bias_correction, grafting=grafting, grafting_beta2=grafting_beta2,
        grafting_eps=grafting_eps, exponents=exponents,
        target_parameter_dimensionality=target_parameter_dimensionality, refresh=refresh,
    )  # fmt: skip
    before, after = (decay, chain()) if weight_decay_type == "l2" else (chain(), decay)
    moving = chain() if numeric.is_zero(momentum) else trace(momentum, nesterov=nesterov)
    return seen(chain(before, precondition, after, moving, scale_by_lr(lr)), views)
