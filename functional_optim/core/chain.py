"""Composition of transformations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from torch import Tensor

from functional_optim import tree
from functional_optim.core import base
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.lift import freezes
from functional_optim.core.paths import Choice, check_choices, chosen, subtree
from functional_optim.core.rule import Placement, Rule, unchanged
from functional_optim.core.state_keys import check_rates, rule_names
from functional_optim.core.totals import pass_over


@factory
def chain(*transforms: base.GradientTransformation) -> base.GradientTransformation:
    """Apply transformations one after the other.

    Nested chains are flattened. Adjacent transformations that consist of one-tensor rules are
    fused: they share one step count and become one kernel. A chain of only these has a `State`;
    otherwise the state is a tuple with one entry per fused part or other transformation.

    Args:
        transforms: transformations, applied from first to last. Without any, the chain is the
            identity.

    Returns:
        A transformation. Its `update` takes the extra arguments of all parts, and passes each part
        those that it declares; others raise an error.

    Raises:
        TypeError: if an argument is not a `GradientTransformation`.
        ValueError: if two parts have slots of the same name and are not named, a part that
            reads the updated parameters is not the last, two parts multiply the updates of one leaf
            by a learning rate, or a part comes before one that reads no gradients.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.clip_by_global_norm(1.0), fo.adam(lr=1e-2))
        >>> params = {"w": torch.ones(2)}
        >>> updates, state = tx.update({"w": torch.tensor([3.0, -4.0])}, tx.init(params), params)
        >>> updates
        {'w': tensor([-0.0100,  0.0100])}
    """
    parts: list[base.GradientTransformation] = []
    run: list[Leafwise] = []
    for part in [part for tx in transforms for part in _parts(tx)]:
        if isinstance(part, Leafwise):
            run.append(part)
        else:
            parts += [*_joined(run), part]
            run = []
    parts += _joined(run)
    if not parts:
        return Leafwise(())
    if len(parts) == 1:
        return parts[0]
    for x in _unread(parts):
        raise ValueError(
            f"{x.name or 'a rule'} has no effect before a method for residuals or values, which "
            "reads no gradients; put it after that, or leave it out."
        )
    freezing = freezing_rules(*parts)
    return MixedChain(tuple([without(freezing, part) for part in parts] if freezing else parts))


def _joined(run: list[Leafwise]) -> list[base.GradientTransformation]:
    """Adjacent parts fused, without those that do nothing."""
    some = [part for part in run if part.placements]
    if len(some) < 2:
        return [*some]
    return [Leafwise(tuple([x for part in some for x in part.placements]))]


@factory
def named_chain(*named: tuple[str, base.GradientTransformation]) -> base.GradientTransformation:
    """`chain` with a name for each part, to distinguish slots of the same name.

    Args:
        named: pairs of a name and a transformation. The names must differ.

    Returns:
        A transformation. If two parts have a slot of the same name, e.g. `momentum_buffer`, the
        state has `fast.momentum_buffer` and `slow.momentum_buffer`.

    Raises:
        ValueError: if two parts have the same name.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.named_chain(("fast", fo.trace(0.5)), ("slow", fo.trace(0.9)))
        >>> sorted(tx.init(torch.ones(2)).slots)
        ['fast.momentum_buffer', 'slow.momentum_buffer']
    """
    if not all(type(x) is tuple and len(x) == 2 and isinstance(x[0], str) for x in named):
        raise TypeError(
            'named_chain takes pairs of a name and a transformation: named_chain(("first", trace('
            '0.5)), ("second", trace(0.9))); of a dict d pass *d.items().'
        )
    names = [name for name, _ in named]
    if len(set(names)) != len(names):
        raise ValueError(f"named_chain needs different names, but got {names}.")
    return chain(*[_rename(name, tx) for name, tx in named])


class MixedChain(base.GradientTransformation):
    """A chain whose parts cannot all be fused. parts: the transformations, in order."""

    parts: tuple[base.GradientTransformation, ...]

    def __new__(cls, parts: tuple[base.GradientTransformation, ...]) -> MixedChain:
        _check_order(parts)
        known = [part.extra for part in parts]
        every = tuple([name for names in known for name in names])

        def init(params: Any) -> tuple[Any, ...]:
            return tuple([part.init(params) for part in parts])

        def update(
            grads: Any, state: tuple[Any, ...], params: Any = None, **extra: Any
        ) -> tuple[Any, tuple[Any, ...]]:
            base.check_extra(extra, every)
            if grads is None and params is not None:  # for methods with residuals
                grads = tree.map(lambda _: None, params)
            if len(state) != len(parts):
                raise ValueError(
                    f"chain of {len(parts)} parts got a state of length {len(state)}; pass the "
                    "state that this chain's own init returned."
                )
            new = []
            for part, mine, names in zip(parts, state, known, strict=True):
                chosen = {name: extra[name] for name in names if name in extra}
                found = part.update(grads, mine, params, **chosen)
                if not isinstance(found, tuple) or len(found) != 2:
                    raise TypeError(
                        "update of a transformation in this chain returned a "
                        f"{type(found).__name__}; return a pair: the updates and the new state."
                    )
                grads, mine = found
                new.append(mine)
            return grads, tuple(new)

        self = super().__new__(cls, init, update)
        self.parts = parts
        return self

    @property
    def children(self) -> tuple[base.GradientTransformation, ...]:
        return self.parts

    def _own_extra(self, *, required: bool) -> tuple[str, ...]:
        return ()

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.parts,)


class Wrapped(base.GradientTransformation):
    """A transformation of trees, around another one, which gets its extra arguments.

    inner: the other one. spared: the selection of leaves that are frozen, and not passed to it.
    choices: those that are; all, if empty. name: that of `named_chain`.
    """

    inner: base.GradientTransformation
    spared: tuple[Any, ...]
    choices: tuple[Choice, ...]
    name = ""

    def __new__(
        cls,
        init: Callable[[Any], Any],
        update: Callable[..., tuple[Any, Any]],
        inner: base.GradientTransformation,
        spared: tuple[Any, ...] = (),
        choices: tuple[Choice, ...] = (),
    ) -> Self:
        self = super().__new__(cls, init, update)
        self.inner = inner
        self.spared = spared
        self.choices = choices
        return self

    @property
    def children(self) -> tuple[base.GradientTransformation, ...]:
        return (self.inner,)

    def _seen(self) -> list[Placement]:
        """The rules inside, as a chain around it sees them."""
        found = [x.on(*self.choices) for x in _rules_of(self.inner)]
        return [x._replace(name=f"{self.name}.{x.name}") for x in found] if self.name else found

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.init, self.update, self.inner, self.spared, self.choices


class WithoutGradients(base.GradientTransformation):
    """A transformation of trees that reads no gradients: they may all be `None`."""

    @property
    def reads_gradients(self) -> bool:
        return False


def ignores_gradients(tx: base.GradientTransformation) -> bool:
    """Whether no update depends on the gradients."""
    if isinstance(tx, MixedChain):  # behind a gate they may pass
        return any(map(ignores_gradients, tx.parts)) and not _unread(tx.parts)
    if isinstance(tx, Wrapped):
        return len(tx.choices) == 0 and ignores_gradients(tx.inner)
    return isinstance(tx, WithoutGradients)


def _unread(parts: Sequence[base.GradientTransformation]) -> list[Placement]:
    """The rules before a part that ignores gradients, without those that only measure or freeze."""
    blind = [k for k, part in enumerate(parts) if ignores_gradients(part)]
    before = [x for part in parts[: max([0, *blind])] for x in _rules_of(part)]
    changing = [x for x in before if x.rule.updates != (unchanged,) and x.rule.name != "monitor"]
    return [x for x in changing if not freezes(x)]


def on_some(
    acts: Callable[[str, Tensor], bool],
    tx: base.GradientTransformation,
    spared: tuple[Any, ...] = (),
    choices: tuple[Choice, ...] = (),
) -> base.GradientTransformation:
    """A transformation of some leaves: it gets a tree in which the others are None.

    acts: whether it applies to a leaf, from its path and the leaf. choices: the masks, for a
    warning of patterns without matches.
    """

    def cut(params: Any, *trees: Any) -> list[Any]:
        def kept(path: str, p: Tensor, x: Any) -> Any:
            return x if acts(path, p) else None

        return [tree.map_with_path(kept, params, x) for x in (params, *trees)]

    def init(params: Any) -> Any:
        base.check_params(params)
        (mine,) = cut(params)
        check_choices((choices, dict(tree.items(params))))
        with subtree():
            return tx.init(mine) if tree.leaves(mine) else base.EmptyState()

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        base.check_extra(extra, known)
        base.check_passed(params)

        def joined(path: str, p: Tensor, g: Any, u: Any) -> Any:
            return u if acts(path, p) else None if spared else g  # the spared are frozen

        if grads is None and not tx.reads_gradients:
            grads = tree.map(lambda _: None, params)
        base.check_structure(params, grads)
        mine, given = cut(params, grads)
        extra = narrowed(extra, params, filled(params), lambda x: cut(params, x)[1])
        if not tree.leaves(mine):
            pass_over(tx.placements)
            return tree.map_with_path(joined, params, grads, grads), state
        updates, state = tx.update(given, state, mine, **extra)
        return tree.map_with_path(joined, params, grads, updates), state

    def filled(params: Any) -> Callable[[Any], Any]:
        """A function that adds the leaves to which tx does not apply."""

        def fill(mine: Any) -> Any:
            return tree.map_with_path(lambda path, p, x: x if acts(path, p) else p, params, mine)

        return fill

    known = tx.extra
    return Wrapped(init, update, tx, spared, choices)


def narrowed(
    extra: dict[str, Any], params: Any, fill: Callable[[Any], Any], cut: Callable[[Any], Any]
) -> dict[str, Any]:
    """The extra arguments of a transformation of a part, or a form, of the tree of parameters.

    fill: from parameters as the transformation gets them to the tree. cut: from a tree to what the
    transformation gets.
    """

    def fitting(grads: Any) -> Any:
        base.check_structure(params, grads)
        return cut(grads)

    def pair(found: Any) -> Any:
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor):
            return found[0], fitting(found[1])
        return found  # the transformation raises an error

    changes = {"residual_fn": None, "value_fn": None, "grad_fn": fitting, "value_and_grad": pair}
    new = {name: completed(x, fill, changes[name]) for name, x in extra.items() if name in changes}
    if "grad" in extra:
        new["grad"] = fitting(extra["grad"])
    return {**extra, **new}


def completed(fn: Any, fill: Callable[[Any], Any], change: Any = None) -> Any:
    """A function of all parameters as a function of some of them.

    fill: adds the other parameters. change: of the results; None: they stay, and the function keeps
    its declared structure.
    """
    if change is None and hasattr(fn, "over"):
        return fn.over(fill)
    if not callable(fn):
        return fn
    return lambda params: fn(fill(params)) if change is None else change(fn(fill(params)))


def check_moved(grads: Any, updates: Any) -> None:
    """Raise ValueError if a transformation returned an update for a leaf without a gradient."""
    tree.check_same(
        grads,
        updates,
        "gradients",
        "updates of the transformation inside",
        "pass zeros for a leaf without a gradient, or freeze it; a custom transformation must "
        "return None for it",
        shapes=False,
    )


def each_placement(
    tx: Any,
    change: Callable[[Placement], Sequence[Placement]],
    other: Callable[[Any], Any] = lambda part: part,
) -> Any:
    """A transformation whose placements are replaced. other: changes the parts that do not consist
    of one-tensor rules; by default they are unchanged."""
    if isinstance(tx, Leafwise):
        return Leafwise(tuple([new for x in tx.placements for new in change(x)]))
    if isinstance(tx, MixedChain):
        return chain(*[each_placement(part, change, other) for part in tx.parts])
    return other(tx)


def choices_of(tx: base.GradientTransformation) -> list[Choice]:
    """The selections of leaves in a transformation, if it consists of one-tensor rules."""
    own = [part for part in _parts(tx) if isinstance(part, Leafwise)]
    return [choice for part in own for x in part.placements for choice in x.choices()]


def freezing_rules(*parts: base.GradientTransformation) -> tuple[Placement, ...]:
    """The rules of a chain's parts that freeze leaves for the whole chain."""
    known = [x for part in parts for x in _rules_of(part) if freezes(x)]
    places = [x.where for x in known]
    return tuple([x._replace(gate=0) for i, x in enumerate(known) if x.where not in places[:i]])


UNKNOWN = Placement(Rule((unchanged,)))
"""What stands for a transformation of trees of which no rules are known."""


def _rules_of(tx: base.GradientTransformation) -> list[Placement]:
    """The rules of a transformation, also those inside of transformations of trees."""
    if isinstance(tx, Leafwise):
        return [*tx.placements]
    if isinstance(tx, MixedChain):
        return [x for part in tx.parts for x in _rules_of(part)]
    return tx._seen() if isinstance(tx, Wrapped) else [UNKNOWN]


def is_custom(tx: base.GradientTransformation) -> bool:
    """Whether it consists of transformations of trees of which no rules are known."""
    rules = _rules_of(tx)
    return len(rules) > 0 and all(x.rule is UNKNOWN.rule for x in rules)


def _check_order(parts: Sequence[base.GradientTransformation]) -> None:
    """Raise ValueError if parts change what must be last on a leaf, or have two learning rates."""
    rules = [(k, x) for k, part in enumerate(parts) for x in _rules_of(part) if not freezes(x)]
    names = rule_names([x for _, x in rules])
    known = list(zip([k for k, _ in rules], names, strict=True))
    for k, first in known:
        later = [x for j, x in known if j > k and not first.apart_from(x)]
        if first.master and later:
            raise ValueError(
                f"{later[0].name or 'a transformation of trees'} comes after master_weights, whose "
                "update is rounded for the parameters; put it before, or leave master_weights out."
            )
        if first.after == "step" and any(x.after != "step" for x in later):
            raise ValueError(
                f"a transformation follows {first.name}, which reads the parameters after the "
                f"update; put {first.name} last in the chain."
            )
    check_rates(names)


def without(freezing: tuple[Placement, ...], part: Any) -> Any:
    """A part of a chain without the leaves that the chain freezes."""
    if isinstance(part, Leafwise):
        known = [placement.where for placement in part.placements if freezes(placement)]
        missing = [placement for placement in freezing if placement.where not in known]
        return Leafwise((*missing, *part.placements)) if missing else part
    places = tuple([placement.where for placement in freezing])
    if isinstance(part, Wrapped):
        known = [*part.spared, *[placement.where for placement in freezing_rules(part)]]
        if all(place in known for place in places):
            return part

    def acts(path: str, p: Tensor) -> bool:
        return not any(chosen(where, path, p) for where in places)

    return on_some(acts, part, places)


def _parts(tx: base.GradientTransformation) -> tuple[base.GradientTransformation, ...]:
    base.check_transformation("chain", tx, "chain(clip_by_global_norm(1.0), adam())")
    return tx.parts if isinstance(tx, MixedChain) else (tx,)


def _rename(name: str, tx: base.GradientTransformation) -> base.GradientTransformation:
    if isinstance(tx, Leafwise):
        if len(tx.placements) == 1:
            return Leafwise((tx.placements[0]._replace(name=name),))
        joined = [x._replace(name=f"{name}.{x.name}" if x.name else name) for x in tx.placements]
        return Leafwise(tuple(joined))
    if isinstance(tx, MixedChain):
        return MixedChain(tuple([_rename(name, part) for part in tx.parts]))
    if isinstance(tx, Wrapped):
        tx = type(tx)(*tx.__getnewargs__())
        tx.name = name
    return tx
