"""The interface of what steps tensors in place, and what all executors share.

An executor serves tensors of one kind: they share rules and numbers, and whatever else its way of
running needs. `TensorGroup` gives each tensor to the first class of its list that accepts it. A new
device, or a new way of storing tensors, is a new file and an entry in that list.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from torch import Tensor

from functional_optim import kernels
from functional_optim.core import memory
from functional_optim.core.rule import Placement
from functional_optim.core.scalars import BoundScalars
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


class Runner(Protocol):
    """What runs a task for some tensors of a group, again and again."""

    def measure(self, grads: list[Tensor], scalars: BoundScalars) -> Sequence[Sequence[Any]]:
        """What the last of the rules measures, in parts still to be summed.

        grads: of all tensors of the group.
        """
        ...

    def step(self, grads: list[Tensor], scalars: BoundScalars) -> Sequence[Write]:
        """The step of every tensor and its slots, in place, as writes that are ready to be made."""
        ...

    def libraries(self) -> list[Any]:
        """The native libraries that it calls; None for each kernel that is not in one."""
        ...


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

    def prepare(self, grads: list[Tensor], scalars: BoundScalars) -> Runner | None:
        """What runs a task; None if the next class of the list must do it.

        grads: of all tensors of the group.

        Raises:
            RuntimeError: if the group is strict, and it cannot be compiled.
        """
        raise NotImplementedError

    def libraries(self) -> list[Any]:
        """As a `Runner`: none."""
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
