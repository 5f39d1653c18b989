"""`Rule`, the mathematics of one tensor, and `Placement`, its place in a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base
from functional_optim.core.ownership import Owners
from functional_optim.core.paths import BFLOAT16, Choice
from functional_optim.core.storage import Codec, Home, WeightCodec
from functional_optim.core.views import MatrixView

Numbers = tuple[Any, ...]
"""The numbers that a rule reads in a step: a plain tuple, or the rule's own NamedTuple."""

Update = Callable[..., tuple[Any, Any]]

Goal = Literal["step", "reduce", "stage"]
"""What is done with rules: make their step, in place; measure with the last of them; or write the
slots of the last one alone, as a stage of a step."""


class Several(NamedTuple):
    """The numbers of a rule that runs others: those of each, in a tuple."""

    each: tuple[Numbers, ...]


class Keyed(NamedTuple):
    """The numbers of a rule whose slots are rounded by chance, with the key of the step."""

    key: Any
    numbers: Numbers


class Selected(NamedTuple):
    """The numbers of a rule that does not act in every step, or has several variants.

    which: above 0 where the rule acts; of a rule with several variants, the number of the one that
    does, from 1. 0: update and slots stay as they were, behind a shut gate. A tuple: such a number
    for each turn of a rule that has several.
    """

    which: Any
    numbers: Numbers


class Policy(Protocol):
    """Whether a leaf is stored by codecs, by its path and itself."""

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The masks that it asks."""
        ...

    def __call__(self, path: str, p: Tensor, /) -> bool: ...

    def left_out(self, path: str, p: Tensor, /) -> str:
        """Why a leaf is not, in a few words; empty for one that is."""
        ...


class Rule(NamedTuple):
    """The mathematics of one tensor and its slots. `leafwise` documents the fields."""

    updates: tuple[Update, ...]
    """The variants; most rules have one. None behind a gate that is known to be shut."""
    init: Callable[[Tensor], Any] | None = None
    slots: type | None = None
    """The NamedTuple that `init` returns."""
    keys: tuple[str, ...] = ()
    """The names of the stored tensors of the slots."""
    codecs: tuple[Codec | None, ...] = ()
    """For each slot; None where it is stored as it is."""
    packs: Policy | None = None
    """Which leaves are stored by codecs; None: all."""
    seed: int | None = None
    """Of the random numbers by which codecs round; None: they round to the nearest."""
    nonnegative: tuple[str, ...] = ()
    """The slots whose entries are sizes, such as second moments."""
    weights: tuple[str, ...] = ()
    """The slots that are parameters of their own, such as averages of them."""
    weight_codec: WeightCodec | None = None
    """How parameters in bfloat16 and this rule's slots hold weights of more bits, which all rules
    of the leaf see; its own `update` is not called."""
    home: Home | None = None
    """Where new slots are kept; None: where their parameter is."""
    scalars: Callable[..., Any] | None = None
    reduce: Callable[..., tuple[Any, ...]] | None = None
    before: Callable[..., Numbers] | None = None
    measure: Callable[..., Numbers] | None = None
    choose: Callable[..., Any] | None = None
    start: tuple[Update, tuple[str, ...]] | None = None
    """The update of a tensor whose slots of these names are all zeros."""
    turns: int = 0
    """For how many turns `choose` is asked; 0: once for all tensors."""
    absent: Callable[..., Any] | None = None
    carry: Any = None
    hyper: tuple[tuple[str, Any], ...] = ()
    """Hyperparameters by name: numbers, 0-dim tensors, schedules, or tuples of these."""
    given: dict[str, Any] | tuple[tuple[str, Any], ...] = ()
    """Those that `scalars` takes by name; a dict of their values if these never change."""
    extra: tuple[str, ...] = ()
    """The extra arguments of `update` that `scalars` takes by name."""
    plain: bool = False
    """Whether the step and the hyperparameters are all that its numbers depend on."""
    elementwise: bool | None = None
    """What its author says; True is compared with what it does."""
    reads_new_params: bool = False
    shared: bool = False
    batched: bool = False
    dense_only: bool = False
    """Whether it needs all rows of a tensor, so that sparse gradients are refused."""
    view: MatrixView | None = None
    """How a rule that takes batches sees a parameter as matrices; None: as it is."""
    name: str = ""
    """What errors call it."""
    scales_step: bool = False
    """Whether it changes the finished step, so that no learning rate may follow."""

    def without_codecs(self) -> Rule:
        """The same on slots that are stored as it sees them."""
        if self.slots is None or not any(self.codecs):
            return self
        return self._replace(codecs=(), packs=None, seed=None, keys=self.slots._fields)

    def each_hyper(self) -> list[tuple[str, Any]]:
        """The hyperparameters, those in tuples one by one, under the names that a state shows."""
        found: list[tuple[str, Any]] = []
        for name, value in self.hyper:
            if type(value) is tuple:
                found += [(f"{name}.{i}", x) for i, x in enumerate(value)]
            else:
                found.append((name, value))
        return found

    def given_at(self, t: Any) -> dict[str, Any]:
        """The values at step t of the hyperparameters that `scalars` takes."""
        if type(self.given) is dict:
            return self.given
        return {name: value_at(x, t) for name, x in self.given}

    def carried(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The carried numbers as an argument; none for a rule that carries nothing."""
        return () if self.carry is None else (type(self.carry)(*values),)

    def numbers_before(self, t: Any, carry: Sequence[Any]) -> Numbers:
        """The numbers that `reduce` reads at step t."""
        return () if self.before is None else self._asked(self.before, t, carry)

    def chosen(self, t: Any, carry: Sequence[Any]) -> list[Any]:
        """The index of the variant for step t, from 0: for each turn, or one for all tensors."""
        if self.choose is None:
            return [0]
        asked = self._ready(self.choose, t, carry)
        return [asked(turn=turn) for turn in range(self.turns)] if self.turns else [asked()]

    def _asked(self, function: Callable[..., Any], t: Any, carry: Sequence[Any]) -> Any:
        return self._ready(function, t, carry)()

    def _ready(
        self, function: Callable[..., Any], t: Any, carry: Sequence[Any]
    ) -> Callable[..., Any]:
        """A function of a rule with what it takes at step t."""
        names = base.extra_names(function)
        given = {name: value_at(x, t) for name, x in self.hyper if name in names}
        return partial(function, t, *self.carried(carry), **given)


def master_of(placements: Sequence[Placement], p: Tensor) -> int | None:
    """The index of the rule that keeps what the dtype of a parameter lacks; None if none does."""
    if p.dtype is not torch.bfloat16:
        return None
    for k, placement in zip(range(len(placements)), placements, strict=True):
        if placement.rule.weight_codec is not None:
            return k
    return None


def value_at(hyper: Any, t: Any) -> Any:
    """The value of a hyperparameter, or of each in a tuple, at step t."""
    if type(hyper) is tuple:
        return tuple([numeric.at(x, t) for x in hyper])
    return numeric.at(hyper, t)


def constants(given: dict[str, Any]) -> dict[str, Any] | None:
    """The values of hyperparameters that never change: Python numbers, or tuples of these."""
    each = [y for x in given.values() for y in (x if type(x) is tuple else (x,))]
    if not all(type(y) is float or type(y) is int for y in each):
        return None
    return {name: value_at(x, 1.0) for name, x in given.items()}


class Placement(NamedTuple):
    """A rule in a recipe: its name there, and the leaves and steps in which it acts."""

    rule: Rule
    name: str = ""
    where: tuple[Choice, ...] = ()
    """The leaves on which it acts; all, if empty."""
    gate: int = 0
    """Distance to the rule before it that gates it; 0: none."""
    lookback: int | None = None
    """Distance to the rule before it whose incoming update it also gets, after p; None: none."""
    reduce_groups: tuple[Any, ...] = ()
    """The process groups over which its measurement is summed; None: the default group."""
    owners: Owners | None = None
    """Over which processes its matrices are spread; None: each process computes all of them."""

    def named(self, name: str) -> Placement:
        """The same under another name."""
        return self._replace(name=name)

    def on(self, *choices: Choice) -> Placement:
        """The same on those of its leaves only that these choices select."""
        return self._replace(where=(*self.where, *choices))

    def behind(self, gate: int) -> Placement:
        """The same behind a gate; one that has a gate keeps it."""
        return self if self.gate else self._replace(gate=gate)

    def ungated(self) -> Placement:
        """The same without a gate."""
        return self._replace(gate=0)

    def looking_back(self, lookback: int) -> Placement:
        """The same with an older update for its rule."""
        return self._replace(lookback=lookback)

    def summed_over(self, *groups: Any) -> Placement:
        """The same with a measurement that is summed over these process groups only."""
        return self._replace(reduce_groups=groups)

    def spread_over(self, owners: Owners | None) -> Placement:
        """The same with matrices spread over processes, or not, if its rule takes batches."""
        return self._replace(owners=owners) if self.rule.batched else self

    def among(self, gate: int, lookback: int | None) -> Placement:
        """The same on one leaf, where other rules may stand before it."""
        return self._replace(where=(), gate=gate, lookback=lookback)

    def choices(self) -> tuple[Choice, ...]:
        """The selections of leaves that it asks: where it acts, and where its slots are packed."""
        packs = () if self.rule.packs is None else self.rule.packs.choices
        return (*self.where, *packs, *([BFLOAT16] if self.rule.weight_codec is not None else ()))

    def initialized(self, init: Callable[[Tensor], Any]) -> Placement:
        """The same with other first values for the slots."""
        return self._replace(rule=self.rule._replace(init=init))

    def seen_as(self, view: MatrixView) -> Placement:
        """The same with parameters seen as matrices, if its rule takes batches of them.

        One that has a view keeps it, unless nobody has asked for that.
        """
        known = self.rule.view
        if not self.rule.batched or (known is not None and not known.assumed):
            return self
        if known is not None:
            view = view._replace(block=known.block)
        return self._replace(rule=self.rule._replace(view=view))

    def variant(self, which: int) -> Placement:
        """The same with one variant of the rule, by the number in `Selected`; 0: with none."""
        updates = self.rule.updates[which - 1 : which]
        rule = self.rule._replace(updates=updates, choose=None, turns=0)
        if which:
            return self._replace(rule=rule, gate=0)
        idle = rule._replace(
            updates=(),
            start=None,
            measure=None,
            batched=False,
            elementwise=None,
            reads_new_params=False,
        )
        return self._replace(rule=idle, gate=0, lookback=None)


def settled(
    placements: tuple[Placement, ...], numbers: Sequence[Numbers]
) -> tuple[tuple[int | None, ...] | None, tuple[Placement, ...], list[Numbers]]:
    """The variants that act in a step, and the same rules and numbers without any choice.

    None for the variants where nothing is chosen, or a choice is not known yet: rules and numbers
    are then as they were. So is a rule whose variant differs from tensor to tensor, with None for
    its variant.
    """
    chosen = [own for own in numbers if type(own) is Selected]
    if not chosen or any(isinstance(own.which, Tensor) for own in chosen):
        return None, placements, list(numbers)
    known: list[int | None] = []
    plain: list[Placement] = []
    left: list[Numbers] = []
    for placement, own in zip(placements, numbers, strict=False):
        if type(own) is Selected:
            which = None
            if type(own.which) is not tuple:
                which = number_of(placement.rule, own.which)
                placement, own = placement.variant(which), own.numbers if which else ()
            known.append(which)
        plain.append(placement)
        left.append(own)
    return tuple(known), tuple(plain), left


def number_of(rule: Rule, which: Any) -> int:
    """A known choice as the number of a variant; 0: none."""
    return int(which if len(rule.updates) > 1 else which > 0)


def in_turn(own: Numbers, turn: int) -> Numbers:
    """A rule's numbers as they are for the tensors of a turn."""
    if type(own) is Selected and type(own.which) is tuple:
        return own._replace(which=own.which[turn])
    return own


def variant_of(rule: Rule, index: Any) -> Any:
    """What `choose` has returned as the number of a variant, from 1.

    Raises:
        ValueError: if it is known that there is no such variant.
    """
    if not isinstance(index, Tensor) and index not in range(len(rule.updates)):
        raise ValueError(
            f"choose of a rule with {len(rule.updates)} variants returned {index!r}; return a "
            f"whole number from 0 to {len(rule.updates) - 1}."
        )
    return 1 + index


def unkeyed(own: Numbers) -> Numbers:
    """A rule's numbers without the key of the step."""
    return own.numbers if type(own) is Keyed else own


def told(numbers: Numbers) -> Numbers:
    """The numbers of a rule as arguments: a NamedTuple is one, the entries of a tuple are many."""
    return numbers if type(numbers) is tuple else (numbers,)  # for `hasattr` a trace takes long


def flat_numbers(numbers: Sequence[Numbers]) -> list[Any]:
    """All numbers of some rules in one list."""
    flat: list[Any] = []
    for own in numbers:
        if type(own) is Selected:
            flat += [*own.which] if type(own.which) is tuple else [own.which]
            own = own.numbers
        if type(own) is Keyed:
            flat.append(own.key)
            own = own.numbers
        flat += flat_numbers(own.each) if type(own) is Several else [*own]
    return flat


class Form(NamedTuple):
    """How the numbers of a rule are put together.

    record: their NamedTuple, None for a tuple. size: how many they are. selected: how many numbers
    choose a variant before them, one for each turn. each: of `Several` the forms of its parts.
    keyed: whether the key of the step stands between those and these. whole: which of them are
    ints or bools, and which of both; object for one that is large.
    """

    record: type | None
    size: int
    selected: int
    each: tuple[Form, ...] = ()
    keyed: bool = False
    whole: tuple[tuple[int, type], ...] = ()

    @property
    def total(self) -> int:
        """How many numbers there are in all."""
        return self.selected + self.keyed + self.size

    def whole_from(self, start: int) -> list[tuple[int, type]]:
        """Which of all numbers are ints or bools. start: the place of its first one."""
        start += self.selected + self.keyed
        found = [(start + i, kind) for i, kind in self.whole]
        for form in self.each:
            found += form.whole_from(start)
            start += form.total
        return found


LARGE = 1 << 20
"""Of ints below it, products of three fit into the 64 bits of torch's."""


def form_of(own: Numbers) -> Form:
    """The form of a rule's numbers."""
    if type(own) is Selected:
        count = len(own.which) if type(own.which) is tuple else 1
        return form_of(own.numbers)._replace(selected=count)
    if type(own) is Keyed:
        return form_of(own.numbers)._replace(keyed=True)
    if type(own) is Several:
        each = tuple(map(form_of, own.each))
        return Form(None, sum([form.size for form in each]), 0, each)
    whole = tuple(
        [
            (i, type(x) if abs(x) < LARGE else object)
            for i, x in enumerate(own)
            if isinstance(x, int)
        ]
    )
    return Form(type(own) if hasattr(own, "_fields") else None, len(own), 0, whole=whole)


def with_forms(flat: Iterator[Any], forms: Sequence[Form]) -> list[Numbers]:
    """The inverse of `flat_numbers`."""
    found: list[Numbers] = []
    for record, size, selected, each, keyed, _ in forms:
        which = [next(flat) for _ in range(selected)]
        key = [next(flat) for _ in range(keyed)]
        if each:
            own = Several(tuple(with_forms(flat, each)))
        else:
            values = tuple([next(flat) for _ in range(size)])
            own = values if record is None else record(*values)
        if key:
            own = Keyed(key[0], own)
        if which:
            own = Selected(which[0] if selected == 1 else tuple(which), own)
        found.append(own)
    return found


def either(condition: Any, a: Tensor, b: Any) -> Tensor:
    """a if a number is above 0, else b, a tensor like a or a float.

    The number is one of a rule's: where it is known, this costs no operation.
    """
    if isinstance(condition, Tensor):
        return torch.where(condition > 0, a, b)
    if condition > 0:
        return a
    return b if isinstance(b, Tensor) else torch.full_like(a, b)


def times(u: Tensor, slots: Any, p: Tensor, factor: Any) -> tuple[Tensor, Any]:
    """The `update` of a rule that multiplies by a number."""
    return factor * u, slots


def squares(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor]:
    """The `reduce` of a rule that measures the Euclidean norm: its square."""
    return ((u * u).sum(),)
