"""Rules that measure each tensor for itself, on the CPU: kernels one after the other.

The rules up to one that measures make a kernel, which leaves the update and the new slots in
memory, and the sums. The next kernel reads the update and the sums. All of them go over a few
tensors before the next few, so the update is still in the cache. Where a rule looks back to an
update that is gone by then, and where nothing may be written, the first kernels only measure, and
the last one runs all rules.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import kernels
from functional_optim.core.rule import Form, Placement, form_of
from functional_optim.core.storage import Slots
from functional_optim.engine.cuts import PUT, SKIP, TAKE
from functional_optim.engine.executor import BoundScalars
from functional_optim.engine.kernel_body import KernelBody
from functional_optim.engine.unpacked import addresses, without_codecs

CHUNK = 1 << 20
"""Elements that all kernels go over before the next ones; a larger tensor goes by itself."""


class KernelPart(NamedTuple):
    """One of the kernels of a task.

    rules: the index of each of its rules; None for one that reads or leaves the update, -1 for one
    that is skipped. before: how many sums it reads. sums: how many it leaves.
    """

    body: KernelBody
    rules: list[int | None]
    before: int
    sums: int

    def entries(self, slots: list[Slots], update: Tensor | None) -> list[Slots]:
        """The slots of a parameter that the kernel sees. update: the memory for the update."""
        return [(update,) if k is None else () if k < 0 else slots[k] for k in self.rules]


def measuring(scalars: BoundScalars) -> list[int]:
    """The indices of the rules that measure each tensor."""
    last = len(scalars.placements) - (scalars.goal == "reduce")
    return [i for i in range(last) if scalars.placements[i].rule.measure is not None]


def parts_of(
    scalars: BoundScalars, holes: list[tuple[bool, ...]], like: Tensor, *, cut: bool
) -> list[KernelPart]:
    """The kernels of a task. like: a parameter. cut: whether they hand on the update."""
    measured: dict[int, Form] = {}
    found: list[KernelPart] = []
    start = 0
    for i in [*measuring(scalars), None]:
        stop = len(scalars.placements) if i is None else i + 1
        forms = [form_of(own) for own in scalars.numbers[:stop]]
        placements, rules = (
            list(without_codecs(scalars.placements[:stop])),
            list[int | None](range(stop)),
        )
        if cut and start:
            for k in range(_stateless(placements, start), start - 1):
                placements[k], rules[k] = SKIP, -1
            placements[start - 1], rules[start - 1] = TAKE, None
        task = scalars.goal if i is None else "measure"
        if cut and i is not None:
            back, task = placements[i].lookback, "advance"
            if back is not None:
                placements[i] = placements[i].looking_back(back + 1)
            placements.insert(i, PUT)
            rules.insert(i, None)
            forms.insert(i, Form(None, 0, 0))
        gaps = [(False,) if k is None else () if k < 0 else holes[k] for k in rules]
        body = KernelBody(placements, gaps, tuple(forms), task, {**measured})
        sums = body.probe(like)
        found.append(KernelPart(body, rules, sum([x.size for x in measured.values()]), len(sums)))
        if i is not None:
            measured = {i: form_of(sums), **measured}
            start = i
    return found


def can_be_cut(scalars: BoundScalars) -> bool:
    """Whether each rule finds the updates that it reads after a cut."""
    placements, at = scalars.placements, measuring(scalars)
    if scalars.goal != "step" or any(form_of(own).selected for own in scalars.numbers):
        return False
    for i, placement in enumerate(placements):
        if placement.lookback is None:
            continue
        seen = i - placement.lookback
        starts = [0, *[k for k in at if k <= i]][-1 - (i in at) :]  # also where it only measures
        if any(_stateless(placements, start) < seen < start for start in starts):
            return False
    return True


def _stateless(placements: Sequence[Placement], stop: int) -> int:
    """How many of the first rules have neither slots nor a measure, and can run once more."""
    for k, placement in enumerate(placements[:stop]):
        if placement.rule.weight_codec is not None:
            continue  # its slots belong to the parameter
        if placement.rule.keys or placement.rule.measure is not None:
            return min(k, stop - 1)
    return max(stop - 1, 0)


class StagedLaunch:
    """Kernels that read what the ones before have measured on each tensor.

    Args:
        parts: the kernels, with their libraries.
        params: the tensors, as kernels see them. sizes: the number of their real entries.
        slots: for each tensor, those of each rule.
        numbers: how many numbers a step has. dtype: theirs, and that of updates.
        threads: how many share the work.
        cut: whether the update is handed on.
    """

    def __init__(
        self,
        parts: Sequence[tuple[KernelPart, kernels.Native]],
        params: list[Any],
        sizes: list[int],
        slots: list[list[Slots]],
        numbers: int,
        dtype: torch.dtype,
        threads: int,
        *,
        cut: bool,
    ) -> None:
        cuts = _chunks(sizes) if cut else [(0, len(sizes))]
        longest = max([sum(sizes[a:b]) for a, b in cuts])
        self.update = torch.empty(longest if cut else 0, dtype=dtype)
        self.sums = sum([part.sums for part, _ in parts[:-1]])
        self.table = torch.empty(len(sizes), self.sums + numbers, dtype=dtype)
        self.stages = kernels.Stages(len(sizes))
        for a, b in cuts:
            for part, native in parts:
                rows, at = array.array("q"), 0
                for p, own, size in zip(params[a:b], slots[a:b], sizes[a:b], strict=True):
                    update = self.update[at:] if cut else None
                    rows.extend(addresses([(p,), *part.entries(own, update)]))
                    at += size
                each = part is not parts[-1][0]
                launch = kernels.MultiTensorLaunch(
                    native, sizes[a:b], rows, threads, dtype, each=each
                )
                first = self.sums - part.before
                found = self.table[a:b, first - part.sums : first] if each else None
                self.stages.add(launch, a, self.table[a:b, first:], found)

    def ready(self, grads: list[Tensor], numbers: Tensor) -> Callable[[], Sequence[Any]]:
        """The call of all kernels, which returns the sums of the last one."""
        return partial(self._run, grads, numbers)

    def _run(self, grads: list[Tensor], numbers: Tensor) -> Sequence[Any]:
        self.table[:, self.sums :] = numbers
        return self.stages.run(grads)


def _chunks(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the end of the tensors of each chunk."""
    found: list[tuple[int, int]] = []
    start = filled = 0
    for i, size in enumerate(sizes):
        if filled and filled + size > CHUNK:
            found.append((start, i))
            start, filled = i, 0
        filled += size
    return [*found, (start, len(sizes))]
