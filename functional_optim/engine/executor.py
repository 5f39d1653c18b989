"""The interface of executors, which step tensors in place, and their common parts.

An executor steps tensors of one kind, which share rules, scalars, and other properties that it
needs. `TensorGroup` assigns each tensor to the first class of its list that accepts it. To support
a new device, or a new storage format, add a module and an entry in that list.
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
"""The executors that a group may use: those with kernels; the same, with an error if compilation
fails; those without kernels; or only the one that takes all tensors, and can be traced."""

Write = Callable[[], object]
"""A prepared write: everything that may fail or take long has been done. Writes of a usual step are
C functions, or partials of them (see `commit`)."""


class Runner(Protocol):
    """Runs a task for some tensors of a group, repeatedly."""

    def measure(self, grads: list[Tensor], scalars: BoundScalars) -> Sequence[Sequence[Any]]:
        """The measurements of the last rule, as partial sums.

        grads: of all tensors of the group.
        """
        ...

    def step(self, grads: list[Tensor], scalars: BoundScalars) -> Sequence[Write]:
        """The step of every tensor and its slots, in place, as prepared writes."""
        ...


class Executor:
    """Some tensors of a group, prepared for repeated in-place steps.

    Args:
        group: the group.
        members: the indices of its tensors among those of the group.
        grads: gradients of all tensors of the group, like those of the following steps: in type,
            dtype, shape and strides.
    """

    through_memory: ClassVar[bool] = False
    """Whether parameters are written past autograd, so that their versions must be raised."""

    skips: ClassVar[bool] = False
    """Whether a scalar on the device can skip a step."""

    why = ""
    """Why its tensors have no kernel, set by `prepare`."""

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
        """The key that a tensor shares with others of one executor; None if it is not accepted."""
        raise NotImplementedError

    def wanted(self, grads: list[Tensor], scalars: BoundScalars) -> list[kernels.Source]:
        """The native libraries that `prepare` will need, as far as they are known."""
        return []

    def prepare(self, grads: list[Tensor], scalars: BoundScalars) -> Runner | None:
        """The runner of a task; None if the next class of the list has to run it.

        grads: of all tensors of the group.

        Raises:
            RuntimeError: if the group is strict, and it cannot be compiled.
        """
        raise NotImplementedError

    def keeps_memory(self) -> bool:
        """Whether it keeps memory of the size of its tensors from one step to the next."""
        return False

    def mine(self, grads: list[Tensor]) -> list[Tensor]:
        """The gradients of these tensors, among those of the group."""
        return grads if self.every else [grads[i] for i in self.members]


def write(p: Tensor, new_p: Tensor, old: Sequence[Slots], new: Sequence[Slots]) -> None:
    """Write the results of a step into the old tensors."""
    places = [p, *[x for mine in old for x in mine]]
    values = memory.apart([new_p, *[x for fresh in new for x in fresh]], places)
    for place, value in zip(places, values, strict=True):
        if place is not None and value is not place:
            place.copy_(value)
