"""Write the rule for one tensor; this file lifts it to trees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import base, numeric, tree
from functional_optim.rules import (
    Caster,
    Layout,
    Leaf,
    Link,
    Numbers,
    Progress,
    init_slots,
    measure,
    name_slots,
    run_all_stored,
    run_rows,
    run_stored,
    split,
    sum_parts,
)


class State(NamedTuple):
    """The state of a fused chain.

    step: 0-dim int64, the number of finished steps.
    carry: dict of 0-dim tensors, the numbers that recur from step to step.
    slots: dict of trees like the parameters, by slot name.
    """

    step: Tensor
    carry: dict[str, Tensor]
    slots: dict[str, Any]


class Leafwise(base.GradientTransformation):
    """A transformation made of nothing but one-tensor rules, so it can be fused and compiled.

    links: the rules, in order. layout: the names of their slots.
    """

    links: tuple[Link, ...]
    layout: Layout

    def __new__(cls, links: tuple[Link, ...]) -> Leafwise:
        layout = name_slots(links)
        init, update = _lift(links, layout)
        self = super().__new__(cls, init, update)
        self.links = links
        self.layout = layout
        return self

    def __repr__(self) -> str:
        return f"chain({', '.join(link.name or '?' for link in self.links)})"


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
        if stack:
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


def _lift(links: tuple[Link, ...], layout: Layout) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def init(params: Any) -> State:
        base.check_params(params)
        device = base.default_device(tree.leaves(params))
        slot_keys = [key for keys in layout.slots for key in keys]
        columns = tree.map_unzip(
            len(slot_keys),
            lambda p: tuple([slot for link in links for slot in init_slots(link, p)]),
            params,
        )
        carry = {
            key: numeric.stored(value, device)
            for link, keys in zip(links, layout.carry, strict=True)
            for key, value in zip(keys, link.carry or (), strict=True)
        }
        step = torch.zeros((), dtype=torch.int64, device=device)
        return State(step, carry, dict(zip(slot_keys, columns, strict=True)))

    def update(grads: Any, state: State, params: Any = None, **extra: Any) -> tuple[Any, State]:
        base.check_extra(extra, tuple([name for link in links for name in link.extra]))
        check_state(links, layout, state)
        slot_keys = [key for keys in layout.slots for key in keys]
        sizes = [len(keys) for keys in layout.slots]
        if params is None:
            raise ValueError("update needs the parameters: call update(grads, state, params).")
        if not torch.compiler.is_compiling():
            check_trees(links, layout, params, grads, state)
        columns = [state.slots[key] for key in slot_keys]

        rows = tree.rows(params, grads, *columns)
        if not rows:
            return grads, state._replace(step=state.step + 1)
        # no gradient at all measures as one that is zero
        p, _, *slots = rows[0]
        measured = [row for row in rows if row[1] is not None]
        measured = measured or [(p, torch.zeros_like(p), *slots)]

        t = (state.step + 1).to(torch.float64)
        step = Progress(links, t, carry_of(layout, state.carry), extra)
        while step.proceed():
            numbers = step.to_measure()
            cast = Caster(numbers)
            parts = [
                measure(links[: len(numbers)], g, p, split(slots, sizes), cast(p))
                for p, g, *slots in measured
            ]
            step.advance(sum_parts(parts))
        cast = Caster(step.numbers)

        leaf = _one_by_one(links, sizes, cast)
        if any(link.stack for link in links):
            leaf = _all_at_once(links, sizes, cast, leaf, (params, grads, *columns))
        updates, *new = tree.map_unzip(1 + len(columns), leaf, params, grads, *columns)
        carried = stored_carry(layout, state.carry, step.carried)
        return updates, State(state.step + 1, carried, dict(zip(slot_keys, new, strict=True)))

    return init, update


def _one_by_one(links: tuple[Link, ...], sizes: list[int], cast: Caster) -> Callable[..., Any]:
    """From a leaf's parameter, gradient and slots to its update and new slots."""

    def leaf(p: Tensor, g: Tensor | None, *slots: Any) -> tuple[Any, ...]:
        if g is None:
            return (None, *slots)
        go = run_stored if g.layout is torch.strided else run_rows
        u, new = go(links, g, p, split(slots, sizes), cast(p))
        return (u, *[slot for mine in new for slot in mine])

    return leaf


def _all_at_once(
    links: tuple[Link, ...],
    sizes: list[int],
    cast: Caster,
    leaf: Callable[..., Any],
    trees: tuple[Any, ...],
) -> Callable[..., Any]:
    """The same, worked out for all dense leaves together, in the order in which a map visits."""
    dense: list[Leaf] = []

    def visit(p: Tensor, g: Tensor | None, *slots: Any) -> None:
        if g is not None and g.layout is torch.strided:
            dense.append(Leaf(g, p, split(slots, sizes), cast(p)))

    tree.map(visit, *trees)
    results = iter(run_all_stored(links, dense))

    def known(p: Tensor, g: Tensor | None, *slots: Any) -> tuple[Any, ...]:
        if g is None or g.layout is not torch.strided:
            return leaf(p, g, *slots)
        u, new = next(results)
        return (u, *[slot for mine in new for slot in mine])

    return known


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
    mine = [key for keys in layout.slots for key in keys]
    if not isinstance(state, State):
        names = ", ".join(link.name or "?" for link in links)
        raise TypeError(
            f"chain({names}) got a state of type {type(state).__name__}; pass the state that this "
            "chain's own init returned."
        )
    if sorted(state.slots) != sorted(mine):
        names = ", ".join(link.name or "?" for link in links)
        raise ValueError(
            f"chain({names}) keeps the slots {sorted(mine)}, but got a state with "
            f"{sorted(state.slots)}; pass the state that this chain's own init returned."
        )
