"""`Rule`, the mathematics of one tensor, and `Placement`, its place in a recipe."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base
from functional_optim.core.numbers import Numbers, Own
from functional_optim.core.ownership import OwnerGroup
from functional_optim.core.paths import BFLOAT16, Choice
from functional_optim.core.storage import Storage, stored_keys
from functional_optim.core.views import MatrixView

Update = Callable[..., tuple[Any, Any]]

Goal = Literal["step", "reduce", "stage"]
"""The purpose of a run of rules: make their step, in place; measure with the last of them; or write
only the slots of the last one, as a stage of a step."""


class Runs(NamedTuple):
    """When and how a rule of `leafwise` runs: `leafwise(..., runs=Runs(batched=True))`.

    Args:
        choose: `choose(t[, carry])` returns the index of the variant of `update` for step t, from
            0; it may take hyperparameters by name. If the index is known, only that variant is run,
            or compiled; a traced step has all, behind a condition. None: there is one variant.
        turns: number of turns over which an expensive variant is spread, ≥ 1, for a rule that is
            not element-wise. `choose` then also takes a keyword-only `turn`, and is called for
            each, from 0 to turns - 1: `lambda t, *, turn: t % 10 == turn` refreshes a tenth of the
            tensors in each step. All tensors of the rule, with or without a gradient, are assigned
            to turns in the order of their sizes, which balances the large ones; an optimizer object
            does so over all groups. The assignment is not stored: another set of tensors has other
            turns. None: all tensors use the same variant.
        start: an `update` and names of slots: it runs instead of the others for a tensor whose
            slots of these names have zeros in the first column, and initializes them. So each
            tensor is initialized with its first gradient. For batched rules.
        shared: whether an optimizer object has one carry and one step count for all of its tensors,
            like a transformation of trees: they advance in each step in which any of the tensors
            has a gradient, and also apply to a tensor that is added later. False: each tensor has
            separate ones, and counts the steps in which it had a gradient, as in torch.optim.
        absent: `absent(slots, *numbers)` returns the slots of a tensor that has no gradient in a
            step, with the numbers of `update`. None: they do not change. For a shared rule that
            carries scalars.
        after: "lr" for a rule that changes the finished step, so that no learning rate may follow
            it. "step" for one that gets the parameter *after* the update as `p`, and returns `u`
            unchanged; only others of this kind may follow it. None: it may be anywhere in a chain.
        batched: True for a rule that takes several tensors of one shape at once: `u` and the slots
            may have an additional leading dimension, and `p` is None. Matrix products do not need
            it, but are faster in batches. `as_matrix` and `matrix_owners` affect only such rules. A
            batched rule cannot have codecs.
        dense_only: True raises an error for sparse gradients. Rules that reduce over rows or depend
            on their number do so anyway, as do rules with `batched` or codecs.

    `leafwise` raises ValueError for values that contradict each other, or the rule.

    Example::

        >>> import torch, functional_optim as fo
        >>> def keep(u, slots, p):
        ...     return u, slots
        >>> def flip(u, slots, p):
        ...     return -u, slots
        >>> runs = fo.Runs(choose=lambda t: t % 2 == 0)
        >>> tx, w = fo.leafwise(None, (keep, flip), runs=runs), torch.zeros(1)
        >>> u, state = tx.update(torch.ones(1), tx.init(w), w)
        >>> u, tx.update(torch.ones(1), state, w)[0]
        (tensor([1.]), tensor([-1.]))
    """

    choose: Callable[..., Any] | None = None
    turns: int | None = None
    start: tuple[Update, Sequence[str]] | None = None
    shared: bool = False
    absent: Callable[..., Any] | None = None
    after: Literal["lr", "step"] | None = None
    batched: bool = False
    dense_only: bool = False


class Reads(NamedTuple):
    """The keyword arguments of `scalars` of a rule.

    hyper: hyperparameters. fixed: their values, if these never change. extra: extra arguments of
    `update`. plain: whether its scalars depend only on the step and the hyperparameters.
    """

    hyper: tuple[tuple[str, Any], ...] = ()
    fixed: dict[str, Any] | None = None
    extra: tuple[str, ...] = ()
    plain: bool = False


class Rule(NamedTuple):
    """The mathematics of one tensor; when it runs, and how its slots are stored.

    `leafwise` documents the fields.
    """

    updates: tuple[Update, ...]
    """The variants; most rules have one. None behind a gate that is known to be closed."""
    init: Callable[[Tensor], Any] | None = None
    scalars: Callable[..., Any] | None = None
    reduce: Callable[..., tuple[Any, ...]] | None = None
    before: Callable[..., Numbers] | None = None
    carry: Any = None
    hyper: tuple[tuple[str, Any], ...] = ()
    """Hyperparameters by name: numbers, 0-dim tensors, schedules, or tuples of these."""
    reads: Reads = Reads()
    runs: Runs = Runs()
    storage: Storage = Storage()
    name: str = ""
    """Its name in errors."""
    own: bool = True
    """Whether its functions are those of this package or of torch: they read nothing that changes,
    and tests check what they return."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the stored tensors of the slots."""
        return stored_keys(self.storage)

    @property
    def draws(self) -> bool:
        """Whether its update draws noise: `init` then takes the path of the tensor, too, and
        elements without a gradient change."""
        return getattr(self.init, "draws", False)

    def stored_by(self, **changes: Any) -> Rule:
        """The same with other fields of its storage."""
        storage = self.storage._replace(**changes)
        plain = self.reads.plain and storage.seed is None  # otherwise its scalars have a key
        return self._replace(storage=storage, reads=self.reads._replace(plain=plain))

    def without_codecs(self) -> Rule:
        """The same with unpacked slots."""
        return self.stored_by(codecs={}, packs=None, seed=None) if self.storage.codecs else self

    def each_hyper(self) -> list[tuple[str, Any]]:
        """The hyperparameters, those in tuples separately, under their names in a state."""
        found: list[tuple[str, Any]] = []
        for name, value in self.hyper:
            if type(value) is tuple:
                found += [(f"{name}.{i}", x) for i, x in enumerate(value)]
            else:
                found.append((name, value))
        return found

    def given_at(self, t: Any) -> dict[str, Any]:
        """The values at step t of the hyperparameters that `scalars` takes."""
        hyper, fixed, _, _ = self.reads
        return {name: value_at(x, t) for name, x in hyper} if fixed is None else fixed

    def carried(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The carried scalars as an argument; none for a rule that carries nothing."""
        return () if self.carry is None else (type(self.carry)(*values),)

    def numbers_before(self, t: Any, carry: Sequence[Any]) -> Numbers:
        """The scalars that `reduce` reads at step t."""
        return () if self.before is None else self._ready(self.before, t, carry)()

    def chosen(self, t: Any, carry: Sequence[Any]) -> list[Any]:
        """The index of the variant for step t, from 0: for each turn, or one for all tensors."""
        choose, turns, *_ = self.runs
        if choose is None:
            return [0]
        asked = self._ready(choose, t, carry)
        return [asked(turn=turn) for turn in range(turns)] if turns else [asked()]

    def _ready(
        self, function: Callable[..., Any], t: Any, carry: Sequence[Any]
    ) -> Callable[..., Any]:
        """Call a function of a rule with its arguments at step t."""
        names = base.extra_names(function)
        given = {name: value_at(x, t) for name, x in self.hyper if name in names}
        return partial(function, t, *self.carried(carry), **given)


def master_of(placements: Sequence[Placement], p: Tensor) -> int | None:
    """The index of the rule that stores the remaining bits of parameters; None if none does."""
    if p.dtype is not torch.bfloat16:
        return None
    for k, placement in zip(range(len(placements)), placements, strict=True):
        if placement.rule.storage.weight_codec is not None:
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
    """A rule in a recipe: its name, and the leaves and steps in which it acts."""

    rule: Rule
    name: str = ""
    where: tuple[Choice, ...] = ()
    """The leaves on which it acts; all, if empty."""
    gate: int = 0
    """Distance to the previous rule that gates it; 0: none."""
    lookback: int | None = None
    """Distance to the previous rule whose incoming update it also gets, after p; None: none."""
    reduce_groups: tuple[Any, ...] = ()
    """The process groups over which its measurement is summed; None: the default group."""
    owners: OwnerGroup | None = None
    """The processes to which its matrices are distributed; None: each process computes all of
    them."""

    @property
    def shown(self) -> str:
        """Its name in errors."""
        return self.name or self.rule.name

    def on(self, *choices: Choice) -> Placement:
        """The same, only on those of its leaves that these choices select."""
        return self._replace(where=(*self.where, *choices))

    def gated_by(self, gate: int) -> Placement:
        """The same behind a gate; one that has a gate keeps it."""
        return self if self.gate else self._replace(gate=gate)

    def spread_over(self, owners: OwnerGroup | None) -> Placement:
        """The same with matrices distributed over processes, or not, if its rule is batched."""
        return self._replace(owners=owners) if self.rule.runs.batched else self

    def choices(self) -> tuple[Choice, ...]:
        """Its selections of leaves: for the rule, and for packed slots."""
        storage = self.rule.storage
        packs = () if storage.packs is None else storage.packs.choices
        return (*self.where, *packs, *([BFLOAT16] if storage.weight_codec is not None else ()))

    def initialized(self, init: Callable[[Tensor], Any]) -> Placement:
        """The same with other first values for the slots."""
        return self._replace(rule=self.rule._replace(init=init))

    def seen_as(self, view: MatrixView) -> Placement:
        """The same with parameters as matrices, if its rule is batched.

        An explicit view is not replaced.
        """
        known = self.rule.storage.view
        if not self.rule.runs.batched or (known is not None and not known.assumed):
            return self
        if known is not None:
            view = view._replace(block=known.block, most=known.most)
            if view.kernel == "tensor" and known.most == 2:
                raise ValueError(
                    f"{self.rule.name} takes matrices, so a kernel cannot be a 'tensor' for it; "
                    "pass kernel='flatten', 'batch' or 'auto'."
                )
        if view.kernel == "auto" or view.stack:  # of a stack each is a matrix in any case
            cut = view.divided or (view.transposed and view.stack)
            view = view._replace(kernel="flatten" if cut or known is None else known.kernel)
        if known is not None and view.kernel == "tensor":
            view = view._replace(merged=known.merged)
        return self._replace(rule=self.rule.stored_by(view=view))

    def variant(self, which: int) -> Placement:
        """The same with one variant of the rule, by the index in `Own`; 0: with none."""
        rule, runs = self.rule, self.rule.runs
        if not which:
            if runs.batched or runs.choose is not None or runs.after is not None:
                off = {"choose": None, "turns": None, "start": None, "after": None}
                runs = runs._replace(**off, batched=False)
            return self._replace(rule=rule._replace(updates=(), runs=runs), gate=0, lookback=None)
        if runs.choose is not None:
            runs = runs._replace(choose=None, turns=None)
            rule = rule._replace(updates=rule.updates[which - 1 : which], runs=runs)
        return self._replace(rule=rule, gate=0)


def settled(
    placements: tuple[Placement, ...], numbers: Sequence[Numbers]
) -> tuple[tuple[int | None, ...] | None, tuple[Placement, ...], list[Numbers]]:
    """The variants that act in a step, and the rules and scalars without choices.

    None for the variants if nothing is chosen, or a choice is unknown: rules and scalars are then
    unchanged. So is a rule whose variant differs between tensors, with None for its variant.
    """
    chosen = [own.which for own in numbers if type(own) is Own and own.which]
    if not chosen or any(len(x) == 1 and isinstance(x[0], Tensor) for x in chosen):
        return None, placements, list(numbers)
    known: list[int | None] = []
    plain: list[Placement] = []
    left: list[Numbers] = []
    for placement, own in zip(placements, numbers, strict=False):
        if type(own) is Own and own.which:
            variant = None
            if len(own.which) == 1:
                variant = number_of(placement.rule, own.which[0])
                placement = placement.variant(variant)
                own = Own((), own.key, own.values) if variant else ()
            known.append(variant)
        plain.append(placement)
        left.append(own)
    return tuple(known), tuple(plain), left


def number_of(rule: Rule, which: Any) -> int:
    """A known choice as the index of a variant; 0: none."""
    return int(which if len(rule.updates) > 1 else which > 0)


def variant_of(rule: Rule, index: Any) -> Any:
    """The result of `choose` as the index of a variant, from 1.

    Raises:
        ValueError: if the index is known and out of range.
    """
    if not isinstance(index, Tensor) and index not in range(len(rule.updates)):
        raise ValueError(
            f"choose of a rule with {len(rule.updates)} variants returned {index!r}; return a "
            f"whole number from 0 to {len(rule.updates) - 1}."
        )
    return 1 + index


Acting = tuple[Sequence[Placement], Sequence[Hashable], Tensor]
"""The rules that act on a tensor, the identity of each, and the tensor."""


def takes_turns(placements: Sequence[Placement]) -> bool:
    """Whether a rule chooses its variant for each turn."""
    return any(placement.rule.runs.turns for placement in placements)


def turns_of(leaves: Sequence[Acting]) -> list[tuple[int, ...]]:
    """The turn of each tensor for each of its rules; nothing for one whose rules have no turns.

    A rule assigns turns to all of its tensors, the one with the most elements first, tensors of one
    size in their order. So each turn has one of the largest, one of the next, and so on.
    """
    acted_on: dict[Hashable, list[int]] = {}
    for i, (placements, keys, _) in enumerate(leaves):
        for placement, key in zip(placements, keys, strict=True):
            if placement.rule.runs.turns:
                acted_on.setdefault(key, []).append(i)
    ranks: list[dict[Hashable, int]] = [{} for _ in leaves]
    for key, members in acted_on.items():
        for rank, i in enumerate(sorted(members, key=lambda i: -leaves[i][2].numel())):
            ranks[i][key] = rank
    return [
        tuple(
            [
                mine[key] % placement.rule.runs.turns if placement.rule.runs.turns else 0
                for placement, key in zip(placements, keys, strict=True)
            ]
        )
        if mine
        else ()
        for (placements, keys, _), mine in zip(leaves, ranks, strict=True)
    ]


def select(condition: Any, a: Tensor, b: Any) -> Tensor:
    """a if a number is above 0, else b, a tensor like a or a float.

    The number is a scalar of a rule: if it is known, this needs no operation.
    """
    if isinstance(condition, Tensor):
        return torch.where(condition > 0, a, b)
    if condition > 0:
        return a
    return b if isinstance(b, Tensor) else torch.full_like(a, b)


def unchanged(u: Tensor, slots: Any, p: Tensor, *given: Any) -> tuple[Tensor, Any]:
    """The `update` of a rule that changes nothing."""
    return u, slots


def times(u: Tensor, slots: Any, p: Tensor, factor: Any) -> tuple[Tensor, Any]:
    """The `update` of a rule that multiplies by a number."""
    return factor * u, slots


def squares(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor]:
    """The `reduce` of a rule that measures the Euclidean norm: its square."""
    return ((u * u).sum(),)
