"""Names in a chain's state: of slots, carried scalars and hyperparameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch

from functional_optim.core.rule import Placement
from functional_optim.kernels.private import constant_while_traced


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


class RuleNames(NamedTuple):
    """What of a rule the names in a state depend on, in strings and numbers.

    slots, carry: its fields. hyper: names, with the length of a tuple, or -1. after: as in `Runs`.
    adapts: whether it is of this package and stores second moments. master: whether it stores bits
    of the parameters. where: its labels, each with the index of the partition or mask and of the
    label there; None for one that is True.
    """

    name: str
    slots: tuple[str, ...]
    carry: tuple[str, ...]
    hyper: tuple[tuple[str, int], ...]
    after: str | None
    adapts: bool
    master: bool
    where: tuple[tuple[int, int, str | None], ...]

    @property
    def full_name(self) -> str:
        """Its name, after the labels of the leaves that it acts on."""
        labels = [label for *_, label in self.where if label is not None]
        return ".".join([*labels, self.name] if self.name else labels)

    def apart_from(self, other: RuleNames) -> bool:
        """Whether no leaf of any tree has both."""
        return any(k == n and i != j for k, i, _ in self.where for n, j, _ in other.where)

    def around(self, other: RuleNames) -> bool:
        """Whether one of them acts on all leaves of the other, as far as their labels tell."""
        mine, theirs = set(self.where), set(other.where)
        return mine <= theirs or theirs <= mine


Chain = tuple[RuleNames, ...]

DECAYS = ("add_decayed_weights", "cautious_weight_decay")
"""Rules that add to a gradient what a learning rate then subtracts from the weights."""

COUNTS = ("step", "optimizer_step")
"""What states of optimizer objects call numbers of steps."""

PLACING = (
    "gpa", "hyperball", "keep_norms_within", "keep_params_in", "keep_params_nonnegative",
    "lookahead", "mechanize", "schedule_free",
)  # fmt: skip
"""Rules that change a step so that the parameters end in a set, or at a place that is known from
copies of them."""

SCALINGS = ("scale", "scale_by_schedule", "scale_by_path", "trace", "add_noise")
"""Rules after which the parameters would end elsewhere."""

_layouts: dict[Chain, Layout | str] = {}


def lay_out(placements: Sequence[Placement]) -> Layout:
    """Choose the keys: the field's name, or `rule.field` if two rules share one.

    Rules without a common leaf may share names of slots, not of scalars. Computed once for each
    kind of chain: a recipe is rebuilt whenever a hyperparameter changes.

    Raises:
        ValueError: if two rules share a slot name and have no different names, if one that does not
            read the new parameters follows one that does, or a learning rate follows a rule that
            changes the step, or another learning rate.
    """
    found = known_layout(rule_names(placements))
    if isinstance(found, str):
        raise ValueError(found)
    return found


def rule_names(placements: Sequence[Placement]) -> Chain:
    """What the names of these rules depend on."""
    seen: list[Any] = []  # the partitions and masks so far
    found: list[RuleNames] = []
    for name, where, rule in [(x.name, x.where, x.rule) for x in placements]:
        labels: list[tuple[int, int, str | None]] = []
        for answers, answer in where:
            if not any(answers is x for x in seen):
                seen.append(answers)
            k = [answers is x for x in seen].index(True)
            labels.append((k, answers.known.index(answer), None if answer is True else str(answer)))
        carry = () if rule.carry is None else rule.carry._fields
        hyper = tuple([(key, len(x) if type(x) is tuple else -1) for key, x in rule.hyper])
        adapts = rule.own and len(rule.storage.nonnegative) > 0
        kinds = (rule.runs.after, adapts, rule.storage.weight_codec is not None)
        found.append(RuleNames(name, rule.keys, carry, hyper, *kinds, tuple(labels)))
    return tuple(found)


@constant_while_traced
def known_layout(chain: Chain) -> Layout | str:
    """The layout of a chain, or why it has none."""
    found = None if torch.compiler.is_dynamo_compiling() else _layouts.get(chain)
    if found is None:
        try:
            found = _lay_out(chain)
        except ValueError as error:
            found = str(error)
        if not torch.compiler.is_dynamo_compiling():  # a torch that traces this function, too
            _layouts[chain] = found
    return found


def _once(keys: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([key for own in keys for key in own]))


def _lay_out(chain: Chain) -> Layout:
    for first, second in combinations(chain, 2):
        _check_pair(first, second)
    check_rates(chain)
    slots, carry = [x.slots for x in chain], [x.carry for x in chain]
    hyper = [tuple([key for name, n in x.hyper for key in _each(name, n)]) for x in chain]
    names = _keys(chain, slots, carry, apart=True)
    return Layout(
        names,
        _keys(chain, carry, slots, apart=False),
        _keys(chain, hyper, [], apart=None),
        indices_by_name(chain),
        _once(names),
        routed=any(part.where for part in chain),
    )


def indices_by_name(rules: Sequence[RuleNames | Placement]) -> tuple[int, ...]:
    """For each rule its index among the rules of its name."""
    names = [x.name for x in rules]
    return tuple([names[:i].count(name) for i, name in enumerate(names)])


def _check_pair(first: RuleNames, second: RuleNames) -> None:
    """Raise ValueError if the second rule may not stand after the first one: because only that
    reads the new parameters, because it multiplies a step that that has changed by a learning rate,
    or because both store bits of one parameter."""
    if first.after == "step" and second.after != "step" and not first.apart_from(second):
        raise ValueError(
            f"{second.name or 'a rule'} stands after {first.name}, which reads the parameters "
            f"after the update; put {first.name} last in the chain."
        )
    scales = first.after == "lr" and any(name == "lr" for name, _ in second.hyper)
    if scales and first.around(second):
        raise ValueError(
            f"{second.name} stands after {first.name}, which works on the step that is added to "
            f"the parameters; put {first.name} after {second.name}."
        )
    moves = first.name in PLACING and second.name in SCALINGS
    if moves and first.around(second):
        raise ValueError(
            f"{second.name} stands after {first.name}, and would move the parameters from where "
            f"that puts them; put {first.name} last in the chain."
        )
    if first.master and second.master and not first.apart_from(second):
        raise ValueError(
            "this chain has two master_weights, and a parameter can only be divided once; put one "
            "around the whole chain."
        )


def check_rates(chain: Chain) -> None:
    """Raise ValueError if two `scale_by_lr` act on one leaf, or one before a decay that adds, or
    before a rule that divides by second moments.

    Each multiplies by −lr, so the step would ascend, or the weights grow, or lr would cancel. Rules
    with other names, from `named_chain`, are allowed.
    """
    rates = [part for part in chain if part.name == "scale_by_lr"]
    if any(first.around(second) for first, second in combinations(rates, 2)):
        raise ValueError(
            "this chain multiplies the same updates by two learning rates, each with a minus sign, "
            "so it would go uphill. Leave one out: adam(lr), or chain(scale_by_adam(), "
            "scale_by_lr(lr)). To change the size of a finished step, add scale or "
            "scale_by_schedule. If each acts in other steps, name them by named_chain."
        )
    for first, second in combinations(chain, 2):
        grows = first.name == "scale_by_lr" and second.name in DECAYS and second.after is None
        if grows and first.around(second):
            raise ValueError(
                f"{second.name} stands after scale_by_lr, whose step it would turn into growth of "
                "the weights; put it before the learning rate, or pass independent=True."
            )
        if first.name == "scale_by_lr" and second.adapts and first.around(second):
            raise ValueError(
                f"{second.name} stands after scale_by_lr, and divides by second moments of what it "
                f"gets, so that lr cancels; put scale_by_lr after {second.name}."
            )


def _each(name: str, length: int) -> list[str]:
    """The names of the numbers of a hyperparameter."""
    return [name] if length < 0 else [f"{name}.{i}" for i in range(length)]


def _keys(
    chain: Chain,
    fields: Sequence[tuple[str, ...]],
    others: Sequence[tuple[str, ...]],
    *,
    apart: bool | None,
) -> tuple[tuple[str, ...], ...]:
    """Each rule's keys for its fields.

    others: fields of another kind that share the state. apart: whether rules without a common leaf
    may share a key. None: they may not; a rule without a name gets its index, and labels always
    precede a name, so that it does not depend on other parts of a partition. A measure of `monitor`
    gives way to all others, also to hyperparameters. The part after a dot tells how a slot is
    stored: packed or not, it has one name.
    """

    def slot(field: str) -> str:
        return field if apart is None else field.partition(".")[0]

    owners: dict[str, list[int]] = {}
    for kind in (fields, others):
        for i, mine in enumerate(kind):
            for field in mine:
                owners.setdefault(slot(field), []).append(i)
    full = [part.full_name for part in chain]
    hyper = {name for part in chain for name, _ in part.hyper}

    def key(i: int, field: str) -> str:
        own, measures = full[i], chain[i].name == "monitor"
        rivals = [
            full[j]
            for j in owners[slot(field)]
            if j != i
            and not (apart and chain[i].apart_from(chain[j]))
            and (measures or chain[j].name != "monitor")
        ]
        labelled = apart is None and own != chain[i].name
        taken = field in COUNTS or (measures and field in hyper)
        if not (rivals or taken or labelled):
            return field
        if apart is None:
            alike = full[:i].count(own)
            return f"{own}.{alike}.{field}" if alike else f"{own}.{field}"
        if not own and not rivals:
            raise ValueError(
                f"a rule has a slot called {field!r}, as is a number of steps in a state; give "
                "the slot another name."
            )
        if not own or own in rivals:
            raise ValueError(
                f"two rules of this chain have a slot called {field!r} and no names; name them "
                "with named_chain, e.g. named_chain(('fast', ...), ('slow', ...))."
            )
        return f"{own}.{field}"

    return tuple([tuple([key(i, field) for field in mine]) for i, mine in enumerate(fields)])
