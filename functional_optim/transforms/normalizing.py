"""Normalization of updates: signs, norms, means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.rule import squares, times
from functional_optim.core.scalars import given


@factory
def sign() -> Leafwise:
    """Replace every element by its sign: −1, 0 or 1; for complex elements, each part.

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
        return torch.where(u.isnan(), u, u.sign()), slots  # torch's sign of a NaN is 0

    return leafwise(None, update, name="sign")


@factory
def normalize(scale_factor: numeric.Hyper = 1.0, eps: numeric.Hyper = 1e-6) -> Leafwise:
    """Scale all updates by one factor so that their global norm is `scale_factor`.

    The norm covers all parameters, as in `clip_by_global_norm`.

    Args:
        scale_factor: the target norm: a number, a 0-dim tensor, or a schedule.
        eps: added to the norm before dividing, ≥ 0. Default 1e-6, as in optax's
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
    numeric.check_range("normalize", "of 0 or more", eps=eps)

    def scalars(t, total, *, scale_factor, eps):
        null = total[0] == 0
        norm = numeric.sqrt(numeric.where(null, 1.0, total[0])) + eps
        return (numeric.where(null, 0.0, scale_factor / norm),)

    hyper = {"scale_factor": scale_factor, "eps": eps}
    return leafwise(None, times, scalars, reduce=squares, hyper=hyper, name="normalize")


@factory
def centralize() -> Leafwise:
    """Subtract the mean of the update of each unit.

    A unit is what leads to one output: a row of a matrix (out, in), a filter of a kernel
    (out, in, height, width). Vectors and scalars pass unchanged.

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

    return leafwise(base.real_only("centralize"), update, name="centralize")


@factory
def scale_by_trust_ratio(
    min_norm: numeric.Hyper = 0.0, trust_coefficient: numeric.Hyper = 1.0, eps: numeric.Hyper = 0.0
) -> Leafwise:
    """Multiply each tensor's update by ‖p‖ / ‖u‖: layers move in proportion to their size.

    If one of the norms is zero, the update passes unchanged.

    Args:
        min_norm: lower bound of both norms, ≥ 0.
        trust_coefficient: a factor, ≥ 0: 1 in LAMB, 0.001 in LARS.
        eps: added to ‖u‖, ≥ 0.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are optax's.

    After `scale_by_adam` and `add_decayed_weights` this is LAMB (`lamb`). LARS has a different
    ratio, `scale_by_lars`.

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
    numeric.check_range("scale_by_trust_ratio", "of 0 or more", **hyper)

    def scalars(t, *, min_norm, trust_coefficient, eps):
        return min_norm * min_norm, trust_coefficient, eps

    def update(u: Tensor, slots: Any, p: Tensor, *numbers: Any) -> tuple[Tensor, Any]:
        min_square, k, eps = numbers
        P, U = [(x * x).sum().clamp(min=min_square) for x in (p, u)]
        return u * trust_ratio(P, U, k, 0.0, eps), slots

    return leafwise(None, update, scalars, hyper=hyper, name="scale_by_trust_ratio")


@factory
def clip_by_trust_ratio(trust_coefficient: numeric.Hyper = 1.0) -> Leafwise:
    """Scale each tensor's update down so that its norm is at most that of the parameter.

    Used instead of `scale_by_trust_ratio`, it turns LAMB into LAMBC: shorter updates pass
    unchanged. So do all updates of a parameter that is zero.

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
    numeric.check_range("clip_by_trust_ratio", "positive", trust_coefficient=trust_coefficient)

    def update(u: Tensor, slots: Any, p: Tensor, c: Any) -> tuple[Tensor, Any]:
        P, U = (p * p).sum(), (u * u).sum()
        return u * trust_ratio(P, U, c, 0.0, 0.0).clamp(max=1.0), slots

    hyper = {"trust_coefficient": trust_coefficient}
    return leafwise(None, update, given, hyper=hyper, name="clip_by_trust_ratio")


def trust_ratio(P: Tensor, U: Tensor, coefficient: Any, decay: Any, eps: Any) -> Tensor:
    """coefficient · ‖p‖ / (‖u‖ + decay · ‖p‖ + eps), 1 if a norm is 0. P, U: the squared norms."""
    null = (P == 0) | (U == 0)
    P, U = P.masked_fill(null, 1.0), U.masked_fill(null, 1.0)  # the root of 0 has no derivative
    ratio = coefficient * P.sqrt() / (U.sqrt() + decay * P.sqrt() + eps)
    return ratio.masked_fill(null, 1.0)
