"""`leafwise`: a transformation of trees from a rule for one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base
from functional_optim.core.calls import check_choice, takes
from functional_optim.core.factory import factory
from functional_optim.core.lift import lift, part_of, route
from functional_optim.core.numbers import Numbers, as_args
from functional_optim.core.returned import checked_sums
from functional_optim.core.rule import Placement, Reads, Rule, Runs, Update, constants
from functional_optim.core.state_keys import Layout, lay_out
from functional_optim.core.storage import Storage
from functional_optim.kernels.callers import warn
from functional_optim.kernels.keys import are_own


class Leafwise(base.GradientTransformation):
    """A transformation that consists of one-tensor rules, so it can be fused and compiled.

    layout: the names of the slots and carried scalars of its rules. parts: selections of leaves,
    with the indices of their rules.

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
        """Each rule, with the keys of its slots and of its carried scalars."""
        keys = zip(self._placements, self.layout.slots, self.layout.carry, strict=True)
        return [(placement.rule, slots, carry) for placement, slots, carry in keys]

    @property
    def carried(self) -> dict[str, Any]:
        """The initial value of each carried scalar, by key."""
        return {
            key: first
            for rule, _, keys in self.rules
            for key, first in zip(keys, rule.carry or (), strict=True)
        }

    @property
    def communicates(self) -> bool:
        return any(placement.reduce_groups for placement in self._placements)

    def _own_extra(self, *, required: bool) -> tuple[str, ...]:
        rules = [placement.rule for placement in self._placements if placement.rule.reads.extra]
        known = [base.extra_names(cast("Any", rule.scalars), required=required) for rule in rules]
        pairs = zip(rules, known, strict=True)
        return tuple([name for rule, names in pairs for name in rule.reads.extra if name in names])

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
    who: str,
    tx: Any,
    advice: str = "apply it to the parts that are, before chaining them",
    example: str | None = None,
) -> Leafwise:
    """The transformation; raises TypeError, with the name of the caller, for one of trees.

    example: a right call.
    """
    base.check_transformation(who, tx, example or f"{who}(adam(lr=1e-3), ...)")
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
    carry: Any = None,
    hyper: Mapping[str, numeric.Hyper | tuple[numeric.Hyper, ...]] | None = None,
    runs: Runs = Runs(),
    storage: Storage = Storage(),
    name: str = "",
    **old: Any,
) -> Leafwise:
    """Lift a rule for one tensor to a transformation of trees.

    The operations of a rule determine how it runs: element-wise, with reductions over rows, columns
    or whole tensors, or with matrix products. They are recorded when the rule first runs.

    Args:
        init: `init(p)` returns the tensor's slots, a NamedTuple of tensors of any shapes and
            dtypes (`None` for a slot that this tensor does not need). It is also called with
            tensors without data, to determine the shapes and dtypes. `None` for a rule without
            slots.
        update: `update(u, slots, p, *numbers)` returns `(u, slots)`. It may only use operations on
            tensors, in place only on tensors that it has created. It may close over bools, strings
            and ints, but not over a number that may change: return such numbers from `scalars`.
            Half types are converted to float32, complex tensors to real pairs (with a last
            dimension of size 2, so that a norm over `dim=-1` is that of a pair), and slots of
            float64 to float32 unless the parameter is of float64; slots are cast back to their
            dtype automatically. Several of them, variants of one rule, if `runs` has
            `choose`.
        scalars: `scalars(t)` returns the values that all tensors share at step t, which starts at
            1: a NamedTuple, which `update` gets as one argument, or a plain tuple, whose entries
            are separate arguments. `t` is a float, or a 0-dim float64 tensor; for functions of it
            use `functional_optim.numeric`. With `carry` and `reduce` it is called as `scalars(t,
            carry, total)`. Its keyword-only parameters are hyperparameters, with their values at
            step t, and extra arguments of `update`; with `**` it gets all hyperparameters.
        reduce: `reduce(u, slots, p, *numbers)` measures one tensor: a tuple of 0-dim tensors.
            They are summed over all parameters in float64 and passed to `scalars` as `total`.
            Without `scalars`, `update` gets the totals. In `update` a total or a scalar is a Python
            float or a 0-dim tensor: use operators, e.g. `total**0.5`. Compute measurements of a
            single tensor, such as its norm, in `update`.
        before: `before(t[, carry])` returns the scalars that `reduce` needs; it may take
            hyperparameters by name.
        carry: a NamedTuple of numbers, the initial values of scalars that are carried from step to
            step. `scalars` then returns `(numbers, carry)`. A float is stored in torch's default
            dtype, as in torch.optim. An int marks a count, which is stored in float64: exact up to
            2^53.
        hyper: the hyperparameters by torch's names: floats, 0-dim tensors, schedules, or tuples of
            these. `scalars` takes them by name, and `fo.get` finds their values in the state, those
            of a tuple as `betas.0`, `betas.1`.
        runs: when and how the rule runs: see `Runs`. Default: in every step, for each tensor
            separately.
        storage: the kinds of slots, and their storage: see `Storage`. Default: all are linear in
            the gradients, such as momentum, and stored unchanged.
        name: distinguishes rules with the same slot names.
        old: arguments that are now fields of `runs` and `storage`, or no longer needed. They work,
            with a DeprecationWarning.

    Returns:
        A `GradientTransformation` whose `update` also takes the extra arguments of `scalars`.

    Raises:
        TypeError: at once, if `init` returns something other than a NamedTuple, or for an unknown
            argument.
        ValueError: at the first use, if `update` writes into its arguments, reads a value of a
            tensor, draws random numbers, or closes over a tensor, or if its operations contradict
            `Runs(batched=True)`.
        ValueError: at once, if a rule that takes batches has codecs or reads new parameters, one
            that has `absent` is not shared or carries nothing, there are variants without `choose`
            or the reverse, `turns` without a `choose` that takes a turn or the reverse, a codec
            for an unknown slot, or one that would be nonnegative or weights, or
            hyperparameters without a function that takes some.

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
    if not isinstance(name, str):
        raise TypeError(
            f"name of a rule must be a string, but got {name!r}; pass e.g. name='my_rule'."
        )
    first = update[0] if isinstance(update, (tuple, list)) and update else update
    shown = name or getattr(first, "__name__", "")  # in errors
    others = {"init": init, "scalars": scalars, "reduce": reduce, "before": before}
    _check_functions(shown, update, others, hyper, plain=carry is None and reduce is None)
    updates = (update,) if callable(update) else tuple(update)
    if old:
        updates, runs, storage = _translated(shown, old, updates, runs, storage)
    if not isinstance(runs, Runs) or not isinstance(storage, Storage):
        raise TypeError(
            f"the rule {shown!r} got runs={runs!r} and storage={storage!r}; pass a "
            "functional_optim.Runs and a functional_optim.Storage."
        )
    if carry is not None and not hasattr(carry, "_fields"):
        raise TypeError(
            f"carry of the rule {shown!r} must be a NamedTuple of numbers, but got a "
            f"{type(carry).__name__}; write class Carry(NamedTuple) and pass Carry(0.0)."
        )
    if init is not None:
        storage = storage._replace(slots=_slots_of(shown, init))
    _check_runs(shown, runs, len(updates), carry, hyper or {})
    _check_storage(shown, runs, storage)
    if runs.batched or storage.codecs:
        runs = runs._replace(dense_only=True)
    known = tuple((hyper or {}).items())
    named = () if scalars is None else base.extra_names(scalars)
    if scalars is not None and base.takes_any(scalars):
        named = (*named, *[key for key, _ in known if key not in named])
    given = {key: value for key, value in known if key in named}
    extra = tuple([x for x in named if x not in (hyper or {})])
    if known and init is None and scalars is None and before is None and runs.choose is None:
        raise ValueError(
            f"hyper of the rule {shown!r} lists {', '.join([key for key, _ in known])}, but it has "
            "no function that takes hyperparameters, so a change would have no effect; write "
            "scalars(t, *, lr), or leave hyper out."
        )
    plain = carry is None and reduce is None and runs.choose is None and not extra
    reads = Reads(tuple(given.items()), constants(given), extra, plain)
    functions = (*updates, reduce, runs.absent, *(runs.start or ())[:1])
    own = not torch.compiler.is_compiling() and are_own(functions)
    rule = Rule(
        updates, init, scalars, reduce, before, carry, known, reads, runs, storage, shown, own
    )
    return Leafwise((Placement(rule, name),))


def _check_functions(
    name: str, update: Any, others: dict[str, Any], hyper: Any, *, plain: bool
) -> None:
    """Raise TypeError for anything but functions, and a dict of hyperparameters.

    others: the functions besides update, by their names. plain: whether `scalars` takes the step
    and hyperparameters only.
    """
    updates = update if isinstance(update, (tuple, list)) and update else (update,)
    if not all(map(callable, updates)):
        raise TypeError(
            f"the rule {name!r} needs update, a function (u, slots, p, *scalars), or a tuple of "
            f"such variants, but got {update!r}."
        )
    init, scalars = others["init"], others["scalars"]
    for what, fn in others.items():
        if fn is not None and not callable(fn):
            raise TypeError(
                f"{what} of the rule {name!r} must be a function or None, but got {fn!r}."
            )
    if hyper is not None and not isinstance(hyper, Mapping):
        raise TypeError(
            f"hyper of the rule {name!r} must be a dict from names to hyperparameters, but got "
            f"{hyper!r}."
        )
    if torch.compiler.is_compiling():
        return
    if init is not None and not takes(init, None):
        raise TypeError(
            f"init of the rule {name!r} is called with one argument, the parameter; write init(p)."
        )
    extra = base.extra_names(scalars) if scalars is not None else ()
    if scalars is not None and plain and not takes(scalars, 1, **dict.fromkeys(extra)):
        raise TypeError(
            f"scalars of the rule {name!r} is called with the step, t = 1 at the first, and "
            "hyperparameters by name; write scalars(t, *, lr)."
        )


FLOAT32: Any = {"dtype": torch.float32, "device": "cpu"}
"""As what `init` is tried, whatever the default is."""


def _slots_of(name: str, init: Callable[[Tensor], Any]) -> Any:
    """The NamedTuple that `init` of a rule returns."""
    try:
        probe = init(torch.zeros((1, 1), **FLOAT32))
    except Exception as error:
        try:
            probe = init(torch.zeros((1, 1, 1, 1), **FLOAT32))  # a kernel of a convolution
        except Exception:
            raise TypeError(
                f"init of the rule {name!r} failed for a tensor of shape (1, 1), which is how its "
                f"slots are found ({type(error).__name__}: {error}); let it return slots for any "
                "shape, with None for those that a tensor does not need."
            ) from error
    if not hasattr(probe, "_fields"):
        raise TypeError(
            f"init of the rule {name!r} returned a {type(probe).__name__}; return a NamedTuple "
            "of tensors, or pass init=None for a rule without slots."
        )
    for field, x in zip(probe._fields, probe, strict=True):
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(
                f"init of the rule {name!r} returned a {type(x).__name__} for the slot {field!r}; "
                "return a tensor, e.g. torch.zeros_like(p), or None where a parameter has no such "
                "slot. A number for all parameters belongs into carry."
            )
    return type(probe)


def _check_runs(name: str, runs: Runs, variants: int, carry: Any, hyper: Mapping[str, Any]) -> None:
    """Raise ValueError for fields of `runs` that contradict each other or the rule."""
    choose, turns, absent = runs.choose, runs.turns, runs.absent
    who = f"the rule {name!r}"
    if (choose is None) != (variants == 1):
        raise ValueError(
            f"{who} has {variants} variants of update and {'no ' if choose is None else ''}choose; "
            "pass several variants and a function that chooses one of them, or a single update and "
            "none."
        )
    check_choice(who, (None, "lr", "step"), after=runs.after)
    if absent is not None and turns is not None:
        raise ValueError(
            f"{who} has `absent` and turns, but a tensor without a gradient takes no turn; leave "
            "one of them out."
        )
    if absent is not None and (carry is None or not runs.shared):
        raise ValueError(
            f"{who} has `absent`, whose numbers must be there for tensors that do not step; pass a "
            "carry and shared=True, or leave absent out."
        )
    if torch.compiler.is_compiling():
        return  # Dynamo does not support the defaults of a function
    if turns is None:
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


def _check_storage(name: str, runs: Runs, storage: Storage) -> None:
    """Raise ValueError for unknown slots, or slots that cannot be stored in this format."""
    fields, codecs = storage.fields, storage.codecs
    who, own = f"the rule {name!r}", ", ".join(fields) or "none"
    if runs.start is not None and not (
        runs.batched and runs.start[1] and set(runs.start[1]) <= set(fields)
    ):
        raise ValueError(
            f"{who} has a start, which needs batched=True and names of slots; its slots are {own}."
        )
    if runs.batched and (codecs or runs.after == "step"):
        raise ValueError(
            f"{who} takes batches of tensors, so it can have no codecs, and cannot run "
            "after='step'; put what needs them into another rule, and chain the two."
        )
    if unknown := sorted(set(codecs) - set(fields)):
        raise ValueError(f"{who} has a codec for {', '.join(unknown)}, but its slots are {own}.")
    for kind, named in (("nonnegative", storage.nonnegative), ("weights", storage.weights)):
        if unknown := sorted(set(named) - set(fields)):
            raise ValueError(
                f"{who} says that {', '.join(unknown)} is {kind}, but its slots are {own}."
            )


NEEDLESS = "leave it out: what a rule is follows from its operations"

OLD = {
    **dict.fromkeys(("choose", "turns", "shared", "absent", "batched", "dense_only"), "Runs"),
    **dict.fromkeys(("codecs", "nonnegative", "weights"), "Storage"),
    "reads_new_params": "pass runs=functional_optim.Runs(after='step')",
    "scales_step": "pass runs=functional_optim.Runs(after='lr')",
    "measure": "compute these sums in update",
    "elementwise": NEEDLESS,
}
"""The arguments of 0.2, and their replacements."""

OLDER = {"flat": NEEDLESS, "tail": OLD["reads_new_params"], "stack": "pass Runs(batched=True)"}
"""Arguments that are refused."""


def _translated(
    name: str, old: dict[str, Any], updates: tuple[Update, ...], runs: Runs, storage: Storage
) -> tuple[tuple[Update, ...], Runs, Storage]:
    """Convert arguments of 0.2 to the current ones.

    Raises:
        TypeError: for an unknown argument.
        ValueError: for a measure of a rule that takes batches, which would sum over all of them.
    """
    for key in old:
        if key not in OLD:
            advice = OLDER.get(key, "check the spelling")
            raise TypeError(f"leafwise got the argument {key} for the rule {name!r}; {advice}.")
        place = OLD[key]
        if place in ("Runs", "Storage"):
            place = f"pass {place.lower()}=functional_optim.{place}({key}=...)"
        if not torch.compiler.is_compiling():
            warn(f"leafwise(..., {key}=...) is deprecated; {place}.", DeprecationWarning)
    runs = runs._replace(**{key: x for key, x in old.items() if OLD[key] == "Runs"})
    storage = storage._replace(**{key: x for key, x in old.items() if OLD[key] == "Storage"})
    storage = storage._replace(codecs=storage.codecs or {})
    if old.get("reads_new_params") or old.get("scales_step"):
        runs = runs._replace(after="step" if old.get("reads_new_params") else "lr")
    measure = old.get("measure")
    if measure is not None and runs.batched:
        raise ValueError(
            f"the rule {name!r} takes batches of tensors, so it can have no measure; compute in "
            "update what is summed over each of them."
        )
    if measure is not None:
        updates = tuple([partial(_measured, x, measure) for x in updates])
    return updates, runs, storage


def _measured(
    update: Update, measure: Callable[..., Any], u: Tensor, slots: Any, *given: Any
) -> tuple[Any, Any]:
    """An update with the measurements of the tensor as further arguments."""
    found = checked_sums("measure", measure(u, slots, *given))
    return update(u, slots, *given, *as_args(found))


@factory
def identity() -> Leafwise:
    """The transformation that changes nothing, e.g. for a rule with a zero coefficient.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.identity()
        >>> w = torch.ones(2)
        >>> tx.update(torch.tensor([2.0, 4.0]), tx.init(w), w)[0]
        tensor([2., 4.])
    """
    return Leafwise(())
