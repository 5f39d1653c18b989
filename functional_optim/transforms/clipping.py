"""Bounding updates by value or by norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functional_optim import numeric
from functional_optim.leafwise import Leafwise, leafwise


def clip_by_value(max_value: numeric.Hyper) -> Leafwise:
    """Clip every entry to [−max_value, max_value].

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
    _check_bound("clip_by_value", "max_value", max_value)

    def scalars(t: Any) -> tuple[Any]:
        return (numeric.at(max_value, t),)

    def update(u: Tensor, slots: Any, p: Tensor, c: Any) -> tuple[Tensor, Any]:
        return u.clamp(-c, c), slots

    return leafwise(None, update, scalars, name="clip_by_value", hyper={"max_value": max_value})


def clip_by_global_norm(max_norm: numeric.Hyper, eps: float = 0.0) -> Leafwise:
    """Scale all updates down together so that their common Euclidean norm is at most max_norm.

    The norm is taken over the whole tree: in an optimizer object over all parameter groups, on
    sharded tensors over the whole model.

    Args:
        max_norm: bound, > 0: a number, a 0-dim tensor, or a schedule.
        eps: added to the norm before dividing. 0 as in optax; 1e-6 gives the numbers of
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
    _check_bound("clip_by_global_norm", "max_norm", max_norm)

    def reduce(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor]:
        return ((u * u).sum(),)

    def scalars(t: Any, total: tuple[Any]) -> tuple[Any]:
        norm = numeric.sqrt(total[0])
        return (1 / numeric.maximum(1.0, (norm + eps) / numeric.at(max_norm, t)),)

    def update(u: Tensor, slots: Any, p: Tensor, c: Any) -> tuple[Tensor, Any]:
        return c * u, slots

    return leafwise(
        None,
        update,
        scalars,
        reduce=reduce,
        name="clip_by_global_norm",
        hyper={"max_norm": max_norm},
    )


def _check_bound(link: str, name: str, bound: numeric.Hyper) -> None:
    numeric.check(lambda x: x > 0, bound, f"{link} needs a positive {name}, but got {{}}.")
