"""Names in a chain's state: of slots, carried scalars and hyperparameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from functional_optim.core.paths import exclusive
from functional_optim.core.rule import Placement


class Layout(NamedTuple):
    """The keys of each rule's slots, carried scalars and hyperparameters in a state.

    counts: for each rule its index among the rules of its name. keys: the names of slots, without
    duplicates.
    routed: whether a rule acts on some leaves only.
    """

    slots: tuple[tuple[str, ...], ...]
    carry: tuple[tuple[str, ...], ...]
    hyper: tuple[tuple[str, ...], ...]
    counts: tuple[int, ...]
    keys: tuple[str, ...]
    routed: bool

    def pick(self, places: Sequence[int]) -> Layout:
        """The names of some of the rules."""
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


def lay_out(placements: tuple[Placement, ...]) -> Layout:
    """Choose the keys: the field's name, or `rule.field` if two rules share one.

    Rules without a common leaf may share names of slots, not of scalars. Computed once for each
    kind of chain: a recipe is rebuilt whenever a hyperparameter changes.

    Raises:
        ValueError: if two rules share a slot name and have no different names, if one that does not
            read the new parameters follows one that does, or a learning rate follows a rule that
            changes the step, or another learning rate.
    """
    if torch.compiler.is_compiling():
        return _lay_out(placements)
    numbered: dict[int, int] = {}
    kind = tuple([_kind(placement, numbered) for placement in placements])
    layout = _layouts.get(kind)
    if layout is None:
        layout = _layouts[kind] = _lay_out(placements)
    return layout


def _kind(placement: Placement, numbered: dict[int, int]) -> Any:
    """The part of a placement that names depend on. numbered: the partitions and masks so far."""
    where: Any = ()
    rule = placement.rule
    if placement.where:
        numbers = [numbered.setdefault(id(own), len(numbered)) for own, _ in placement.where]
        pairs = zip(numbers, placement.where, strict=True)
        where = tuple([(k, answer) for k, (_, answer) in pairs])
    hyper = tuple([(name, len(x) if type(x) is tuple else -1) for name, x in rule.hyper])
    master = rule.storage.weight_codec is not None
    return (placement.name, rule.keys, type(rule.carry), rule.runs.after, master, hyper, where)


def _once(keys: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([key for own in keys for key in own]))


def _lay_out(placements: tuple[Placement, ...]) -> Layout:
    for i, first in enumerate(placements):
        for second in placements[i + 1 :] if first.rule.runs.after == "step" else ():
            if not (second.rule.runs.after == "step" or exclusive(first.where, second.where)):
                raise ValueError(
                    f"{second.name or 'a rule'} stands after {first.name}, which reads the "
                    f"parameters after the update; put {first.name} last in the chain."
                )
    _check_order(placements)
    _check_masters(placements)
    check_rates(placements)
    slots = [x.rule.keys for x in placements]
    carry = [() if x.rule.carry is None else x.rule.carry._fields for x in placements]
    hyper = [tuple([name for name, _ in x.rule.each_hyper()]) for x in placements]
    names = _keys(placements, slots, carry, apart=True)
    return Layout(
        names,
        _keys(placements, carry, slots, apart=False),
        _keys(placements, hyper, None, apart=None),
        indices_by_name(placements),
        _once(names),
        routed=any(placement.where for placement in placements),
    )


def indices_by_name(placements: Sequence[Placement]) -> tuple[int, ...]:
    """For each rule its index among the rules of its name."""
    names = [placement.name for placement in placements]
    return tuple([names[:i].count(name) for i, name in enumerate(names)])


def _check_masters(placements: tuple[Placement, ...]) -> None:
    """Raise ValueError if two rules store bits of one parameter."""
    known = [x for x in placements if x.rule.storage.weight_codec is not None]
    for i, first in enumerate(known):
        if not all(exclusive(first.where, second.where) for second in known[i + 1 :]):
            raise ValueError(
                "this chain has two master_weights, and a parameter can only be divided once; put "
                "one around the whole chain."
            )


def _check_order(placements: tuple[Placement, ...]) -> None:
    """Raise ValueError if a learning rate multiplies a step that another rule has changed."""
    for i, first in enumerate(placements):
        for second in placements[i + 1 :] if first.rule.runs.after == "lr" else ():
            scales = any(name == "lr" for name, _ in second.rule.hyper)
            if scales and set(second.where) <= set(first.where):
                raise ValueError(
                    f"{second.name} stands after {first.name}, which works on the step that is "
                    f"added to the parameters; put {first.name} after {second.name}."
                )


def check_rates(placements: Sequence[Placement]) -> None:
    """Raise ValueError if two `scale_by_lr` act on one leaf.

    Each multiplies by −lr, so the step would ascend. Rules with other names, from `named_chain`,
    are allowed.
    """
    rates = [placement for placement in placements if placement.name == "scale_by_lr"]
    for i, first in enumerate(rates):
        for second in rates[i + 1 :]:
            a, b = set(first.where), set(second.where)
            if a <= b or b <= a:
                raise ValueError(
                    "this chain multiplies the same updates by two learning rates, each with a "
                    "minus sign, so it would go uphill. Leave one out: adam(lr), or "
                    "chain(scale_by_adam(), scale_by_lr(lr)). To change the size of a finished "
                    "step, add scale or scale_by_schedule."
                )


def _keys(
    placements: tuple[Placement, ...],
    fields: list[Any],
    others: list[Any] | None,
    *,
    apart: bool | None,
) -> tuple[tuple[str, ...], ...]:
    """Each rule's keys for its fields.

    others: fields of another kind that share the state. apart: whether rules without a common leaf
    may share a key. None: they may not; a rule without a name gets its index, and labels always
    precede a name, so that it does not depend on other parts of a partition. The part after a dot
    tells how a slot is stored: packed or not, it has one name.
    """

    def slot(field: str) -> str:
        return field if apart is None else field.partition(".")[0]

    names = [
        {slot(field) for field in (*mine, *(others[j] if others else ()))}
        for j, mine in enumerate(fields)
    ]

    def key(i: int, field: str) -> str:
        rivals = [
            other
            for j, other in enumerate(placements)
            if j != i
            and slot(field) in names[j]
            and not (apart and exclusive(placements[i].where, other.where))
        ]
        own = _full_name(placements[i])
        labelled = apart is None and own != placements[i].name
        if not rivals and field != "step" and not labelled:
            return field
        if apart is None:
            alike = [x for x in placements[:i] if _full_name(x) == own]
            return f"{own}.{field}" if not alike else f"{own}.{len(alike)}.{field}"
        if not own or own in map(_full_name, rivals):
            raise ValueError(
                f"two rules of this chain have a slot called {field!r} and no names; name them "
                "with named_chain, e.g. named_chain(('fast', ...), ('slow', ...))."
            )
        return f"{own}.{field}"

    return tuple([tuple([key(i, field) for field in mine]) for i, mine in enumerate(fields)])


def _full_name(placement: Placement) -> str:
    """A rule's name, after the labels of the leaves that it acts on."""
    labels = [str(choice.answer) for choice in placement.where if choice.answer is not True]
    return ".".join([*labels, placement.name] if placement.name else labels)
