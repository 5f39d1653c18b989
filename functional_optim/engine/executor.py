"""The interface of what steps tensors in place, and what all executors share.

An executor serves tensors of one kind: they share rules and numbers, and whatever else its way of
running needs. `TensorGroup` gives each tensor to the first class of its list that accepts it. A new
device, or a new way of storing tensors, is a new file and an entry in that list.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from functional_optim import kernels
from functional_optim.core import memory
from functional_optim.core.recording import Goal
from functional_optim.core.rule import Numbers, Placement, flat_numbers, form_of
from functional_optim.core.storage import Slots

if TYPE_CHECKING:
    from functional_optim.engine.group import TensorGroup

How = Literal["compiled", "strict", "eager", "apart"]
"""Which executors a group may use: those with kernels; the same, with an error where one cannot be
compiled; those without kernels; or only the one that takes every tensor as it is, so that it can be
traced."""

Write = Callable[[], object]
"""A write that is ready to be made: all that may fail or take long has been done. Those of a usual
step are C functions, or partials of some (see `commit`)."""


class BoundScalars:
    """Rules and their numbers in a step, in the form that each executor reads.

    chosen: the variants that act, of rules that have several or stand behind a gate, None for one
    that differs from tensor to tensor. None: there are no such rules, or it is not known. placed:
    whether kernels differ in where numbers are. varied: whether the numbers of a rule may be put
    together in another way than in other steps. task: what kernels differ in.
    """

    def __init__(
        self,
        placements: tuple[Placement, ...],
        numbers: list[Numbers],
        chosen: tuple[int | None, ...] | None,
        goal: Goal,
        *,
        placed: bool = False,
        varied: bool = False,
    ) -> None:
        self.placements = placements
        self.numbers = numbers
        self.goal: Goal = goal
        self.sources: tuple[kernels.NumberSource, ...] = ()
        if placed:
            self.sources = tuple([_source(x) for x in flat_numbers(numbers)])
        self.task: Any = (goal, len(placements) if goal == "reduce" else 0, chosen, self.sources)
        if varied:
            self.task = (*self.task, *map(form_of, numbers))
        self.made: dict[Any, Tensor] = {}
        self.skip: Tensor | None = None
        """Not 0 where the step is to be left out, known on the device alone; None: it is made."""

    def on(self, device: torch.device) -> list[Any]:
        """The numbers for a kernel that takes some with the launch and reads others on a device:
        Python floats, and float64 tensors there."""
        found: list[Any] = []
        for x in flat_numbers(self.numbers):
            known = not isinstance(x, Tensor) or x.device.type == "cpu"
            wide = float(x) if known else x.detach().to(device, torch.float64, non_blocking=True)
            found.append(wide)
        return found

    def tensor(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """All numbers as one vector, for a kernel that is called with tensors."""
        found = self.made.get((dtype, device))
        if found is None:
            flat = flat_numbers(self.numbers)
            if any(isinstance(x, Tensor) for x in flat):
                wide = [torch.as_tensor(x, dtype=torch.float64, device=device) for x in flat]
                found = torch.stack([x.detach().reshape(()) for x in wide]).to(dtype)
            else:
                found = torch.tensor(flat, dtype=dtype, device=device)
            self.made[dtype, device] = found
        return found


def _source(x: Any) -> kernels.NumberSource:
    """Where a number of a step comes from: the CPU's go with a launch."""
    return "tensor" if isinstance(x, Tensor) and x.device.type != "cpu" else "value"


class Executor:
    """Some tensors of a group, ready to be stepped in place again and again.

    Args:
        group: the group.
        members: the indices of its tensors among those of the group.
        grads: gradients of all tensors of the group, like those of the steps to come: in type,
            dtype, shape and strides.
    """

    through_memory: ClassVar[bool] = False
    """Whether parameters are written past autograd, so that their versions must be raised."""

    skips: ClassVar[bool] = False
    """Whether a step can be left out by a number on the device."""

    why = ""
    """Why there is no kernel for its tensors, where `prepare` has found that."""

    def __init__(self, group: TensorGroup, members: list[int], grads: list[Tensor]) -> None:
        self.group = group
        self.members = members
        self.every = members == list(range(len(group.params)))
        self.params = [group.params[i] for i in members]
        self.slots = [group.slots[i] for i in members]
        self.turns = [group.turns[i] for i in members]

    @classmethod
    def accepts(
        cls, placements: tuple[Placement, ...], g: Tensor, p: Tensor, slots: list[Slots], how: How
    ) -> Hashable | None:
        """What a tensor has in common with those of one executor; None if it is not accepted."""
        raise NotImplementedError

    def wanted(self, grads: list[Tensor], scalars: BoundScalars) -> list[kernels.Source]:
        """The native libraries that `prepare` will ask for, as far as that is known."""
        return []

    def prepare(self, grads: list[Tensor], scalars: BoundScalars) -> bool:
        """Compile what a task needs; False if the next class of the list must do it.

        grads: of all tensors of the group.

        Raises:
            RuntimeError: if the group is strict, and it cannot be compiled.
        """
        return True

    def measure(self, grads: list[Tensor], scalars: BoundScalars) -> list[Sequence[Any]]:
        """What the last of the rules measures, in parts still to be summed.

        grads: of all tensors of the group.
        """
        raise NotImplementedError

    def step(self, grads: list[Tensor], scalars: BoundScalars) -> list[Write]:
        """The step of every tensor and its slots, in place, as writes that are ready to be made."""
        raise NotImplementedError

    def libraries(self) -> list[Any]:
        """The native libraries that it calls; None for each kernel that is not in one."""
        return []

    def mine(self, grads: list[Tensor]) -> list[Tensor]:
        """The gradients of these tensors, among those of the group."""
        return grads if self.every else [grads[i] for i in self.members]


def write(p: Tensor, new_p: Tensor, old: Sequence[Slots], new: Sequence[Slots]) -> None:
    """Put the results of a step into the old tensors."""
    places = [p, *[x for mine in old for x in mine]]
    values = memory.apart([new_p, *[x for fresh in new for x in fresh]], places)
    for place, value in zip(places, values, strict=True):
        if place is not None and value is not place:
            place.copy_(value)
