"""Write the rule for one tensor; this file lifts it to trees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import base, numeric, sharded, tree
from functional_optim.layout import Layout, lay_out
from functional_optim.paths import chosen
from functional_optim.progress import Caster, Progress, over_groups, sum_parts
from functional_optim.rules import (
    Leaf,
    Link,
    Numbers,
    Slots,
    check_part,
    init_slots,
    measure,
    run_all_stored,
    run_rows,
)


class State(NamedTuple):
    """The state of a fused chain.

    step: 0-dim int64, the number of finished steps.
    carry: dict of 0-dim tensors, the numbers that recur from step to step.
    slots: dict of trees like the parameters, by slot name.
    hyper: dict of 0-dim float64 tensors, the hyperparameters of the last step, or of the first
        before it. For reading, with `fo.get`: writing to them changes nothing.
    """

    step: Tensor
    carry: dict[str, Tensor]
    slots: dict[str, Any]
    hyper: dict[str, Tensor]


class Leafwise(base.GradientTransformation):
    """A transformation made of nothing but one-tensor rules, so it can be fused and compiled.

    links: the rules, in order. layout: the names of what they keep. meets: does a link sum what it
    measures over processes? All of them then go on, whatever gradients there are here.
    """

    links: tuple[Link, ...]
    layout: Layout
    meets: bool
    parts: dict[tuple[int, ...], Leafwise]

    def __new__(cls, links: tuple[Link, ...], layout: Layout | None = None) -> Leafwise:
        layout = lay_out(links) if layout is None else layout
        self = super().__new__(cls, *_lift(links, layout))
        self.links = links
        self.layout = layout
        self.meets = any(link.over for link in links)
        self.parts = {}
        return self

    def on(self, path: str, leaf: Any) -> Leafwise | None:
        """What acts on one leaf; None if the leaf is frozen."""
        if not self.layout.routed:
            return self
        places = route(self.links, path, leaf)
        if places is None:
            return None
        part = self.parts.get(places)
        if part is None:
            part = self.parts[places] = Leafwise(*_part(self.links, self.layout, places))
        return part

    def __repr__(self) -> str:
        return f"chain({', '.join(link.name or '?' for link in self.links)})"


def frozen(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor, Any]:
    """The update of a link that takes its leaves out of everything."""
    return u, slots


def route(links: tuple[Link, ...], path: str, leaf: Any) -> tuple[int, ...] | None:
    """Which links act on a leaf; None if it is frozen."""
    places = [i for i, link in enumerate(links) if chosen(link.where, path, leaf)]
    return None if any(links[i].update is frozen for i in places) else tuple(places)


def everywhere(links: tuple[Link, ...], layout: Layout) -> tuple[Link, ...]:
    """A chain's links as a leaf would see them on which all of them act."""
    return _part(links, layout, tuple(range(len(links))))[0]


def _part(
    links: tuple[Link, ...], layout: Layout, places: tuple[int, ...]
) -> tuple[tuple[Link, ...], Layout]:
    """Some of a chain's links, and the names that they have in the whole."""
    mine = []
    for at, i in enumerate(places):
        gate, back = links[i].gate, links[i].back
        if back is not None:
            back = sum([i - back <= j < i for j in places])
        gate = at - places.index(i - gate) if gate else 0
        mine.append(links[i]._replace(where=(), gate=gate, back=back))
    return tuple(mine), layout.pick(places)


def leafwise(
    init: Callable[[Tensor], Any] | None,
    update: Callable[..., tuple[Any, Any]],
    scalars: Callable[..., Any] | None = None,
    *,
    reduce: Callable[..., tuple[Any, ...]] | None = None,
    before: Callable[..., Numbers] | None = None,
    carry: Any = None,
    flat: bool = True,
    tail: bool = False,
    shared: bool = False,
    stack: bool = False,
    name: str = "",
    hyper: Mapping[str, numeric.Hyper] | None = None,
) -> Leafwise:
    """Lift a rule for one tensor to a transformation of trees.

    Args:
        init: `init(p)` returns the tensor's slots, a NamedTuple of tensors (`None` for a slot that
            this tensor does not need). `None` for a rule without slots.
        update: `update(u, slots, p, *numbers)` returns `(u, slots)`. Operations on tensors only, no
            in-place ones. It may close over bools, strings and ints, never over a number that may
            change: those come in as `numbers`. Half types arrive as float32, complex tensors as
            real pairs; slots go back to their own dtype by themselves.
        scalars: `scalars(t)` returns the tuple of numbers that all tensors share at step t, which
            is 1 at the first. `t` is a float, or a 0-dim float64 tensor; for functions of it use
            `functional_optim.numeric`. With `carry` and `reduce` it is called as
            `scalars(t, carry, total)`. Its keyword-only parameters are the extra arguments of
            `update` that it reads.
        reduce: `reduce(u, slots, p, *numbers)` measures one tensor: a tuple of 0-dim tensors.
            They are summed over the whole tree in float64 and handed to `scalars` as `total`.
            Without `scalars`, `update` gets the totals themselves.
        before: `before(t[, carry])` returns the numbers that `reduce` needs.
        carry: a NamedTuple of floats, the first values of numbers that recur. `scalars` then
            returns `(numbers, carry)`. Kept in torch's default dtype, as torch.optim keeps them.
        flat: may the rule see a tensor as 1-D? True for elementwise rules. A rule that looks at
            rows, columns or means must say False.
        tail: True for a rule that reads the parameter *after* the update (it gets it as `p`, and
            must return `u` as it came). Only tails may follow it.
        shared: one carry for all tensors of an optimizer, however late they joined.
        stack: True for a rule without slots that takes several tensors of one shape at once: `u`
            may have one more dimension in front, and `p` is None then. For products of matrices,
            which are faster in batches.
        name: tells two rules with the same slot names apart.
        hyper: the hyperparameters that `scalars` reads, by torch's names. `fo.get` finds their
            values in the state.

    Returns:
        A `GradientTransformation` whose `update` also takes the extra arguments of `scalars`.

    Raises:
        TypeError: at once, if `init` returns something other than a NamedTuple.
        ValueError: at once, if a rule that takes stacks has slots.

    Example::

        >>> import torch, functional_optim as fo
        >>> from typing import NamedTuple
        >>> class SignSlots(NamedTuple):
        ...     exp_avg: torch.Tensor
        >>> def signum(lr=1e-2, beta=0.9):
        ...     def init(p):
        ...         return SignSlots(torch.zeros_like(p))
        ...     def scalars(t):
        ...         return lr, 1 - beta
        ...     def update(g, slots, p, lr, a):
        ...         m = slots.exp_avg + a * (g - slots.exp_avg)
        ...         return -lr * m.sign(), SignSlots(m)
        ...     return fo.leafwise(init, update, scalars)
        >>> tx = signum()
        >>> w = torch.ones(2)
        >>> updates, state = tx.update(torch.tensor([1.0, -1.0]), tx.init(w), w)
        >>> updates
        tensor([-0.0100,  0.0100])
        >>> state.slots["exp_avg"]
        tensor([ 0.1000, -0.1000])
    """
    slots = None
    if init is not None:
        probe = init(torch.zeros((1, 1), device="cpu"))
        if not hasattr(probe, "_fields"):
            raise TypeError(
                f"init of the rule {name!r} returned a {type(probe).__name__}; return a NamedTuple "
                "of tensors, or pass init=None for a rule without slots."
            )
        slots = type(probe)
        if stack and slots._fields:
            raise ValueError(
                f"the rule {name!r} takes stacks of tensors but has slots; keep them in another "
                "rule, and chain the two."
            )
    return Leafwise(
        (
            Link(
                init=init,
                update=update,
                scalars=scalars,
                reduce=reduce,
                before=before,
                slots=slots,
                carry=carry,
                flat=flat,
                tail=tail,
                shared=shared,
                stack=stack,
                name=name,
                hyper=tuple((hyper or {}).items()),
                extra=() if scalars is None else base.extra_names(scalars),
            ),
        )
    )


def identity() -> Leafwise:
    """The transformation that changes nothing; what a link with a zero coefficient becomes.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.identity()
        >>> w = torch.ones(2)
        >>> tx.update(torch.tensor([2.0, 4.0]), tx.init(w), w)[0]
        tensor([2., 4.])
    """
    return Leafwise(())


class Row(NamedTuple):
    """A leaf in a step. at: which of the chain's links act on it; links and names: of these."""

    links: tuple[Link, ...]
    names: tuple[tuple[str, ...], ...]
    at: tuple[int, ...]
    p: Tensor
    g: Any
    slots: list[Slots]

    def upto(self, known: int) -> int:
        """How many of its links are among the first of the chain."""
        return sum([i < known for i in self.at])

    def pick(self, numbers: list[Numbers]) -> list[Numbers]:
        """The numbers of its links, out of the chain's first."""
        return [numbers[i] for i in self.at if i < len(numbers)]


def _lift(links: tuple[Link, ...], layout: Layout) -> tuple[Callable[..., Any], Callable[..., Any]]:
    keys, routed = layout.keys, layout.routed
    every = tuple(range(len(links)))
    meets = any(link.over for link in links)

    def row(path: str, p: Tensor, g: Any, *slots: Any) -> Row | None:
        places = route(links, path, p) if routed else every
        if places is None:
            return None
        known = dict(zip(keys, slots, strict=True))
        mine, names = _part(links, layout, places) if routed else (links, layout)
        own = [tuple([known[key] for key in its]) for its in names.slots]
        return Row(mine, names.slots, places, p, sharded.gradient_of(p, g), own)

    def init(params: Any) -> State:
        base.check_params(params)
        device = base.default_device(tree.leaves(params))

        def first(path: str, p: Tensor) -> tuple[Any, ...]:
            found = row(path, p, None, *[None] * len(keys))
            made: dict[str, Any] = {}
            if found is not None:
                for link, own in zip(found.links, found.names, strict=True):
                    made.update(zip(own, init_slots(link, p), strict=True))
            return tuple([made.get(key) for key in keys])

        check_parts(links, tree.items(params))
        columns = tree.map_unzip_with_path(len(keys), first, params)
        carry = {
            key: numeric.stored(value, device)
            for link, own in zip(links, layout.carry, strict=True)
            for key, value in zip(own, link.carry or (), strict=True)
        }
        step = base.first_step(tree.leaves(params))
        hyper = {
            key: _to_read(value, 1.0, device)
            for link, own in zip(links, layout.hyper, strict=True)
            for key, (_, value) in zip(own, link.hyper, strict=True)
        }
        return State(step, carry, dict(zip(keys, columns, strict=True)), hyper)

    def update(grads: Any, state: State, params: Any = None, **extra: Any) -> tuple[Any, State]:
        base.check_extra(extra, tuple([name for link in links for name in link.extra]))
        check_state(links, layout, state)
        if params is None:
            raise ValueError("update needs the parameters: call update(grads, state, params).")
        if not torch.compiler.is_compiling():
            check_trees(links, layout, params, grads, state)
        columns = [state.slots[key] for key in keys]
        rows: list[Row | None] = []
        tree.map_with_path(lambda *leaf: rows.append(row(*leaf)), params, grads, *columns)
        t = (state.step + 1).to(torch.float64)
        if not rows and not meets:
            return grads, state._replace(step=state.step + 1)

        live = [row if row is not None and row.g is not None else None for row in rows]
        used, names = links, layout
        if meets:  # in another process there may be gradients
            used = everywhere(links, layout)
        elif routed or not any(live):  # what acts on no gradient neither measures nor goes on
            places = sorted({i for row in live if row is not None for i in row.at})
            used, names = _part(links, layout, tuple(places))
            live = [row and row._replace(at=tuple(map(places.index, row.at))) for row in live]
        step = Progress(used, t, carry_of(names, state.carry), extra)
        while step.proceed():
            step.advance(_measured(live, step))
        results = iter(_stepped(live, Caster(step.numbers)))

        def leaf(p: Tensor, g: Any, *slots: Any) -> tuple[Any, ...]:
            u, new = next(results)
            return (u, *[new.get(key, old) for key, old in zip(keys, slots, strict=True)])

        updates, *new = tree.map_unzip(1 + len(columns), leaf, params, grads, *columns)
        carried = {**state.carry, **stored_carry(names, state.carry, step.carried)}
        hyper = {
            key: _to_read(value, step.time_of(i), state.step.device)
            for i, (link, own) in enumerate(zip(used, names.hyper, strict=True))
            for key, (_, value) in zip(own, link.hyper, strict=True)
            if key in state.hyper
        }
        slots = dict(zip(keys, new, strict=True))
        return updates, State(state.step + 1, carried, slots, {**state.hyper, **hyper})

    return init, update


def _measured(rows: list[Row | None], step: Progress) -> Numbers:
    """What the next link of a step measures on all leaves that it acts on."""
    link = step.links[len(step.numbers)]
    if step.is_shut():
        return over_groups(link, None)
    numbers = step.to_measure()
    there = [row for row in rows if row is not None and len(numbers) - 1 in row.at]
    cast = Caster(numbers)
    parts = []
    for row in there:
        known = row.upto(len(numbers))
        own = row.pick(cast(row.p))
        parts.append(measure(row.links[:known], row.g, row.p, row.slots[:known], own))
    return over_groups(link, sum_parts(parts) if parts else None)


def _stepped(rows: list[Row | None], cast: Caster) -> list[tuple[Any, dict[str, Any]]]:
    """Each leaf's update and new slots by name."""
    results: list[tuple[Any, dict[str, Any]]] = [(None, {})] * len(rows)
    groups: dict[tuple[int, ...], list[int]] = {}

    def keep(k: int, row: Row, u: Any, new: list[Slots]) -> None:
        named = zip(row.names, new, strict=True)
        results[k] = (u, {key: x for own, mine in named for key, x in zip(own, mine, strict=True)})

    for k, row in enumerate(rows):
        if row is None:
            continue
        if row.g.layout is torch.strided:
            groups.setdefault(row.at, []).append(k)
        else:
            keep(k, row, *run_rows(row.links, row.g, row.p, row.slots, row.pick(cast(row.p))))
    for members in groups.values():
        mine = [row for k in members if (row := rows[k]) is not None]
        leaves = [Leaf(row.g, row.p, row.slots, row.pick(cast(row.p))) for row in mine]
        for k, row, result in zip(
            members, mine, run_all_stored(mine[0].links, leaves), strict=True
        ):
            keep(k, row, *result)
    return results


def _to_read(hyper: numeric.Hyper, t: Any, device: torch.device) -> Tensor:
    value = numeric.at(hyper, t)
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)  # not the user's own memory
    return torch.full((), value, dtype=torch.float64, device=device)


def check_parts(links: tuple[Link, ...], named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError where a process's part of the parameters is surely taken for all of them."""
    found = list(named)
    flattened = sharded.flat_parts([p for _, p in found])
    for (path, p), flat in zip(found, flattened, strict=True):
        if flat or sharded.is_sharded(p):
            for i in route(links, path, p) or ():
                check_part(links[i], path, p, flat=flat)


def carry_of(layout: Layout, stored: dict[str, Tensor]) -> list[Numbers]:
    """The carried numbers per link, in float64."""
    return [tuple([numeric.float64(stored[key]) for key in keys]) for keys in layout.carry]


def stored_carry(
    layout: Layout, old: dict[str, Tensor], new: Iterable[Numbers]
) -> dict[str, Tensor]:
    """New carried numbers under their keys, in the dtype of the old ones."""
    return {
        key: torch.as_tensor(value, dtype=old[key].dtype, device=old[key].device)
        for keys, values in zip(layout.carry, new, strict=True)
        for key, value in zip(keys, values, strict=True)
    }


def check_trees(
    links: Sequence[Link], layout: Layout, params: Any, grads: Any, state: State
) -> None:
    """Raise unless gradients and slots are those of these parameters."""
    base.check_grads(params, grads)
    for link, keys in zip(links, layout.slots, strict=True):
        for key in keys:
            tree.check_same(
                params,
                state.slots[key],
                "params",
                f"the slot {key!r} of the state",
                "pass the state that this chain's own init returned for these parameters",
                shapes=link.flat,
            )


def check_state(links: Sequence[Link], layout: Layout, state: Any) -> None:
    """Raise if a state was not made by a chain of these links."""
    mine = set(layout.keys)
    if not isinstance(state, State):
        names = ", ".join(link.name or "?" for link in links)
        raise TypeError(
            f"chain({names}) got a state of type {type(state).__name__}; pass the state that this "
            "chain's own init returned."
        )
    if state.slots.keys() != mine:
        names = ", ".join(link.name or "?" for link in links)
        raise ValueError(
            f"chain({names}) keeps the slots {sorted(mine)}, but got a state with "
            f"{sorted(state.slots)}; pass the state that this chain's own init returned."
        )
