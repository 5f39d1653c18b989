"""The plan of a step, and the step: measure, work out the numbers, and write.

Both are here once, for optimizer objects and for `compile`. A plan is kept for the next step, which
takes it if its tensors are the same (`guards.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from functional_optim import kernels
from functional_optim.core import modes, sharding
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.lift import everywhere
from functional_optim.core.numbers import Numbers
from functional_optim.core.recording import Kept
from functional_optim.core.rule import Acting, Goal, takes_turns, turns_of
from functional_optim.core.scalars import BoundScalars, Key, StepScalars
from functional_optim.core.totals import (
    ReductionOrder,
    next_measurement,
    nothing_measured,
    over_groups,
    sum_parts,
)
from functional_optim.engine.executor import How, Write
from functional_optim.engine.group import TensorGroup
from functional_optim.engine.guards import TensorGuard
from functional_optim.kernels import watch
from functional_optim.kernels.interrupts import held


class PlanLeaf(NamedTuple):
    """A parameter and its gradient, or None.

    slots: its slots by name, perhaps among others. turns: for each rule that acts on it.
    """

    name: str
    p: Tensor
    g: Any
    slots: dict[str, Any]
    turns: tuple[int, ...] = ()


def turns_in(
    chains: Mapping[int, Leafwise], leaves: Sequence[tuple[int, str, Tensor]]
) -> list[tuple[int, ...]]:
    """The turns of tensors for the rules that act on them.

    leaves: all tensors, also those without a gradient: of each the key of its chain, its name and
    itself.
    """
    if not any(takes_turns(tx.placements) for tx in chains.values()):
        return [()] * len(leaves)
    acting: list[Acting] = []
    for k, name, p in leaves:
        part = chains[k].on(name, p) or Leafwise(())
        pairs = zip(part.placements, part.layout.counts, strict=True)
        acting.append((part.placements, [(x.name, n) for x, n in pairs], p))
    return turns_of(acting)


class PlanEntry:
    """Leaves on which the same rules act, with the same numbers.

    What is left open is where the numbers are kept: in a functional state, or in the states of an
    optimizer object.

    Args:
        tx: the rules. Without leaves all of their numbers go on, as where only other processes have
            leaves for them.
        leaves: the leaves.
        places: their indices among the gradients of a step; None: they are all of them.
        how: which executors may be used.
        replace, kept: as in `TensorGroup`.
    """

    def __init__(
        self,
        tx: Leafwise,
        leaves: Sequence[PlanLeaf],
        places: list[int] | None,
        how: How,
        *,
        replace: bool = False,
        kept: Kept | None = None,
    ) -> None:
        self.tx = tx
        self.places = places
        self.tensors = TensorGroup(
            tx.placements if leaves else everywhere(tx.placements, tx.layout),
            [leaf.p for leaf in leaves],
            [[tuple(map(leaf.slots.get, keys)) for keys in tx.layout.slots] for leaf in leaves],
            [leaf.g for leaf in leaves],
            how=how,
            counts=tx.layout.counts,
            turns=[leaf.turns for leaf in leaves],
            replace=replace,
            kept=kept,
        )

    def time(self) -> Any:
        """The number of this step."""
        raise NotImplementedError

    def carry(self) -> Sequence[Numbers]:
        """What each rule carries from its last step."""
        raise NotImplementedError

    def writes(self, context: StepContext) -> list[Write]:
        """The writes of what each rule carries to its next step, and of its count."""
        raise NotImplementedError

    def gradients(self, grads: list[Tensor]) -> list[Tensor]:
        """The gradients of these leaves among those of a step."""
        return grads if self.places is None else [grads[i] for i in self.places]

    def carried(self, context: StepContext) -> Iterable[tuple[str, Any]]:
        """The keys of carried scalars, and their values after a step."""
        keys, values = self.tx.layout.carry, context.carried
        return zip(chain.from_iterable(keys), chain.from_iterable(values), strict=True)


Own = TypeVar("Own", bound="StepPlan")

PARKED = 8
"""Plans of earlier steps that are kept, where other gradients are missing in each step."""


class StepPlan:
    """Everything that a step needs but its gradients and numbers.

    entries: what is stepped. missing_grad: updates of slots without a gradient. order: the
    measurements that are summed over processes.
    """

    guard: TensorGuard

    def __init__(
        self,
        entries: Sequence[PlanEntry],
        missing_grad: Sequence[MissingGrad],
        order: ReductionOrder,
    ) -> None:
        self.entries = entries
        self.missing_grad = missing_grad
        self.order = order

    def writes(
        self,
        grads: list[Tensor],
        extra: dict[str, Any],
        shared_time: Any = None,
        others: Sequence[Part] = (),
        skip: Tensor | None = None,
    ) -> tuple[list[StepContext], list[Write]]:
        """A step, ready to be written, for `commit`; and each entry's part in it.

        Args:
            grads: all gradients.
            extra: the extra arguments of the rules.
            shared_time: the number of this step for rules that are counted once for all entries.
            others: what else takes part.
            skip: not 0 where nothing is to be written, known on the device alone.
        """
        contexts = self._contexts(grads, extra, shared_time)
        for context in contexts:
            context.skip = skip
        for context in contexts:
            if not context.tensors.ready:
                self._prepare(contexts)
                break
        writes = step_all([*contexts, *others], self.order)
        for tensors in self.missing_grad:
            writes += tensors.step(contexts)
        for entry, context in zip(self.entries, contexts, strict=True):
            writes += entry.writes(context)
        return contexts, writes

    def _prepare(self, contexts: list[StepContext]) -> None:
        """Have all libraries built at once, as far as they are known, before the first step."""
        measures = any(x.rule.reduce for context in contexts for x in context.placements)
        if len(contexts) > 1 or measures:
            kernels.prefetch([one for context in contexts for one in context.wanted()])
            for context in contexts:
                context.prepare()

    def beside(self, plans: Iterable[Own]) -> tuple[Own, ...]:
        """Those of some plans that are of the same tensors, with other gradients missing.

        None whose executors keep memory of the size of tensors: one plan of these is enough.
        """
        found = [x for x in plans if not x.keeps_memory() and x.guard.is_beside(self.guard)]
        return tuple(found[:PARKED])

    def keeps_memory(self) -> bool:
        """Whether it keeps memory of the size of its tensors."""
        return any(entry.tensors.keeps_memory() for entry in self.entries)

    def _contexts(
        self, grads: list[Tensor], extra: dict[str, Any], shared_time: Any = None
    ) -> list[StepContext]:
        """Each entry's part in a step."""
        return [
            StepContext(x.tensors, x.gradients(grads), x.time(), x.carry(), extra, shared_time)
            for x in self.entries
        ]


class StepContext(StepScalars):
    """A group's part in one step: its gradients, and the progress of its numbers.

    given: as in `StepScalars`, after the rules.
    """

    def __init__(self, tensors: TensorGroup, grads: list[Tensor], *given: Any) -> None:
        super().__init__(tensors.placements, *given)
        self.tensors = tensors
        self.skip: Tensor | None = None
        self.grads = grads
        if tensors.divided:
            self.grads = list(map(sharding.gradient_of, tensors.params, grads))

    def ahead(self) -> list[Key]:
        """The measurements that are still needed, in order."""
        return [
            (placement.name, self.tensors.counts[i])
            for i, placement in enumerate(self.placements)
            if placement.rule.reduce is not None and i >= len(self.numbers)
        ]

    def wanted(self) -> list[kernels.Source]:
        """The native libraries of all that this step does, as far as that is known."""
        if self.tensors.how not in ("compiled", "strict"):
            return []
        return self.tensors.wanted(self.grads, self._tasks())

    def prepare(self) -> None:
        """Have all ready that this step does: what measures in it is then what measures in the next
        one."""
        if torch.compiler.is_compiling():  # which runs no kernels
            return
        for own in reversed(self._tasks()):
            self.tensors.prepare(self.grads, own)

    def _tasks(self) -> list[BoundScalars]:
        """All that this step does, found by a trial in which nothing is measured; as far as that
        goes."""
        trial = StepScalars(self.placements, self.time, self.carry, self.extra, self.together)
        tasks: list[BoundScalars] = []
        with suppress(Exception):  # which the step itself will raise
            while trial.proceed():
                shut, placement = trial.is_shut(), self.placements[len(trial.numbers)]
                if not shut:
                    tasks.append(BoundScalars(self.tensors, trial.to_measure(), "reduce"))
                trial.advance(None if shut else nothing_measured(placement))
            tasks.append(BoundScalars(self.tensors, trial.numbers, "step"))
        return tasks

    def measure(self) -> list[Sequence[Any]]:
        """What the next rule measures, in parts still to be summed; none behind a shut gate."""
        if self.is_shut():
            return []
        return self._run("reduce", self.to_measure())

    def advance(self, total: Numbers | None = None) -> None:
        """Work out the next rule's numbers. total: None if nobody has measured anything."""
        placement = self.placements[len(self.numbers)]
        if total is None and placement.rule.reduce is not None and not self.is_shut():
            total = nothing_measured(placement)
        super().advance(total)

    def step(self) -> list[Write]:
        """The group's step, once all numbers are known, ready to be written."""
        return self._run("step", self.numbers)

    def _run(self, goal: Goal, numbers: list[Numbers]) -> list[Any]:
        """Measure, or make the step ready, by what the group has ready for this task."""
        tensors = self.tensors
        scalars = BoundScalars(tensors, numbers, goal)
        scalars.skip = self.skip
        together = tensors.ready.get(scalars.task) or tensors.prepare(self.grads, scalars)
        return (together.step if goal == "step" else together.measure)(self.grads, scalars)


class MissingGrad(Protocol):
    """Tensors without a gradient whose slots a step updates."""

    def step(self, contexts: Sequence[StepContext]) -> list[Write]: ...


class Part(Protocol):
    """What takes part in a step: a `StepContext`, or a tree that is stepped as a whole.

    `proceed` goes on to the next measurement, False if there is none; `advance` takes its total,
    or None if nobody has measured anything. `step` then returns the writes.
    """

    def proceed(self) -> bool: ...
    def ahead(self) -> list[Key]: ...
    def measure(self) -> list[Sequence[Any]]: ...
    def advance(self, total: Numbers | None = None) -> None: ...
    def step(self) -> list[Write]: ...


def step_all(parts: Sequence[Part], order: ReductionOrder = ()) -> list[Write]:
    """The step of all parts, ready for `commit`; each part then has what it carries on.

    A measurement of one name is summed over all parts, so a global norm spans parameter groups.

    order: the measurements that are summed over processes, too. All processes go through all of
    them in this order, also where nothing is measured: one that is not met would keep the others
    waiting.
    """
    left = list(order)
    while (waiting := [part for part in parts if part.proceed()]) or left:
        key = None
        if left or len(waiting) > 1:
            known = [part.ahead() for part in waiting]
            key = next_measurement([*known, [k for k, _ in left]] if left else known)
        meeting = waiting if key is None else [x for x in waiting if x.ahead()[0] == key]
        found: list[Sequence[Any]] = []
        for part in meeting:
            found += part.measure()
        total = _total(found) if found else None
        if left and key == left[0][0]:
            total = over_groups(left.pop(0)[1], total)
        for part in meeting:
            part.advance(total)
    return [write for part in parts for write in part.step()]


PLAIN = (torch.empty(0, device="cpu"),)
"""With which torch tells whether a mode sees calls of its functions."""


def commit(writes: list[Write]) -> None:
    """Make all writes of a step; an interrupt comes before the first or after the last.

    Where all are C functions, one call of the library makes them: Python runs no signal handler
    inside of it, so none has to be held back. Under a mode, such as that of a default device,
    torch's functions may run Python.
    """
    library = watch.module
    if library is None or has_torch_function(PLAIN) or not library.run_all(writes):
        held(make, writes)


def filling(x: Tensor, value: Any) -> Callable[[], object]:
    """A write of a number into a tensor, in place; what its dtype cannot hold becomes infinite.

    It is a partial of a C function unless a subclass of Tensor may run Python in it.
    """
    narrow = x.dtype is torch.float32 and not isinstance(value, Tensor)
    if narrow and not -LARGEST <= value <= LARGEST:
        value = ctypes.c_float(float(value)).value  # torch refuses such a Python number
    return partial(x.fill_, value) if type(x) is Tensor else lambda: x.fill_(value)


LARGEST = torch.finfo(torch.float32).max


def make(writes: Iterable[Write]) -> None:
    """Make writes."""
    for one in writes:
        one()


def _total(parts: list[Sequence[Any]]) -> Numbers:
    """The sum of measurements, some of them Python numbers: such a number itself where it can be.

    On another device it stays a tensor, so that nobody waits for it, and so it does where autograd
    records it, or somebody traces.
    """
    if len(parts) == 1 and type(parts[0][0]) is float:
        return tuple(parts[0])
    numbers = [part for part in parts if isinstance(part[0], float)]
    total = [sum(column) for column in zip(*numbers, strict=True)]
    tensors = [part for part in parts if not isinstance(part[0], float)]
    if tensors:
        sums = sum_parts(tensors)
        traced = modes.traced()
        if not (torch.is_grad_enabled() or traced):
            sums = tuple([x.item() if x.device.type == "cpu" else x for x in sums])
        total = [x + y for x, y in zip(total, sums, strict=True)] if numbers else list(sums)
    return tuple(total)
