"""`leafwise`: a transformation of trees from a rule for one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base
from functional_optim.core.factory import factory
from functional_optim.core.lift import lift, part_of, route
from functional_optim.core.rule import Numbers, Placement, Rule, Update, constants
from functional_optim.core.state_keys import Layout, lay_out
from functional_optim.core.storage import Codec, stored_keys


class Leafwise(base.GradientTransformation):
    """A transformation made of nothing but one-tensor rules, so it can be fused and compiled.

    layout: the names of what its rules keep. parts: what acts on some leaves only, by the indices
    of its rules.

    Example::

        >>> import torch, functional_optim as fo
        >>> average = fo.masked(fo.trace(0.9), "*weight")
        >>> tx = fo.chain(fo.clip_by_value(1.0), average, fo.scale(-0.1))
        >>> tx.on("layer.weight", torch.zeros(3, 3))
        chain(clip_by_value, trace, scale)
        >>> tx.on("layer.bias", torch.zeros(3))
        chain(clip_by_value, scale)
    """

    _placements: tuple[Placement, ...]
    layout: Layout
    parts: dict[tuple[int, ...], Leafwise]

    def __new__(cls, placements: tuple[Placement, ...], layout: Layout | None = None) -> Leafwise:
        layout = lay_out(placements) if layout is None else layout
        self = super().__new__(cls, *lift(placements, layout))
        self._placements = placements
        self.layout = layout
        self.parts = {}
        return self

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self._placements

    @property
    def rules(self) -> list[tuple[Rule, tuple[str, ...], tuple[str, ...]]]:
        """Each rule, with the keys of its slots and of its carried numbers."""
        keys = zip(self._placements, self.layout.slots, self.layout.carry, strict=True)
        return [(placement.rule, slots, carry) for placement, slots, carry in keys]

    @property
    def carried(self) -> dict[str, Any]:
        """What each carried number begins with, by key."""
        return {
            key: first
            for rule, _, keys in self.rules
            for key, first in zip(keys, rule.carry or (), strict=True)
        }

    @property
    def communicates(self) -> bool:
        return any(placement.reduce_groups for placement in self._placements)

    def _own_extra(self, *, required: bool) -> tuple[str, ...]:
        rules = [placement.rule for placement in self._placements if placement.rule.extra]
        known = [base.extra_names(cast("Any", rule.scalars), required=required) for rule in rules]
        pairs = zip(rules, known, strict=True)
        return tuple([name for rule, names in pairs for name in rule.extra if name in names])

    def on(self, path: str, leaf: Any) -> Leafwise | None:
        """The chain of rules that act on one leaf; None if the leaf is frozen."""
        if not self.layout.routed:
            return self
        places = route(self.placements, path, leaf)
        if places is None:
            return None
        part = self.parts.get(places)
        if part is None:
            part = self.parts[places] = Leafwise(*part_of(self.placements, self.layout, places))
        return part

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.placements, self.layout

    def __repr__(self) -> str:
        return f"chain({', '.join(placement.name or '?' for placement in self.placements)})"


def made_of_rules(
    who: str, tx: Any, advice: str = "apply it to the parts that are, before chaining them"
) -> Leafwise:
    """A transformation as it is; TypeError, in the name of who takes it, for one of whole trees."""
    if not isinstance(tx, Leafwise):
        raise TypeError(
            f"{who} takes a transformation made of one-tensor rules, but got a "
            f"{type(tx).__name__}; {advice}."
        )
    return tx


@factory
def leafwise(
    init: Callable[[Tensor], Any] | None,
    update: Update | Sequence[Update],
    scalars: Callable[..., Any] | None = None,
    *,
    reduce: Callable[..., tuple[Any, ...]] | None = None,
    before: Callable[..., Numbers] | None = None,
    measure: Callable[..., Numbers] | None = None,
    choose: Callable[..., Any] | None = None,
    start: tuple[Update, Sequence[str]] | None = None,
    turns: int | None = None,
    carry: Any = None,
    hyper: Mapping[str, numeric.Hyper | tuple[numeric.Hyper, ...]] | None = None,
    codecs: Mapping[str, Codec] | None = None,
    nonnegative: Sequence[str] = (),
    weights: Sequence[str] = (),
    elementwise: bool | None = None,
    reads_new_params: bool = False,
    scales_step: bool = False,
    shared: bool = False,
    absent: Callable[..., Any] | None = None,
    batched: bool = False,
    dense_only: bool = False,
    name: str = "",
    **renamed: Any,
) -> Leafwise:
    """Lift a rule for one tensor to a transformation of trees.

    The operations of a rule say what it is: element-wise, with reductions over rows, columns or
    whole tensors, or with products of matrices. They are recorded when the rule first runs. So
    `measure`, `elementwise`, `batched` and `dense_only` are never needed for right results.

    Args:
        init: `init(p)` returns the tensor's slots, a NamedTuple of tensors of any shapes and
            dtypes (`None` for a slot that this tensor does not need). It is also called with
            tensors without data, to learn those shapes and dtypes. `None` for a rule without slots.
        update: `update(u, slots, p, *numbers)` returns `(u, slots)`. Operations on tensors only; in
            place only on tensors that it has made. It may close over bools, strings and ints, never
            over a number that may change: those come in as `numbers`. Half types arrive as float32,
            complex tensors as real pairs; slots go back to their own dtype by themselves. Several
            of them, variants of one rule, if there is `choose`.
        scalars: `scalars(t)` returns the numbers that all tensors share at step t, which is 1 at
            the first: a NamedTuple, which `update` gets as one argument, or a plain tuple, whose
            entries it gets one by one. `t` is a float, or a 0-dim float64 tensor; for functions of
            it use `functional_optim.numeric`. With `carry` and `reduce` it is called as
            `scalars(t, carry, total)`. Its keyword-only parameters are hyperparameters, whose
            values at step t it gets, and extra arguments of `update`; with `**` it gets all
            hyperparameters.
        reduce: `reduce(u, slots, p, *numbers)` measures one tensor: a tuple of 0-dim tensors.
            They are summed over the whole tree in float64 and handed to `scalars` as `total`.
            Without `scalars`, `update` gets the totals themselves.
        before: `before(t[, carry])` returns the numbers that `reduce` needs; it may take
            hyperparameters by name.
        measure: `measure(u, slots, p, *numbers)` returns sums over the elements of the tensor, as
            0-dim tensors: a NamedTuple, which `update` gets as one more argument, or a tuple, whose
            elements it gets one by one. Not needed, since `update` may compute these sums itself,
            and any other reduction. Useful to write sums once that several variants read.
        choose: `choose(t[, carry])` returns the index of the variant for step t, from 0; it may
            take hyperparameters by name. Where the number is known, only that variant is run, or
            compiled; in a traced step all are, behind a condition.
        start: an `update` and names of slots: for a tensor of which these slots have zeros in the
            first column, it runs in the place of the others, and makes them. So a tensor starts
            with its first gradient, whenever that comes. For rules that take batches.
        turns: how many turns to spread a dear variant over, ≥ 1, for a rule that is not
            element-wise. `choose` then also takes a keyword-only `turn`, and is asked for each,
            from 0 to turns - 1: `lambda t, *, turn: t % 10 == turn` renews a tenth of the tensors
            in each step. All tensors on which the rule acts, with a gradient or without, take
            turns in the order of their sizes, so each turn gets its share of the large ones.
            In an optimizer object they do so over all groups. Nothing is stored: another set of
            tensors gives other turns.
        carry: a NamedTuple of numbers, the first values of those that recur. `scalars` then
            returns `(numbers, carry)`. A float is kept in torch's default dtype, as torch.optim
            keeps it. An int marks a count, which is kept in float64: exact up to 2^53.
        hyper: the hyperparameters by torch's names: floats, 0-dim tensors, schedules, or tuples of
            these. `scalars` takes them by name, and `fo.get` finds their values in the state, those
            of a tuple as `betas.0`, `betas.1`.
        codecs: for slots that are stored as other tensors, by name, their `Codec`. Not for sparse
            gradients.
        nonnegative: the names of slots whose entries are sizes, such as second moments. All others
            are taken to be linear in the gradients, such as momentum: what changes the basis of
            matrices (`in_basis`) rotates them along.
        weights: the names of slots that are parameters of their own, such as averages or copies of
            them. `stored` keeps them in full.
        elementwise: True asserts that the update of each element depends on that element alone. Not
            needed: it selects nothing. The first use compares it with the operations.
        reads_new_params: True for a rule that gets the parameter *after* the update as `p`, and
            returns `u` as it came. Only others of this kind may follow it.
        scales_step: True for a rule that changes the finished step, so that no learning rate may
            follow it.
        shared: whether an optimizer object has one carry and one count of steps for all of its
            tensors, as a transformation of trees has: they go on in each step in which one of the
            tensors has a gradient, and a tensor that joins late takes them over. False: each tensor
            has its own, which counts the steps in which it had a gradient, as torch.optim does it.
        absent: `absent(slots, *numbers)` returns the slots of a tensor that has no gradient in a
            step, with the numbers of `update`. Without it, they stay as they are. For a shared
            rule that carries numbers.
        batched: True for a rule that takes several tensors of one shape at once: `u` and the slots
            may have one more dimension in front, and `p` is None. Not needed for products of
            matrices, but these are faster in batches. `as_matrix` and `matrix_owners` change such
            rules only. A batched rule cannot have codecs or `measure`.
        dense_only: True refuses sparse gradients. Not needed for a rule that reduces over rows or
            depends on their number: such a rule is found and refuses them. Rules with `batched` or
            `codecs` always do.
        name: tells two rules with the same slot names apart.

    Returns:
        A `GradientTransformation` whose `update` also takes the extra arguments of `scalars`.

    Raises:
        TypeError: at once, if `init` returns something other than a NamedTuple, or for an argument
            that there is not.
        ValueError: at the first use, if `update` writes into its arguments, reads a value of a
            tensor, draws random numbers, or closes over a tensor, or if its operations contradict
            `elementwise=True`, `batched` or `measure`.
        ValueError: at once, if a rule that takes batches has codecs, a measure or reads new
            parameters, one that has `absent` is not shared or carries nothing, there are variants
            without `choose` or the reverse, `turns` without a `choose` that takes a turn or the
            reverse, or a codec for a slot that there is not, or one that would be nonnegative or
            weights.

    Example::

        >>> import torch, functional_optim as fo
        >>> from typing import NamedTuple
        >>> class SignSlots(NamedTuple):
        ...     exp_avg: torch.Tensor
        >>> class SignScalars(NamedTuple):
        ...     lr: float
        ...     share: float
        >>> def signum(lr=1e-2, beta=0.9):
        ...     def init(p):
        ...         return SignSlots(torch.zeros_like(p))
        ...     def scalars(t, *, lr, beta):
        ...         return SignScalars(lr, 1 - beta)
        ...     def update(g, slots, p, s):
        ...         m = slots.exp_avg + s.share * (g - slots.exp_avg)
        ...         return -s.lr * m.sign(), SignSlots(m)
        ...     return fo.leafwise(init, update, scalars, hyper={"lr": lr, "beta": beta})
        >>> tx = signum(lr=fo.schedules.linear(1e-2, 0.0, 100))
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([1.0, -1.0]), tx.init(w), w)
        >>> updates
        tensor([-0.0100,  0.0100])
        >>> state.slots["exp_avg"]
        tensor([ 0.1000, -0.1000])
    """
    _check_renamed(name, renamed)
    updates = (update,) if callable(update) else tuple(update)
    if (choose is None) != (len(updates) == 1):
        raise ValueError(
            f"the rule {name!r} has {len(updates)} variants of update and "
            f"{'no ' if choose is None else ''}choose; pass several variants and a function that "
            "chooses one of them, or a single update and none."
        )
    _check_turns(name, choose, turns, hyper or {})
    if absent is not None and turns is not None:
        raise ValueError(
            f"the rule {name!r} has `absent` and turns, but a tensor without a gradient takes no "
            "turn; leave one of them out."
        )
    if absent is not None and (carry is None or not shared):
        raise ValueError(
            f"the rule {name!r} has `absent`, whose numbers must be there for tensors that do not "
            "step; pass a carry and shared=True, or leave absent out."
        )
    slots = None if init is None else _slots_of(name, init)
    fields: tuple[str, ...] = () if slots is None else slots._fields
    if start is not None and not (batched and set(start[1]) <= set(fields) and start[1]):
        raise ValueError(
            f"the rule {name!r} has a start, which needs batched=True and names of slots; its "
            f"slots are {', '.join(fields) or 'none'}."
        )
    if batched and (codecs or measure is not None or reads_new_params):
        raise ValueError(
            f"the rule {name!r} takes batches of tensors, so it can have no codecs, no measure and "
            "no reads_new_params; put what needs them into another rule, and chain the two."
        )
    used = tuple([codecs.get(field) for field in fields]) if codecs else ()
    if codecs and (unknown := sorted(codecs.keys() - set(fields))):
        raise ValueError(
            f"the rule {name!r} has a codec for {', '.join(unknown)}, but its slots are "
            f"{', '.join(fields) or 'none'}."
        )
    for kind, given_names in (("nonnegative", nonnegative), ("weights", weights)):
        if unknown := sorted(set(given_names) - set(fields)):
            raise ValueError(
                f"the rule {name!r} says that {', '.join(unknown)} is {kind}, but its slots are "
                f"{', '.join(fields) or 'none'}."
            )
    known = tuple((hyper or {}).items())
    named = () if scalars is None else base.extra_names(scalars)
    if scalars is not None and base.takes_any(scalars):
        named = (*named, *[key for key, _ in known if key not in named])
    given = {key: value for key, value in known if key in named}
    fixed = constants(given)
    extra = tuple([x for x in named if x not in (hyper or {})])
    rule = Rule(
        updates=updates,
        init=init,
        slots=slots,
        keys=stored_keys(slots, used),
        codecs=used,
        nonnegative=tuple(nonnegative),
        weights=tuple(weights),
        scalars=scalars,
        reduce=reduce,
        before=before,
        measure=measure,
        choose=choose,
        start=None if start is None else (start[0], tuple(start[1])),
        turns=turns or 0,
        absent=absent,
        carry=carry,
        hyper=known,
        given=tuple(given.items()) if fixed is None else fixed,
        extra=extra,
        plain=carry is None and reduce is None and choose is None and not extra,
        elementwise=elementwise,
        reads_new_params=reads_new_params,
        shared=shared,
        batched=batched,
        dense_only=dense_only or batched or len(used) > 0,
        name=name,
        scales_step=scales_step,
    )
    return Leafwise((Placement(rule, name),))


def _slots_of(name: str, init: Callable[[Tensor], Any]) -> Any:
    """The NamedTuple that `init` of a rule returns."""
    probe = init(torch.zeros((1, 1), device="cpu"))
    if not hasattr(probe, "_fields"):
        raise TypeError(
            f"init of the rule {name!r} returned a {type(probe).__name__}; return a NamedTuple "
            "of tensors, or pass init=None for a rule without slots."
        )
    return type(probe)


def _check_turns(
    name: str,
    choose: Callable[..., Any] | None,
    turns: Any,
    hyper: Mapping[str, Any],
) -> None:
    """Raise ValueError unless turns are a number of them, and those that `choose` is asked for."""
    if torch.compiler.is_compiling():
        return  # Dynamo does not know the defaults of a function
    who = f"the rule {name!r}"
    if turns is None:
        if torch.compiler.is_compiling():  # Dynamo cannot read a function's defaults
            return
        if choose is not None and "turn" in {*base.extra_names(choose, required=True)} - {*hyper}:
            raise ValueError(
                f"choose of {who} takes a turn, but there are no turns; pass turns=, the number "
                "of them, or leave turn out."
            )
        return
    numeric.check_count(who, 1, turns=turns)
    if choose is None:
        raise ValueError(
            f"{who} has turns={turns} and no choose; pass several variants of update and a choose "
            "that takes a keyword-only turn, or leave turns out."
        )
    if "turn" not in base.extra_names(choose) or "turn" in hyper:
        raise ValueError(
            f"{who} has turns={turns}, so choose must have a keyword-only parameter called turn "
            "that is no hyperparameter, e.g. lambda t, *, turn: t % 10 == turn."
        )


RENAMED = {"flat": "elementwise", "tail": "reads_new_params", "stack": "batched"}
"""Arguments of `leafwise` that had other names."""


def _check_renamed(name: str, given: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that there are not."""
    for old in given:
        advice = f"it is called {RENAMED[old]}" if old in RENAMED else "check the spelling"
        raise TypeError(f"leafwise got the argument {old} for the rule {name!r}; {advice}.")


@factory
def identity() -> Leafwise:
    """The transformation that changes nothing; what a rule with a zero coefficient becomes.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.identity()
        >>> w = torch.ones(2)
        >>> tx.update(torch.tensor([2.0, 4.0]), tx.init(w), w)[0]
        tensor([2., 4.])
    """
    return Leafwise(())
