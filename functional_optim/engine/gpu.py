"""Rules on a GPU: launches of Triton kernels for all tensors of a kind.

Nothing here synchronizes with the device. Scalars on the host are launch arguments, and the kernel
reads those on the device, such as a global norm, or a captured step count. The modules that
generate and compile Triton are imported with the first tensor on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim import kernels
from functional_optim.core.rule import Placement, takes_turns
from functional_optim.core.scalars import BoundScalars
from functional_optim.core.storage import Slots
from functional_optim.engine.executor import How, Runner
from functional_optim.engine.native import KernelExecutor, Served
from functional_optim.kernels.graph import Graph


class TritonExecutor(KernelExecutor):
    """Rules of any kind except matrix products, on tensors of a device with a driver."""

    skips = True

    @classmethod
    def accepts(
        cls, placements: tuple[Placement, ...], g: Tensor, p: Tensor, slots: list[Slots], how: How
    ) -> Hashable | None:
        """Tensors of a GPU."""
        fit = p.device.type in kernels.DRIVERS and not any(x.rule.runs.batched for x in placements)
        return super().accepts(placements, g, p, slots, how) if fit else None

    def text_of(self, graph: Graph) -> Hashable:
        """The text of its kernels."""
        from functional_optim.kernels.print_triton import source_of

        return source_of(graph).text

    def prepare(self, grads: list[Tensor], scalars: BoundScalars) -> Runner | None:
        """Launches of the kernels of a task; None, with a warning, if one of them is unusable."""
        missing = kernels.DRIVERS[self.device.type].missing()
        if missing is not None:
            return self._fall_back(f"no Triton kernels can be built here ({missing})")
        try:
            every = [] if takes_turns(scalars.placements) else self.graphs(grads, scalars)
        except kernels.Unsuitable:
            return None
        mine = self._readable(self.mine(grads))
        found: list[tuple[list[int], Any]] = []
        for own in every:
            try:
                launch = TableLaunch(own, self.rows(own), self.device)
                launch.ready([mine[i] for i in own.members], scalars)
            except kernels.CaptureError:
                raise
            except Exception as error:  # from a compiler, or from the comparison with the rule
                return self._fall_back(f"a Triton kernel cannot be used ({kernels.line(error)})")
            found.append((own.members, launch))
        return kernels.Launches(*self.launches(found)) if found else None

    def _fall_back(self, what: str) -> None:
        kernels.fallback(what, f"steps on {self.device.type} run", strict=self.group.strict)


class TableLaunch:
    """The launches of a task over some tensors, which must outlive it.

    rows: for each tensor the addresses of the parameter and its slots.
    """

    def __init__(self, own: Served, rows: list[list[int]], device: torch.device) -> None:
        from functional_optim.kernels import print_triton, triton_builds, triton_launch

        source = print_triton.source_of(own.graph)
        self.device = device
        self.variant = print_triton.KernelVariant
        self.kernel = triton_builds.kernel_of(source, device)
        self.tables = triton_launch.Tables(source, device, own.sizes, rows, own.constants)
        self.given = triton_launch.Gradients(device, len(rows))
        shapes = triton_builds.trial_shapes(source, own.like[1])
        self.check = partial(own.compare, shapes=shapes, device=device)

    def ready(self, grads: list[Tensor], scalars: BoundScalars) -> Callable[[], Sequence[Any]]:
        """The call of all launches, which returns their measurements, summed over the tensors.

        Raises:
            CaptureError: in a capture, if kernels have to be compiled or the work divided again.
            Exception: if a kernel cannot be compiled.
        """
        addresses, skip = list(map(Tensor.data_ptr, grads)), scalars.skip
        if skip is not None:
            skip = skip.to(self.device, torch.float32, non_blocking=True)
        self.tables.divide(addresses)
        launchers = {
            aligned: self.kernel.launchers(
                self.variant(scalars.sources, aligned, skip is not None), self.check
            )
            for aligned in self.tables.alignments
        }
        given = self.given.address(addresses)
        numbers = scalars.on(self.device)
        return partial(self.tables.run, launchers, given, numbers, skip, alive=grads)
