"""Rules on the CPU that look at rows, columns or whole tensors: one library for every shape.

There is a library for each number of dimensions, and one more for each way in which dimensions are
of size 1. A call of it goes over all tensors of a kind.
"""

from __future__ import annotations

import array
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim import kernels
from functional_optim.core.rule import Placement
from functional_optim.core.storage import Slots, present
from functional_optim.core.turns import takes_turns
from functional_optim.engine.executor import BoundScalars, How
from functional_optim.engine.kernel_body import KernelBody
from functional_optim.engine.native import GRAIN, KernelExecutor, elementwise, in_memory, kind_of
from functional_optim.kernels.dynamic_shapes import MOST, Axes

SHARED = 4 * GRAIN
"""Entries from which threads share the work. It is a call of its own for vectors, which are small,
and on a busy machine threads wait for each other longer than these take."""

LONG = 1 << 17
"""Entries of a row, which one thread sums plainly, from which on a tensor is left to others."""


class DynamicShapeExecutor(KernelExecutor):
    """Rules that are not element-wise on contiguous CPU tensors of any sizes."""

    @classmethod
    def accepts(
        cls, placements: tuple[Placement, ...], g: Tensor, p: Tensor, slots: list[Slots], how: How
    ) -> Hashable | None:
        """Contiguous tensors with slots whose dimensions are the parameter's, or of size 1."""
        rules = [placement.rule for placement in placements]
        if how not in ("compiled", "strict") or elementwise(placements):
            return None
        mine = [p, *present(slots)]
        if p.device.type != "cpu" or not in_memory(g, mine, flat=False):
            return None
        axes = [_axes(x, p) for x in mine]
        plain = all(x.is_contiguous() and not x.is_complex() for x in mine) and p.numel() > 0
        if None in axes or not plain or any(rule.batched for rule in rules):
            return None
        sizes = _sizes(p)
        if len(sizes) > MOST or math.prod(sizes[1:]) > LONG:
            return None
        return (*kind_of(g, p, slots), tuple(axes))

    def wanted(self, grads: list[Tensor], scalars: BoundScalars) -> list[kernels.Request]:
        """The library of a task; there is none for tensors that take different variants."""
        return [] if takes_turns(scalars.placements) else [self._wanted(self.body(scalars))]

    def _wanted(self, body: KernelBody) -> kernels.Request:
        first = self.params[0]
        found = [_axes(x, first) for x in (first, first, *present(self.slots[0]))]
        axes = tuple([own for own in found if own is not None])  # none is: all were accepted
        signature = kernels.ShapeSignature(self.dtypes, axes, (body.count, self.compute))
        outputs = len(body.probe(first))
        return kernels.Request(body.key(), body.functions(), body.one, signature, outputs)

    def build(self, body: KernelBody) -> Any:
        """The library, ready to go over these tensors; None if the rule cannot be cut for one."""
        native = kernels.sweep(self._wanted(body), strict=self.group.strict)
        if native is None:
            return None
        rows = array.array("q")
        for p, mine in zip(self.params, self.slots, strict=True):
            rows.extend(map(Tensor.data_ptr, (p, *present(mine))))
        large = sum(p.numel() for p in self.params) >= SHARED
        threads = torch.get_num_threads() if large else 1
        sizes = list(map(_sizes, self.params))
        return kernels.ShapedLaunch(native, sizes, rows, threads, self.compute)

    def call(
        self, kernel: Any, grads: list[Tensor], scalars: BoundScalars
    ) -> Callable[[], Sequence[Any]]:
        """One call of the library, in C."""
        return kernel.ready(grads, scalars.numbers)


def _sizes(p: Tensor) -> list[int]:
    """The sizes of a tensor that are not 1."""
    return [size for size in p.shape if size != 1]


def _axes(x: Tensor, p: Tensor) -> Axes | None:
    """The dimensions of a slot: for each the index among the parameter's sizes that are not 1, or
    None where it is of size 1. None if they are not the parameter's."""
    if x.dim() == 0:
        return ()
    if x.dim() != p.dim():
        return None
    found: list[int | None] = []
    known = 0
    for mine, whole in zip(x.shape, p.shape, strict=True):
        if mine not in (1, whole):
            return None
        found.append(None if mine == 1 else known)
        known += whole != 1
    return tuple(found)
