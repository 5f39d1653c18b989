"""Rules with products of matrices, and other devices than the CPU: kernels called with tensors.

They are Inductor's own callables, or plain torch.compile where these cannot be had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim import kernels
from functional_optim.core.execution import batches
from functional_optim.core.storage import present
from functional_optim.engine.executor import BoundScalars
from functional_optim.engine.kernel_body import KernelBody
from functional_optim.engine.native import GRAIN, KernelExecutor, elementwise, kernel_size

CHUNK = 16
"""Tensors that one launch steps on a device where launches are dear."""


class InductorExecutor(KernelExecutor):
    """Any rule on plain tensors of any device: a kernel a shape, unless it is element-wise."""

    def prepare(self, grads: list[Tensor], scalars: BoundScalars) -> bool:
        """Compile the kernel of a task. No other executor compiles what this one cannot."""
        spread = [x.name for x in scalars.placements if x.rule.turns]
        if spread:
            what = f"{spread[0]} has turns without products of contiguous matrices on the CPU"
            if self.group.strict:
                raise kernels.refusal(what)
            kernels.tell(f"{what}, so its steps run eagerly")
        return super().prepare(grads, scalars)

    def build(self, body: KernelBody) -> Any:
        """Kernels, and the indices of their tensors; None where nothing compiles the rule."""
        numbers = (body.count, self.compute)
        key, parts = body.key(), []
        for cut in self._cut(body):
            large = max(kernel_size(self.params[i]) for i in cut) >= GRAIN
            threads = torch.get_num_threads() if large and self.device.type == "cpu" else 1
            signature = kernels.Signature(
                (self.dtypes,) * len(cut), self._shapes(cut), numbers, self.device, threads
            )
            kernel = kernels.build(key, body.many, signature, strict=self.group.strict)
            if isinstance(kernel, kernels.Public) and not kernel.works:
                return None  # a rule that may raise must not run while tensors are written
            parts.append((kernel, cut))
        return parts

    def _cut(self, body: KernelBody) -> list[list[int]]:
        """The indices of the tensors of each launch."""
        every = list(range(len(self.params)))
        if body.stacks():
            return batches(every, self.params[0].numel())
        size = 1 if self.device.type == "cpu" else CHUNK
        return [every[at : at + size] for at in range(0, len(every), size)]

    def _shapes(self, members: Sequence[int]) -> Any:
        """Shape and strides of each tensor of each leaf; None where a kernel sees all as 1-D."""
        if elementwise(self.group.placements):
            return None
        views = [
            [_plain(x) for x in (self.params[i], self.params[i], *present(self.slots[i]))]
            for i in members
        ]
        return tuple([tuple([(tuple(x.shape), x.stride()) for x in leaf]) for leaf in views])

    def call(
        self, kernel: Any, grads: list[Tensor], scalars: BoundScalars
    ) -> Callable[[], Sequence[Any]]:
        """A call for each few tensors."""
        return partial(self._run, kernel, grads, scalars)

    def _run(self, kernel: Any, grads: list[Tensor], scalars: BoundScalars) -> Sequence[Any]:
        flat = elementwise(self.group.placements)
        numbers = scalars.tensor(self.compute, self.device)
        sums = []
        for one, members in kernel:
            args: list[Any] = [kernel_size(self.params[i]) for i in members] if flat else []
            for i in members:
                args += map(_plain, (grads[i], self.params[i], *present(self.slots[i])))
            sums.append(one([*args, numbers]))
        return [torch.stack(list(column)).sum() for column in zip(*sums, strict=True)]


def _plain(x: Tensor) -> Tensor:
    """A tensor as a kernel sees it: complex numbers as pairs."""
    return torch.view_as_real(x) if x.is_complex() else x
