"""Where a chain keeps what it remembers: names for slots, carried numbers and hyperparameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from functional_optim.paths import exclusive
from functional_optim.rules import Link


class Layout(NamedTuple):
    """The keys under which each link's slots, carried numbers and hyperparameters are kept.

    counts: of each link, the how manieth of its name it is. keys: the slots' names, once. routed:
    does a link act on some leaves only?
    """

    slots: tuple[tuple[str, ...], ...]
    carry: tuple[tuple[str, ...], ...]
    hyper: tuple[tuple[str, ...], ...]
    counts: tuple[int, ...]
    keys: tuple[str, ...]
    routed: bool

    def pick(self, places: Sequence[int]) -> Layout:
        """The names of some of the links."""
        slots = tuple([self.slots[i] for i in places])
        return Layout(
            slots,
            tuple([self.carry[i] for i in places]),
            tuple([self.hyper[i] for i in places]),
            tuple([self.counts[i] for i in places]),
            _once(slots),
            routed=False,
        )


_layouts: dict[Any, Layout] = {}


def lay_out(links: tuple[Link, ...]) -> Layout:
    """Choose the keys: the field's name, or `link.field` where two links share one.

    Links that never act on one leaf may share the names of slots, not of numbers. Worked out once
    for each kind of chain: a recipe is built anew whenever a number changes.

    Raises:
        ValueError: if two links share a slot name and no two different names tell them apart, if a
            link follows a tail without being one, or a learning rate a link that works on the step.
    """
    if torch.compiler.is_compiling():
        return _lay_out(links)
    numbered: dict[int, int] = {}
    kind = tuple([_kind(link, numbered) for link in links])
    layout = _layouts.get(kind)
    if layout is None:
        layout = _layouts[kind] = _lay_out(links)
    return layout


def _kind(link: Link, numbered: dict[int, int]) -> Any:
    """What the names depend on. numbered: the partitions and masks seen so far."""
    where: Any = ()
    if link.where:
        numbers = [numbered.setdefault(id(own), len(numbered)) for own, _ in link.where]
        where = tuple([(k, answer) for k, (_, answer) in zip(numbers, link.where, strict=True)])
    hyper = tuple([name for name, _ in link.hyper])
    return (link.name, link.slots, type(link.carry), link.tail, link.final, hyper, where)


def _once(keys: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([key for own in keys for key in own]))


def _lay_out(links: tuple[Link, ...]) -> Layout:
    for i, first in enumerate(links):
        for second in links[i + 1 :] if first.tail else ():
            if not second.tail and not exclusive(first.where, second.where):
                raise ValueError(
                    f"{second.name or 'a link'} stands after {first.name}, which reads the "
                    f"parameters after the update; put {first.name} last in the chain."
                )
    _check_final(links)
    slots = [_fields(link.slots) for link in links]
    carry = [_fields(link.carry) for link in links]
    names = _keys(links, slots, carry, apart=True)
    return Layout(
        names,
        _keys(links, carry, slots, apart=False),
        _keys(links, [tuple([name for name, _ in link.hyper]) for link in links], None, apart=None),
        tuple([sum(x.name == link.name for x in links[:i]) for i, link in enumerate(links)]),
        _once(names),
        routed=any(link.where for link in links),
    )


def _check_final(links: tuple[Link, ...]) -> None:
    """Raise if a learning rate surely multiplies what a link before it made of the step."""
    for i, first in enumerate(links):
        for second in links[i + 1 :] if first.final else ():
            scales = any(name == "lr" for name, _ in second.hyper)
            if scales and set(second.where) <= set(first.where):
                raise ValueError(
                    f"{second.name} stands after {first.name}, which works on the step that is "
                    f"added to the parameters; put {first.name} after {second.name}."
                )


def _keys(
    links: tuple[Link, ...], fields: list[Any], others: list[Any] | None, *, apart: bool | None
) -> tuple[tuple[str, ...], ...]:
    """Each link's keys for its fields.

    others: fields of another kind that share the state. apart: may links that never act on one
    leaf share a key? None: so they may not, who has no name of its own gets its number, and labels
    stand before a name in any case, so that it does not depend on other parts of a partition.
    """

    def key(i: int, field: str) -> str:
        rivals = [
            link
            for j, link in enumerate(links)
            if j != i
            and field in (*fields[j], *(others[j] if others else ()))
            and not (apart and exclusive(links[i].where, link.where))
        ]
        own = _full_name(links[i])
        labelled = apart is None and own != links[i].name
        if not rivals and field != "step" and not labelled:
            return field
        if apart is None:
            alike = [link for link in links[:i] if _full_name(link) == own]
            return f"{own}.{field}" if not alike else f"{own}.{len(alike)}.{field}"
        if not own or own in map(_full_name, rivals):
            raise ValueError(
                f"two links of this chain have a slot called {field!r} and no names of their own; "
                "name them with named_chain, e.g. named_chain(('fast', ...), ('slow', ...))."
            )
        return f"{own}.{field}"

    return tuple([tuple([key(i, field) for field in mine]) for i, mine in enumerate(fields)])


def _full_name(link: Link) -> str:
    """A link's name, after the labels of the leaves that it acts on."""
    labels = [str(choice.answer) for choice in link.where if choice.answer is not True]
    return ".".join([*labels, link.name] if link.name else labels)


def _fields(record: Any) -> tuple[str, ...]:
    return () if record is None else record._fields
