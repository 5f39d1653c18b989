"""Element-wise rules on a card: one launch of a Triton kernel goes over all tensors of a kind.

Nothing here waits for the device. Numbers that the host knows go with the launch, and the kernel
reads those that are only known on the device, as a global norm, or a step count that is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import kernels
from functional_optim.core.rule import Placement
from functional_optim.core.storage import Slots
from functional_optim.engine import unpacked
from functional_optim.engine.executor import BoundScalars, How
from functional_optim.engine.native import UnpackingExecutor, kernel_size
from functional_optim.engine.staged import KernelPart, measuring, parts_of


class TritonExecutor(UnpackingExecutor):
    """Element-wise rules on plain tensors of a device that has a driver, whatever their sizes.

    A rule that measures each tensor has a launch of its own before the step, which reads the sums.
    """

    skips = True

    def __init__(self, group: Any, members: list[int], grads: list[Tensor]) -> None:
        super().__init__(group, members, grads)
        self.sizes = list(map(kernel_size, self.params))
        self.given = kernels.Gradients(self.device, len(self.params))

    @classmethod
    def accepts(
        cls, placements: tuple[Placement, ...], g: Tensor, p: Tensor, slots: list[Slots], how: How
    ) -> Hashable | None:
        """Tensors of a card, none of whose slots is packed by a codec of a user's own."""
        on_card = p.device.type in kernels.DRIVERS
        known = on_card and unpacked.all_in_blocks(placements, p)
        return super().accepts(placements, g, p, slots, how) if known else None

    def prepare(self, grads: list[Tensor], scalars: BoundScalars) -> bool:
        """Write and compile the kernels of a task; False, with a warning, if one cannot be had."""
        missing = kernels.DRIVERS[self.device.type].missing()
        if missing is not None:
            return self._gave_way(f"no Triton kernels can be built here ({missing})")
        stages = self._stages(scalars)
        if stages is None:
            return False
        try:
            stages.ready(self._readable(grads), scalars)
        except kernels.CaptureError:
            raise
        except Exception as error:  # of a compiler, or of the comparison with the rule
            return self._gave_way(f"a Triton kernel cannot be used ({kernels.line(error)})")
        self.kernels[scalars.task] = stages
        return True

    def _gave_way(self, what: str) -> bool:
        if self.group.strict:
            raise kernels.refusal(what)
        kernels.tell(f"{what}; steps on {self.device.type} go through torch.compile")
        return False

    def _stages(self, scalars: BoundScalars) -> StagedTables | None:
        """The launches of a task, none of which writes before the last; None if a rule cannot be
        written."""
        parts = [KernelPart(self.body(scalars), [*range(len(self.holes))], 0, 0)]
        if measuring(scalars):
            parts = parts_of(scalars, self.holes, self.params[0], cut=False)
        stages: list[TableStage] = []
        for part in parts:
            kernel = self._kernel(part)
            if kernel is None:
                return None
            launch = kernels.TableLaunch(
                kernel, self.sizes, self._rows(part), each=part is not parts[-1]
            )
            stages.append(TableStage(launch, part.before, part.body.count - part.before))
        return StagedTables(stages, self.given)

    def _kernel(self, part: KernelPart) -> Any:
        here = torch.device("cpu")  # where the rule is traced
        wanted = self.request(part.body, part.entries(self.entries[0], None), here)
        return kernels.table_kernel(wanted, self.device, strict=self.group.strict)

    def _rows(self, part: KernelPart) -> list[list[int]]:
        """The addresses of each parameter and its slots."""
        return [
            unpacked.addresses([(p,), *part.entries(own, None)])
            for p, own in zip(self.weights, self.entries, strict=True)
        ]

    def call(
        self, kernel: StagedTables, grads: list[Tensor], scalars: BoundScalars
    ) -> Callable[[], Sequence[Any]]:
        """All launches of a task, with what they need on the device."""
        return kernel.ready(grads, scalars)


class TableStage(NamedTuple):
    """A launch of a task. before: how many sums of each tensor it reads. numbers: how many of the
    step's numbers it reads then."""

    launch: kernels.TableLaunch
    before: int
    numbers: int

    def sources(self, step: tuple[kernels.Source, ...]) -> tuple[kernels.Source, ...]:
        """Where its numbers come from. step: where those of the step do."""
        rows: list[kernels.Source] = ["row"] * self.before
        return (*rows, *step[: self.numbers])


class StagedTables:
    """The launches of a task in their order: all but the last one measure each tensor."""

    def __init__(self, stages: Sequence[TableStage], given: kernels.Gradients) -> None:
        self.stages = stages
        self.given = given
        self.device = given.device
        kernel = stages[-1].launch.kernel
        self.outputs = kernel.outputs
        self.width = sum([stage.launch.kernel.outputs for stage in stages[:-1]])
        shape = (len(stages[0].launch.sizes), self.width)
        self.table = torch.empty(shape, dtype=torch.float64, device=self.device)

    def ready(self, grads: list[Tensor], scalars: BoundScalars) -> Callable[[], Sequence[Any]]:
        """The call of all launches, which returns the sums of the last one as tensors.

        Raises:
            Exception: if a kernel cannot be compiled.
        """
        addresses = list(map(Tensor.data_ptr, grads))
        sources, numbers, skip = scalars.sources, scalars.on(self.device), scalars.skip
        if skip is not None:
            skip = skip.to(self.device, torch.float32, non_blocking=True)
        launchers = [
            stage.launch.ready(
                addresses,
                stage.sources(sources),
                skips=skip is not None and stage is self.stages[-1],
            )
            for stage in self.stages
        ]
        given = self.given.address(addresses)
        return partial(self._run, launchers, given, numbers, skip, grads)

    def _run(
        self,
        launchers: list[Any],
        given: int,
        numbers: list[Any],
        skip: Tensor | None,
        grads: list[Tensor],
    ) -> Sequence[Tensor]:
        args = [x.data_ptr() if isinstance(x, Tensor) else x for x in numbers]
        totals: Tensor | None = None
        for stage, own in zip(self.stages, launchers, strict=True):
            first = self.width - stage.before
            found = self.table[:, first:] if stage.before else None
            outputs = stage.launch.kernel.outputs
            if stage is not self.stages[-1]:
                totals = self.table[:, first - outputs : first]
            elif outputs:
                totals = torch.empty(1, outputs, dtype=torch.float64, device=self.device)
            else:
                totals = None
            last = skip if stage is self.stages[-1] else None
            stage.launch.run(own, given, args[: stage.numbers], found, totals, last)
        return () if totals is None else totals[0].unbind()
