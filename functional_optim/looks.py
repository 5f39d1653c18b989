"""How tensors looked at one step, so that what was built from them serves the next."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim import kernels

PLAIN = {Tensor, torch.nn.Parameter}
"""Types of tensors whose memory is all there is to them."""


class Looks:
    """Gradients as they looked, and where tensors lay.

    Args:
        given: gradients, and None where there is none.
        tensors: whose memory is looked after. One that keeps its address is taken to keep its
            length, if it is a vector, as its gradient's would not.
        objects: what the library compares by identity, as it wants it.
    """

    def __init__(
        self, given: Sequence[Tensor | None], tensors: list[Tensor], *objects: tuple[Any, ...]
    ) -> None:
        self.kinds = tuple(map(type, given))
        grads = [g for g in given if g is not None]
        layouts = [g.layout for g in grads]
        self.layouts = layouts if any(x is not torch.strided for x in layouts) else None
        dense = self._dense(grads)
        self.strides = tuple(map(Tensor.stride, dense))
        self.sizes = tuple(map(Tensor.numel, dense))
        self.dtypes = tuple(map(_dtype_of, dense))
        self.addresses = kernels.Addresses([x for x in tensors if type(x) in PLAIN])
        self.others = [x for x in tensors if type(x) not in PLAIN]
        self.places = list(map(Tensor.data_ptr, self.others))
        self.wide = tuple([x for x in tensors if x.dim() > 1])
        self.wide_strides = tuple(map(Tensor.stride, self.wide))
        self.meshes = _meshes(grads)
        first, *rest = objects
        self.whole = (
            *(self.kinds, self.strides, self.sizes, self.dtypes, first),
            *(self.wide, self.wide_strides, self.addresses.whole, *rest),
        )

    def look(self, function: str, *now: Any) -> Any:
        """What a function of the library says of these objects; NotImplemented without one."""
        library = kernels.watcher()
        if library is None or self.layouts is not None:
            return NotImplemented
        grads = getattr(library, function)(*now, self.whole)
        return grads if grads is None or self._others_stay(grads) else None

    def fit(self, given: list[Tensor | None]) -> list[Tensor] | None:
        """The gradients that are there, if these look the same and no tensor has moved."""
        if tuple(map(type, given)) != self.kinds:
            return None
        grads = [g for g in given if g is not None]
        if self.layouts is not None and [g.layout for g in grads] != self.layouts:
            return None
        dense = self._dense(grads)
        try:
            same = (
                tuple(map(Tensor.stride, dense)) == self.strides
                and tuple(map(Tensor.numel, dense)) == self.sizes
                and tuple(map(_dtype_of, dense)) == self.dtypes
                and tuple(map(Tensor.stride, self.wide)) == self.wide_strides
                and self.addresses.same()
                and self._others_stay(grads)
            )
        except RuntimeError:  # a sparse tensor has no strides
            return None
        return grads if same else None

    def _others_stay(self, grads: list[Tensor]) -> bool:
        if self.meshes and _meshes(grads) != self.meshes:
            return False
        return not self.others or list(map(Tensor.data_ptr, self.others)) == self.places

    def _dense(self, grads: list[Tensor]) -> list[Tensor]:
        return grads if self.layouts is None else [g for g in grads if g.layout is torch.strided]


def _meshes(grads: list[Tensor]) -> list[Any]:
    """Between which processes gradients are divided."""
    return [mesh for g in grads if (mesh := getattr(g, "device_mesh", None)) is not None]


_dtype_of = attrgetter("dtype")
