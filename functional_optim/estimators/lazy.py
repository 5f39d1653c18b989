"""Parameters that are made when they are read, so that no two of them need be there at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_optim import tree

LOOKS = {
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "is_leaf",
        "ndim",
        "grad_fn",
    )
} | {
    getattr(Tensor, name)
    for name in ("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "__len__")
}
"""What can be said of a tensor without its values."""


class Lazy(Tensor):
    """A tensor like p, with values that `make` returns, each time that an operation reads them.

    It has p's memory, so its own costs none. Tied parameters are made at each place where they are
    used. Operations of torch see plain tensors.
    """

    make: Callable[[], Tensor]
    looks: Tensor

    @staticmethod
    def __new__(cls, p: Tensor, make: Callable[[], Tensor]) -> Lazy:
        plain = p.detach()
        self = plain.as_subclass(cls)
        self.make, self.looks = make, plain
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        seen = looks if func in LOOKS else made
        plain, named = tree.map(seen, (args, kwargs or {}))
        return func(*plain, **named)


def looks(x: Any) -> Any:
    """A plain tensor like a lazy one; anything else as it is."""
    return x.looks if isinstance(x, Lazy) else x


def made(x: Any) -> Any:
    """A lazy tensor's values; anything else as it is."""
    return x.make() if isinstance(x, Lazy) else x


def can_be_lazy(p: Tensor) -> bool:
    """Is a leaf a plain tensor?"""
    return type(p) in (Tensor, torch.nn.Parameter)
