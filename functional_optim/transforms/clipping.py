"""Bounding updates by value or by norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.rule import squares, times
from functional_optim.core.scalars import given


@factory
def clip_by_value(max_value: numeric.Hyper) -> Leafwise:
    """Clip every element to [−max_value, max_value].

    Args:
        max_value: bound, > 0: a number, a 0-dim tensor, or a schedule.

    Raises:
        ValueError: if max_value is a number and not positive.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.clip_by_value(1.0)
        >>> w = torch.zeros(3)
        >>> tx.update(torch.tensor([-3.0, 0.5, 2.0]), tx.init(w), w)[0]
        tensor([-1.0000,  0.5000,  1.0000])
    """
    numeric.check_range("clip_by_value", "positive", max_value=max_value)

    def update(u: Tensor, slots: Any, p: Tensor, c: Any) -> tuple[Tensor, Any]:
        return u.clamp(-c, c), slots

    return leafwise(None, update, given, hyper={"max_value": max_value}, name="clip_by_value")


@factory
def clip_by_global_norm(max_norm: numeric.Hyper, eps: float = 0.0) -> Leafwise:
    """Scale all updates down by one factor so that their global norm is at most max_norm.

    The Euclidean norm covers all parameters: in an optimizer object all parameter groups, for
    sharded tensors the whole model.

    Args:
        max_norm: bound, > 0: a number, a 0-dim tensor, or a schedule.
        eps: added to the norm before dividing. 0 as in optax; 1e-6 gives the results of
            `torch.nn.utils.clip_grad_norm_`.

    Raises:
        ValueError: if max_norm is a number and not positive.

    Paper: Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks",
    https://arxiv.org/abs/1211.5063, Algorithm 1.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.clip_by_global_norm(1.0)
        >>> w = {"a": torch.zeros(1), "b": torch.zeros(1)}
        >>> tx.update({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, tx.init(w), w)[0]
        {'a': tensor([0.6000]), 'b': tensor([0.8000])}
    """
    numeric.check_range("clip_by_global_norm", "positive", max_norm=max_norm)

    def scalars(t, total, *, max_norm):
        norm = numeric.sqrt(total[0])
        return (1 / numeric.maximum(1.0, numeric.divide(norm + eps, max_norm)),)

    hyper = {"max_norm": max_norm}
    return leafwise(None, times, scalars, reduce=squares, hyper=hyper, name="clip_by_global_norm")


@factory
def clip_by_block_rms(threshold: numeric.Hyper) -> Leafwise:
    """Scale each tensor's update down so that its root mean square is at most `threshold`.

    Args:
        threshold: bound, > 0: a number, a 0-dim tensor, or a schedule. 1 in Adafactor.

    A complex element counts as two real elements.

    Raises:
        ValueError: if threshold is a number and not positive.

    Paper: Shazeer, Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
    https://arxiv.org/abs/1804.04235, section 6.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.clip_by_block_rms(1.0)
        >>> w = {"a": torch.zeros(2), "b": torch.zeros(2)}
        >>> tx.update({"a": torch.full((2,), 4.0), "b": torch.ones(2)}, tx.init(w), w)[0]
        {'a': tensor([1., 1.]), 'b': tensor([1., 1.])}
    """
    numeric.check_range("clip_by_block_rms", "positive", threshold=threshold)

    def update(u: Tensor, slots: Any, p: Tensor, d: Any) -> tuple[Tensor, Any]:
        # neither the root of 0 nor a mean over no elements has a derivative
        excess = ((u * u).sum() / (max(u.numel(), 1) * d * d)).clamp(min=1.0)
        return u * excess.rsqrt(), slots

    hyper = {"threshold": threshold}
    return leafwise(None, update, given, hyper=hyper, name="clip_by_block_rms")


@factory
def adaptive_grad_clip(clipping: numeric.Hyper, eps: numeric.Hyper = 1e-3) -> Leafwise:
    """Scale each unit's update down so that its norm is at most `clipping` times its weights' norm.

    A unit consists of the weights of one output: a row of a matrix (out, in), a filter of a kernel
    (out, in, height, width). A vector or a scalar is one unit. optax uses the same units in JAX's
    layout: its matrices are (in, out), its kernels (height, width, in, out).

    Args:
        clipping: λ, the largest ratio of the two norms, > 0: a number, a 0-dim tensor, or a
            schedule. The paper uses 0.01 for batches of 4096, and more for smaller batches.
        eps: lower bound of the norm of weights, > 0, so that weights that start from zero can move.
            Default 1e-3, the paper's.

    The paper does not clip the last linear layer: `masked(adaptive_grad_clip(0.01), ...)`.

    Raises:
        ValueError: if clipping or eps is a number and not positive.
        TypeError: from init, for a complex parameter.

    Paper: Brock, De, Smith, Simonyan, "High-Performance Large-Scale Image Recognition Without
    Normalization", https://arxiv.org/abs/2102.06171, equation 3.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.adaptive_grad_clip(0.5)
        >>> w = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
        >>> tx.update(torch.tensor([[0.0, 10.0], [0.0, 1.0]]), tx.init(w), w)[0]
        tensor([[0.0000, 2.5000],
                [0.0000, 1.0000]])
    """
    numeric.check_range("adaptive_grad_clip", "positive", clipping=clipping, eps=eps)

    def update(u: Tensor, slots: Any, p: Tensor, ratio: Any, eps: Any) -> tuple[Tensor, Any]:
        # there are fewer units than elements: divide once per unit, then multiply
        most = ratio * _unit_squares(p).clamp(min=eps * eps).sqrt()
        excess = _unit_squares(u * (1 / most)).clamp(min=1.0)
        return u * (1 / excess.sqrt()), slots

    init, hyper = base.real_only("adaptive_grad_clip"), {"clipping": clipping, "eps": eps}
    return leafwise(init, update, given, hyper=hyper, name="adaptive_grad_clip")


def _unit_squares(x: Tensor) -> Tensor:
    """The squared norm of each unit, broadcastable to x."""
    return (x * x).sum(tuple(range(1, x.dim())) if x.dim() > 1 else None, keepdim=True)
