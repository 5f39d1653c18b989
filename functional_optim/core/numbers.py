"""The numbers that rules read in a step: what stands beside them, and all of them in one list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

Numbers = tuple[Any, ...]
"""The numbers of a rule in a step: a plain tuple, the rule's own NamedTuple, or an `Own`."""


class Own(NamedTuple):
    """The numbers of a rule that does not act in every step, rounds by chance, or runs others.

    which: above 0 where the rule acts; of a rule with several variants, the number of the one that
    does, from 1. 0: update and slots stay as they were, behind a shut gate. Such a number for each
    turn of a rule that has several; nothing for a rule that always acts. key: of the random numbers
    of the step; nothing where it rounds to the nearest. values: the numbers that `update` reads; of
    a rule that runs others, a tuple of those of each.
    """

    which: tuple[Any, ...]
    key: tuple[Any, ...]
    values: Numbers


def parts_of(own: Numbers) -> tuple[tuple[Any, ...], tuple[Any, ...], Numbers]:
    """The numbers of a rule as the parts of an `Own`, whether they are one or not."""
    return own if type(own) is Own else ((), (), own)


def in_turn(own: Numbers, turn: int) -> Numbers:
    """A rule's numbers as they are for the tensors of a turn."""
    if type(own) is Own and len(own.which) > 1:
        return Own(own.which[turn : turn + 1], own.key, own.values)
    return own


def told(numbers: Numbers) -> Numbers:
    """The numbers of a rule as arguments: a NamedTuple is one, the entries of a tuple are many."""
    return numbers if type(numbers) is tuple else (numbers,)  # for `hasattr` a trace takes long


def flat_numbers(numbers: Sequence[Numbers]) -> list[Any]:
    """All numbers of some rules in one list."""
    flat: list[Any] = []
    for own in numbers:
        flat += _inside(own) if type(own) is Own else own
    return flat


def _inside(own: tuple[Any, ...]) -> list[Any]:
    """What tuples of tuples hold."""
    flat: list[Any] = []
    for x in own:
        flat += _inside(x) if isinstance(x, tuple) else (x,)
    return flat


class Form(NamedTuple):
    """How numbers are put together.

    record: the type of their tuple. each: of each entry the form of a tuple, or the kind of a
    number: int or bool, object for a large one, float for all others.
    """

    record: type
    each: tuple[Any, ...]


LARGE = 1 << 20
"""Of ints below it, products of three fit into the 64 bits of torch's."""


def form_of(own: Numbers) -> Form:
    """The form of a rule's numbers."""
    return Form(type(own), tuple([float if type(x) is float else _kind(x) for x in own]))


def _kind(x: Any) -> Any:
    if isinstance(x, int):
        return type(x) if abs(x) < LARGE else object
    return form_of(x) if isinstance(x, tuple) else float


def kinds_of(forms: Sequence[Form]) -> list[type]:
    """The kind of each number, in the order of `flat_numbers`."""
    found: list[type] = []
    for form in forms:
        for kind in form.each:
            found += kinds_of([kind]) if type(kind) is Form else (kind,)
    return found


def with_forms(flat: Iterator[Any], forms: Sequence[Form]) -> list[Numbers]:
    """The inverse of `flat_numbers`."""
    found: list[Numbers] = []
    for record, each in forms:
        values: list[Any] = []
        for kind in each:
            values += with_forms(flat, [kind]) if type(kind) is Form else (next(flat),)
        found.append(tuple(values) if record is tuple else record(*values))
    return found
