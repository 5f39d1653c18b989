"""Loops over the elements of values, each element a vector, as C++."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from functional_optim.kernels.node import Node

UNROLLED = 9
"""Elements up to which a loop is written out, so that g++ keeps its values in registers."""

Index = tuple[Any, ...]
"""Of an element: for each dimension an int, or the text of one."""


class NoMemory(Exception):
    """A value, `node`, is read at an index that is known at run time only."""

    def __init__(self, node: Node) -> None:
        self.node = node


class Elsewhere(Exception):
    """A value of the open loops is needed at another index than theirs."""


class LaneLoops:
    """Loops over a shape; of few elements, their bodies one after another.

    indices, bodies: of each body. index: of the body that is being written. members: values that
    the loops compute, with a text for each body; None for one that is complete only after them.
    before, after: lines around the loops.
    """

    def __init__(self, shape: Sequence[int], prefix: str = "i") -> None:
        self.shape = tuple(shape)
        self.looped = math.prod(shape) > UNROLLED
        self.indices: list[Index] = [*product(*map(range, shape))]
        if self.looped:
            names = [f"{prefix}{k}" if size > 1 else 0 for k, size in enumerate(shape)]
            self.indices = [tuple(names)]
        self.bodies: list[list[str]] = [[] for _ in self.indices]
        self.index = 0
        self.members: dict[Node, list[str] | None] = {}
        self.before: list[str] = []
        self.after: list[str] = []

    @property
    def lines(self) -> list[str]:
        return self.bodies[self.index]

    def each(self) -> Iterator[Index]:
        """The indices, each while its body is written."""
        for k, index in enumerate(self.indices):
            self.index = k
            yield index

    def member(self, node: Node, index: Index) -> str:
        """An element of a member."""
        texts, here = self.members[node], self.indices[self.index]
        if texts is None or len(index) != len(here):
            raise Elsewhere
        if index == here and self.index < len(texts):
            return texts[self.index]
        if self.looped or index not in self.indices[: self.index]:
            raise Elsewhere
        return texts[self.indices.index(index)]

    def mark(self) -> list[int]:
        """The state before a value is added, for `undo`."""
        return [len(x) for x in (*self.bodies, self.before, self.after)]

    def undo(self, mark: Sequence[int]) -> None:
        for lines, count in zip((*self.bodies, self.before, self.after), mark, strict=True):
            del lines[count:]

    def text(self) -> list[str]:
        """All lines."""
        names = zip(self.indices[0], self.shape, strict=True) if self.looped else ()
        loops = [
            f"LOOP for (int {name} = 0; {name} < {size}; ++{name})"
            for name, size in names
            if isinstance(name, str)
        ]
        inner = [line for body in self.bodies for line in body]
        return [*self.before, *loops, "{", *inner, "}", *self.after]


def flat(shape: Sequence[int], index: Index) -> Any:
    """The place of an element in memory."""
    number, texts, step = 0, [], 1
    for size, i in zip(reversed(tuple(shape)), reversed(index), strict=True):
        if isinstance(i, int):
            number += i * step
        elif size > 1:
            texts.append(f"{i} * {step}" if step > 1 else i)
        step *= size
    if not texts:
        return number
    return " + ".join([*texts, *([str(number)] if number else [])])


def broadcast(shape: Sequence[int], index: Index) -> Index:
    """The index of an operand for that of a result."""
    own = index[len(index) - len(shape) :] if shape else ()
    return tuple([0 if size == 1 else i for size, i in zip(shape, own, strict=True)])


def plus(a: Any, b: Any) -> Any:
    """The sum of two parts of an index."""
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    return b if a == 0 else a if b == 0 else f"({a} + {b})"


def size_of(node: Node) -> int:
    """The number of elements of a value."""
    return math.prod(node.shape)
