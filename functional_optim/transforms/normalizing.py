"""Giving updates a size of their own: signs, norms, means, orthogonal matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.rule import squares, times
from functional_optim.linalg import MUON_COEFFICIENTS, newton_schulz


@factory
def sign() -> Leafwise:
    """Replace every entry by its sign: −1, 0 or 1; a complex one part by part.

    Paper: Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: Compressed Optimisation for
    Non-Convex Problems", https://arxiv.org/abs/1802.04434.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.sign(), fo.scale_by_lr(0.1))
        >>> w = torch.zeros(3)
        >>> tx.update(torch.tensor([-3.0, 0.0, 0.01]), tx.init(w), w)[0]
        tensor([ 0.1000, -0.0000, -0.1000])
    """

    def update(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor, Any]:
        return torch.where(u != u, u, u.sign()), slots  # torch's sign of a NaN is 0

    return leafwise(None, update, name="sign")


@factory
def normalize(scale_factor: numeric.Hyper = 1.0, eps: numeric.Hyper = 1e-6) -> Leafwise:
    """Scale all updates together so that their common Euclidean norm is `scale_factor`.

    The norm is taken over the whole tree, as in `clip_by_global_norm`.

    Args:
        scale_factor: the norm to have: a number, a 0-dim tensor, or a schedule.
        eps: added to the norm before dividing, ≥ 0. Default 1e-6, that of optax's
            normalize_by_update_norm.

    Raises:
        ValueError: if eps is a negative number.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.normalize(10.0)
        >>> w = {"a": torch.zeros(1), "b": torch.zeros(1)}
        >>> tx.update({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, tx.init(w), w)[0]
        {'a': tensor([6.0000]), 'b': tensor([8.0000])}
    """
    numeric.check(lambda x: x >= 0.0, eps, "normalize needs an eps of 0 or more, but got {}.")

    def scalars(t: Any, total: tuple[Any], *, scale_factor: Any, eps: Any) -> tuple[Any]:
        null = total[0] == 0
        norm = numeric.sqrt(numeric.where(null, 1.0, total[0])) + eps
        return (numeric.where(null, 0.0, scale_factor / norm),)

    hyper = {"scale_factor": scale_factor, "eps": eps}
    return leafwise(None, times, scalars, reduce=squares, hyper=hyper, name="normalize")


@factory
def centralize() -> Leafwise:
    """Take the mean away from the update of each unit, so that it is zero.

    A unit is what leads to one output: a row of a matrix (out, in), a filter of a kernel
    (out, in, height, width). Vectors and scalars stay as they are.

    Raises:
        TypeError: from init, for a complex parameter.

    Paper: Yong, Huang, Hua, Zhang, "Gradient Centralization: A New Optimization Technique for Deep
    Neural Networks", https://arxiv.org/abs/2004.01461, equation 1.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.centralize()
        >>> w = torch.zeros(2, 2)
        >>> tx.update(torch.tensor([[1.0, 3.0], [4.0, 4.0]]), tx.init(w), w)[0]
        tensor([[-1.,  1.],
                [ 0.,  0.]])
    """

    def update(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor, Any]:
        if u.dim() < 2:
            return u, slots
        return u - u.mean(tuple(range(1, u.dim())), keepdim=True), slots

    return leafwise(base.real_only("centralize"), update, elementwise=False, name="centralize")


class TrustRatioScalars(NamedTuple):
    min_square: Any
    """Least square of both norms."""
    coefficient: Any
    eps: Any


@factory
def scale_by_trust_ratio(
    min_norm: numeric.Hyper = 0.0,
    trust_coefficient: numeric.Hyper = 1.0,
    eps: numeric.Hyper = 0.0,
) -> Leafwise:
    """Multiply each tensor's update by ‖p‖ / ‖u‖: layers move in proportion to their size.

    Where one of the norms is zero, the update stays as it is.

    Args:
        min_norm: both norms are at least this, ≥ 0.
        trust_coefficient: a factor, ≥ 0: 1 in LAMB, 0.001 in LARS.
        eps: added to ‖u‖, ≥ 0.

        Numbers may also be 0-dim tensors or schedules. The defaults are optax's.

    After `scale_by_adam` and `add_decayed_weights` this is LAMB (`lamb`). LARS has a ratio of its
    own, `scale_by_lars`.

    Raises:
        ValueError: if a number is negative.

    Papers: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks",
    https://arxiv.org/abs/1708.03888; You et al., "Large Batch Optimization for Deep Learning:
    Training BERT in 76 minutes", https://arxiv.org/abs/1904.00962, Algorithms 1 and 2.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.scale_by_trust_ratio()
        >>> w = torch.tensor([3.0, 4.0])
        >>> tx.update(torch.tensor([0.0, 2.0]), tx.init(w), w)[0]
        tensor([0., 5.])
    """
    hyper = {"min_norm": min_norm, "trust_coefficient": trust_coefficient, "eps": eps}
    for name, value in hyper.items():
        numeric.check(
            lambda x: x >= 0.0,
            value,
            f"scale_by_trust_ratio needs a {name} of 0 or more, but got {{}}.",
        )

    def scalars(t: Any, *, min_norm: Any, trust_coefficient: Any, eps: Any) -> TrustRatioScalars:
        return TrustRatioScalars(min_norm * min_norm, trust_coefficient, eps)

    def update(
        u: Tensor, slots: Any, p: Tensor, s: TrustRatioScalars, P: Tensor, U: Tensor
    ) -> tuple[Tensor, Any]:
        P, U = P.clamp(min=s.min_square), U.clamp(min=s.min_square)
        return u * trust_ratio(P, U, s.coefficient, 0.0, s.eps), slots

    return leafwise(
        None, update, scalars, hyper=hyper, measure=both_squares, name="scale_by_trust_ratio"
    )


@factory
def clip_by_trust_ratio(trust_coefficient: numeric.Hyper = 1.0) -> Leafwise:
    """Scale each tensor's update down so that its norm is at most that of the parameter.

    In the place of `scale_by_trust_ratio` it makes LAMB what is called LAMBC: shorter updates stay
    as they are. So do all updates of a parameter that is zero.

    Args:
        trust_coefficient: the largest norm relative to ‖p‖, > 0: a number, a 0-dim tensor, or a
            schedule. Default 1.

    Raises:
        ValueError: if trust_coefficient is a number and not positive.

    Source: `trust_clip` in https://github.com/huggingface/pytorch-image-models/tree/main/timm/optim.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.clip_by_trust_ratio()
        >>> w = torch.tensor([3.0, 4.0])
        >>> u, state = tx.update(torch.tensor([0.0, 2.0]), tx.init(w), w)
        >>> u, tx.update(torch.tensor([0.0, 20.0]), state, w)[0]
        (tensor([0., 2.]), tensor([0., 5.]))
    """
    numeric.check(
        lambda x: x > 0.0,
        trust_coefficient,
        "clip_by_trust_ratio needs a positive trust_coefficient, but got {}.",
    )

    def scalars(t: Any, *, trust_coefficient: Any) -> tuple[Any]:
        return (trust_coefficient,)

    def update(
        u: Tensor, slots: Any, p: Tensor, c: Any, P: Tensor, U: Tensor
    ) -> tuple[Tensor, Any]:
        return u * trust_ratio(P, U, c, 0.0, 0.0).clamp(max=1.0), slots

    hyper = {"trust_coefficient": trust_coefficient}
    return leafwise(
        None, update, scalars, hyper=hyper, measure=both_squares, name="clip_by_trust_ratio"
    )


def both_squares(u: Tensor, slots: Any, p: Tensor, *numbers: Any) -> tuple[Tensor, Tensor]:
    """The `measure` of a rule that compares the norms of parameter and update: their squares."""
    return (p * p).sum(), (u * u).sum()


def trust_ratio(P: Tensor, U: Tensor, coefficient: Any, decay: Any, eps: Any) -> Tensor:
    """coefficient · ‖p‖ / (‖u‖ + decay · ‖p‖ + eps), 1 where a norm is 0. P, U: their squares."""
    null = (P == 0) | (U == 0)
    P, U = P.masked_fill(null, 1.0), U.masked_fill(null, 1.0)  # the root of 0 has no derivative
    ratio = coefficient * P.sqrt() / (U.sqrt() + decay * P.sqrt() + eps)
    return ratio.masked_fill(null, 1.0)


@factory
def orthogonalize(
    ns_coefficients: tuple[float, float, float] = MUON_COEFFICIENTS,
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> Leafwise:
    """Replace the update of a matrix by about the nearest orthogonal one, by Newton–Schulz.

    What Muon does to its average gradient. Parameters of one shape go through it as one batch.

    Args:
        ns_coefficients: of the Newton–Schulz quintic. Python numbers, fixed in the kernel.
        eps: least norm to divide by in it.
        ns_steps: its repetitions, below 100.
        adjust_lr_fn: factor for an m × n matrix. None: 1; "original": √max(1, m/n);
            "match_rms_adamw": 0.2 √max(m, n).

    For matrices only: give all else another rule, with `partition`.

    Raises:
        ValueError: for another `adjust_lr_fn`, too many steps, or not three coefficients; from
            init, for a parameter that is not a matrix.
        TypeError: from init, for a complex parameter.

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
    update = orthogonal(ns_coefficients, eps, ns_steps, adjust_lr_fn)
    real = base.real_only("orthogonalize")

    def init(p: Tensor) -> base.EmptyState:
        if p.dim() != 2:
            raise ValueError(
                f"orthogonalize takes matrices, but got a parameter of shape {tuple(p.shape)}; "
                "give it another rule, with partition."
            )
        return real(p)

    return leafwise(init, update, elementwise=False, batched=True, name="orthogonalize")


def orthogonal(
    ns_coefficients: tuple[float, float, float],
    eps: float,
    ns_steps: int,
    adjust_lr_fn: str | None,
) -> Callable[..., tuple[Tensor, Any]]:
    """The `update` of `orthogonalize`.

    Raises:
        ValueError: for numbers out of range.
    """
    if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"Adjust learning rate function {adjust_lr_fn} is not supported")
    numeric.check_count("orthogonalize", 0, ns_steps=ns_steps)
    if ns_steps >= 100:
        raise ValueError("Number of steps must be less than 100 for computational efficiency")
    if len(ns_coefficients) != 3:
        raise ValueError("Coefficients must be a tuple of exactly 3 values")

    def update(G: Tensor, slots: Any, p: Any) -> tuple[Tensor, Any]:
        X = newton_schulz(G, ns_coefficients, ns_steps, eps).to(G.dtype)
        return shape_factor(adjust_lr_fn, *G.shape[-2:]) * X, slots

    return update


def shape_factor(adjust_lr_fn: str | None, m: int, n: int) -> float:
    """The factor on the step of an m × n matrix."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    return math.sqrt(max(1, m / max(n, 1))) if adjust_lr_fn == "original" else 1.0
