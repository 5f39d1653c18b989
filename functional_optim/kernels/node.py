"""A value of a graph, and why there may be no graph."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

NumberSource = Literal["value", "tensor"]
"""Where a number of a step comes from: an argument of the launch, or a float64 tensor of no
dimensions on the device."""


def reached(nodes: Iterable[Node]) -> set[Node]:
    """These values, and all that they depend on."""
    found: set[Node] = set()
    waiting = [*nodes]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.operands()
    return found


class Unsuitable(Exception):
    """A rule that no kernel is written for; the text says which operation is the reason.

    rule: the index of the rule in its chain, if it is known.
    """

    def __init__(self, why: str, rule: int | None = None) -> None:
        super().__init__(why)
        self.rule = rule


class RuleError(ValueError):
    """A rule that does what no step may: the text says what to do instead."""

    @classmethod
    def of_write(cls, rule: str, what: str = "") -> RuleError:
        """The error for a rule that writes in place. what: the operation, if it is known."""
        return cls(
            f"the rule {rule} writes in place{what and f' ({what})'} into a tensor that it was "
            "given; return new tensors instead, e.g. m = m * 0.9 instead of m.mul_(0.9)."
        )


@dataclass(eq=False, slots=True, repr=False)
class Node:
    """A value: the operation that makes it, and its operands.

    op: ATen's name of the operation, without `aten.`; or `input` and `number` (with an index),
    `const` (with a value), `row` (with an index: a constant that depends on the shape), `iota` (the
    place of an element in its tensor), `inside` (whether a tensor in blocks has that element: the
    last block may have fewer). shape: as recorded. host: whether it depends on scalars of the step
    only, which are Python floats if a rule runs eagerly. rule: the index of the rule that asked for
    it. within: the operation that the rule has called, where that was recorded as several. dims:
    for each dimension the axes that it consists of, see `laid_out`. axes: all of them.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    shape: tuple[int, ...]
    host: bool = False
    rule: int | None = None
    within: str = ""
    index: int = -1
    dims: tuple[tuple[int, ...], ...] = ()
    axes: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"v{self.index}"

    @property
    def what(self) -> str:
        """The operation in words, for texts."""
        if self.op == "iota":
            return "the places of elements"
        return f"the operation {(self.within or self.op).partition('.')[0].strip('_')}"

    def shape_at(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Its shape for other sizes of the axes, as they were laid out."""
        return tuple([math.prod([sizes[i] for i in own]) for own in self.dims])

    def operands(self) -> Iterator[Node]:
        """The values that it reads."""
        return nodes_in((*self.args, *self.kwargs.values()))


def nodes_in(arguments: Iterable[Any]) -> Iterator[Node]:
    """The values among arguments, also those of tuples."""
    for x in arguments:
        for y in x if isinstance(x, tuple) else (x,):
            if isinstance(y, Node):
                yield y


def indexed(x: Any) -> Any:
    """An argument with indices instead of values."""
    if isinstance(x, dict):
        return {key: indexed(y) for key, y in x.items()}
    if isinstance(x, tuple):
        return tuple(map(indexed, x))
    return ("node", x.index) if isinstance(x, Node) else x
