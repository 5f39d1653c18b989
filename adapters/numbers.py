"""The numbers in the states of tensors that step together: step counts and carried values.

Each parameter keeps its own 0-dim tensors, as in torch. Where this library made them they are views
of one vector, so that all advance with one `fill_` (0.8 µs, against 190 µs for 148 single tensors)
and one version counter tells whether somebody else wrote to one. Tensors that others put into the
state are theirs: they stay the same objects, and are written one by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_optim import numeric


def owned(x: Tensor) -> Tensor:
    """A copy of a 0-dim tensor as a view, the mark of those that may be replaced by other views."""
    return x.detach().clone().reshape(1)[0]


class Column:
    """One number of several states, under one key; the same in all of them.

    A number that is computed on another device is kept there, so that no step waits for it.

    value: what the states hold.
    """

    def __init__(self, states: list[dict[str, Any]], key: str, value: float) -> None:
        self.states = states
        self.key = key
        found = [state[key] for state in states]
        self.tensors: list[Tensor] = found
        self.ours = all(x._base is not None for x in found)
        if self.ours:
            self._hand_out(torch.stack(found))
        self.here = found[0].device.type == "cpu"
        self.versions = [x._version for x in self.tensors]
        self.known: float | None = value

    def _hand_out(self, vector: Tensor) -> None:
        for i, state in enumerate(self.states):
            state[self.key] = vector[i]
        self.tensors = [vector]

    def write(self, value: Any) -> bool:
        """Set all to one value; True if the states have new tensors for that."""
        moved = isinstance(value, Tensor) and self._follow(value)
        for x in self.tensors:
            x.fill_(value)
        self.versions = [x._version for x in self.tensors]
        if not self.here:
            self.known = None if isinstance(value, Tensor) else self._rounded(value)
        return moved

    def _follow(self, value: Tensor) -> bool:
        """Move to the device of a value, unless the tensors are somebody else's."""
        first = self.tensors[0]
        if not self.ours or value.device == first.device:
            return False
        self._hand_out(torch.empty_like(first, device=value.device))
        self.here = value.device.type == "cpu"
        return True

    def _rounded(self, value: float) -> float:
        return torch.full((), value, dtype=self.tensors[0].dtype, device="cpu").item()

    def read(self) -> Any:
        """The value, as it is kept: a float64 tensor where it is only known on another device."""
        first = self.tensors[0].reshape(-1)[0]
        if self.here:
            return first.item()
        return numeric.float64(first) if self.known is None else self.known

    def untouched(self) -> bool:
        """Has nobody else written to one?"""
        return [x._version for x in self.tensors] == self.versions


class Readings:
    """The values of 0-dim tensors, each vector that they are views of read once.

    Reading a tensor of another device waits for that device.
    """

    def __init__(self) -> None:
        self.vectors: dict[int, list[float]] = {}

    def __call__(self, x: Any) -> float:
        base = x._base if isinstance(x, Tensor) else None
        if base is None or base.device.type == "cpu" or base.dim() != 1 or base.stride() != (1,):
            return float(x)
        if id(base) not in self.vectors:
            self.vectors[id(base)] = base.tolist()
        return self.vectors[id(base)][x.storage_offset() - base.storage_offset()]


class Integers:
    """A Column for step counts that are Python ints, as SparseAdam's."""

    def __init__(self, states: list[dict[str, Any]], key: str) -> None:
        self.states = states
        self.key = key
        self.value = states[0][key]

    def write(self, value: Any) -> None:
        """Set all to one value."""
        self.value = int(value)
        for state in self.states:
            state[self.key] = self.value

    def untouched(self) -> bool:
        """Has nobody else written to one?"""
        return all(state[self.key] == self.value for state in self.states)
