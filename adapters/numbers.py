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


def owned(x: Tensor) -> Tensor:
    """A copy of a 0-dim tensor as a view, the mark of those that may be replaced by other views."""
    return x.detach().clone().reshape(1)[0]


class Column:
    """One number of several states, under one key; the same in all of them."""

    def __init__(self, states: list[dict[str, Any]], key: str) -> None:
        found = [state[key] for state in states]
        self.tensors: list[Tensor] = found
        if all(x._base is not None for x in found):
            vector = torch.stack(found)
            for i, state in enumerate(states):
                state[key] = vector[i]
            self.tensors = [vector]
        self.versions = [x._version for x in self.tensors]

    def write(self, value: Any) -> None:
        """Set all to one value."""
        for x in self.tensors:
            x.fill_(value)
        self.versions = [x._version for x in self.tensors]

    def read(self) -> Any:
        """The value, as it is kept."""
        return self.tensors[0].reshape(-1)[0].item()

    def untouched(self) -> bool:
        """Has nobody else written to one?"""
        return [x._version for x in self.tensors] == self.versions


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
