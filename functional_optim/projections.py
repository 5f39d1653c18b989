"""Projections: the nearest point of a set, for a tensor or a tree.

A tree counts as one vector: `l2_ball` bounds the common norm of all its leaves. To project each
parameter separately during training, use the transform `functional_optim.keep_params_in`. Sharded
leaves (DTensors) are gathered for a vector, and sharded again afterwards.

Held, Wolfe, Crowder, "Validation of subgradient optimization", https://doi.org/10.1007/BF01580223;
Duchi, Shalev-Shwartz, Singer, Chandra, "Efficient projections onto the l1-ball for learning in high
dimensions", https://doi.org/10.1145/1390156.1390191, Figure 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.core import sharding
from functional_optim.numeric import Number


def non_negative(params: Any) -> Any:
    """All elements at least 0.

    Args:
        params: a pytree of real tensors.

    Example::

        >>> import torch, functional_optim as fo
        >>> fo.projections.non_negative(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """
    return tree.map(lambda x: _real(x).clamp(min=0.0), params)


def box(params: Any, lower: Any, upper: Any) -> Any:
    """All elements between `lower` and `upper`.

    Args:
        params: a pytree of real tensors.
        lower: a number, a 0-dim tensor, or a tree like `params`.
        upper: the same, not below `lower`.

    Example::

        >>> import torch, functional_optim as fo
        >>> fo.projections.box(torch.tensor([-1.0, 0.5, 2.0]), 0.0, 1.0)
        tensor([0.0000, 0.5000, 1.0000])
    """
    if numeric.is_static(lower) and numeric.is_static(upper):
        numeric.check(
            lambda x: x >= lower, upper, f"box needs an upper of at least {lower}, but got {{}}."
        )
    low, high = _spread(lower, params), _spread(upper, params)
    return tree.map(lambda x, a, b: _real(x).clamp(min=a).clamp(max=b), params, low, high)


def hypercube(params: Any, scale: Any = 1.0) -> Any:
    """All elements between 0 and `scale`.

    Args:
        params: a pytree of real tensors.
        scale: ≥ 0: a number, a 0-dim tensor, or a tree like `params`.

    Example::

        >>> import torch, functional_optim as fo
        >>> fo.projections.hypercube(torch.tensor([-1.0, 0.5, 2.0]))
        tensor([0.0000, 0.5000, 1.0000])
    """
    return box(params, 0.0, scale)


def linf_ball(params: Any, scale: Number = 1.0) -> Any:
    """All elements between −`scale` and `scale`.

    Args:
        params: a pytree of real tensors.
        scale: ≥ 0, a number or a 0-dim tensor.

    Example::

        >>> import torch, functional_optim as fo
        >>> fo.projections.linf_ball(torch.tensor([-3.0, 0.5]), 2.0)
        tensor([-2.0000,  0.5000])
    """
    return box(params, -scale, scale)


def simplex(params: Any, scale: Number = 1.0) -> Any:
    """All elements at least 0, and their sum `scale`.

    Args:
        params: a pytree of real tensors, with at least one element.
        scale: > 0, a number or a 0-dim tensor.

    Example::

        >>> import torch, functional_optim as fo
        >>> fo.projections.simplex({"a": torch.tensor([2.0, 0.0]), "b": torch.tensor([1.5])})
        {'a': tensor([0.7500, 0.0000]), 'b': tensor([0.2500])}
    """
    vector = _joined("simplex", params, scale)
    return _divided((vector - _threshold(vector, scale)).clamp(min=0.0), params)


def l1_ball(params: Any, scale: Number = 1.0) -> Any:
    """The sum of the absolute values at most `scale`.

    Args:
        params: a pytree of real tensors.
        scale: > 0, a number or a 0-dim tensor.

    Example::

        >>> import torch, functional_optim as fo
        >>> fo.projections.l1_ball(torch.tensor([2.0, -1.5]))
        tensor([ 0.7500, -0.2500])
    """
    vector = _joined("l1_ball", params, scale)
    size = vector.abs()
    near = vector.sign() * (size - _threshold(size, scale)).clamp(min=0.0)
    return _divided(torch.where(size.sum() <= scale, vector, near), params)


def l1_sphere(params: Any, scale: Number = 1.0) -> Any:
    """The sum of the absolute values exactly `scale`; a zero may become positive.

    Args:
        params: a pytree of real tensors, with at least one element.
        scale: > 0, a number or a 0-dim tensor.

    Example::

        >>> import torch, functional_optim as fo
        >>> fo.projections.l1_sphere(torch.tensor([0.25, -0.25]))
        tensor([ 0.5000, -0.5000])
    """
    vector = _joined("l1_sphere", params, scale)
    size = vector.abs()
    sign = torch.where(vector < 0, -1.0, 1.0).to(vector.dtype)
    return _divided(sign * (size - _threshold(size, scale)).clamp(min=0.0), params)


def l2_ball(params: Any, scale: Number = 1.0) -> Any:
    """The Euclidean norm at most `scale`.

    Args:
        params: a pytree of real tensors.
        scale: > 0, a number or a 0-dim tensor.

    Example::

        >>> import torch, functional_optim as fo
        >>> fo.projections.l2_ball({"a": torch.tensor([6.0]), "b": torch.tensor([8.0])}, 5.0)
        {'a': tensor([3.]), 'b': tensor([4.])}
    """
    vector = _joined("l2_ball", params, scale)
    excess = (vector / scale).square().sum().clamp(min=1.0)  # the root of 0 has no derivative
    return _divided(vector / excess.sqrt(), params)


def l2_sphere(params: Any, scale: Number = 1.0) -> Any:
    """The Euclidean norm exactly `scale`; NaN if all elements are 0, which has no nearest point.

    Args:
        params: a pytree of real tensors.
        scale: > 0, a number or a 0-dim tensor.

    Example::

        >>> import torch, functional_optim as fo
        >>> fo.projections.l2_sphere(torch.tensor([0.3, 0.4]), 5.0)
        tensor([3., 4.])
    """
    vector = _joined("l2_sphere", params, scale)
    return _divided(vector * (scale / vector.square().sum().sqrt()), params)


def _real(x: Tensor) -> Tensor:
    """A tensor itself; raises TypeError if it is complex."""
    if x.is_complex():
        raise TypeError(f"projections take real tensors, but got one of dtype {x.dtype}.")
    return x


def _threshold(vector: Tensor, scale: Number) -> Tensor:
    """τ such that the parts of a vector above τ sum to `scale`."""
    if not vector.numel():
        return vector.sum()
    ordered = vector.sort(descending=True).values
    count = torch.arange(1, vector.numel() + 1, dtype=vector.dtype, device=vector.device)
    # the mean excess over the k largest; the threshold is the largest of these means
    return ((ordered.cumsum(0) - scale) / count).amax()


def _joined(name: str, params: Any, scale: Number) -> Tensor:
    """All elements as one vector, in float32 at least; ValueError, naming the projection, for a
    scale that is not above 0."""
    numeric.check_range(name, "above 0", scale=scale)
    parts = [sharding.whole(_real(x)).reshape(-1) for x in tree.leaves(params)]
    wide = [x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in parts]
    return torch.cat(wide) if len(wide) != 1 else wide[0]


def _divided(vector: Tensor, params: Any) -> Any:
    """A vector split into a tree like `params`."""
    leaves = tree.leaves(params)
    pairs = zip(leaves, vector.split([x.numel() for x in leaves]), strict=True)
    found = [sharding.placed_like(y.reshape(x.shape).to(x.dtype), x) for x, y in pairs]
    return tree.with_leaves(params, found)


def _spread(bound: Any, params: Any) -> Any:
    """A bound for each leaf."""
    if isinstance(bound, (bool, int, float)) or (isinstance(bound, Tensor) and bound.dim() == 0):
        return tree.map(lambda _: bound, params)
    return bound
