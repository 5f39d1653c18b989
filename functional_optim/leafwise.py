"""Write the rule for one tensor; this file lifts it to trees.

A rule is up to five small functions, gathered in a `Link`. A run of links is fused: one state, one
step count, one pass over the leaves. Three callers drive the same functions: the pure transform
here, the engine (compiled kernels), and the optimizer object in `adapters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import base, numeric, tree

Numbers = tuple[Any, ...]
Slots = tuple[Any, ...]


class Link(NamedTuple):
    """A rule for one tensor. Build it with `leafwise`, which says what each part is."""

    init: Callable[[Tensor], Any] | None
    update: Callable[..., tuple[Any, Any]]
    scalars: Callable[..., Any] | None
    reduce: Callable[..., tuple[Any, ...]] | None
    before: Callable[..., Numbers] | None
    slots: type | None
    carry: Any
    flat: bool
    tail: bool
    shared: bool
    name: str
    extra: tuple[str, ...]


class State(NamedTuple):
    """The state of a fused chain.

    step: 0-dim int64, the number of finished steps.
    carry: dict of 0-dim tensors, the numbers that recur from step to step.
    slots: dict of trees like the parameters, by slot name.
    """

    step: Tensor
    carry: dict[str, Tensor]
    slots: dict[str, Any]


class Layout(NamedTuple):
    """The key under which each link's slots and carried numbers are kept."""

    slots: tuple[tuple[str, ...], ...]
    carry: tuple[tuple[str, ...], ...]


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
            `scalars(t, carry, total)`. Its keyword-only parameters are the extra arguments of `update` that it reads.
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
        name: tells two rules with the same slot names apart.

    Returns:
        A `GradientTransformation` whose `update` also takes the extra arguments of `scalars`.

    Raises:
        TypeError: at once, if `init` returns something other than a NamedTuple.

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
        probe = init(torch.empty((1, 1), device="meta"))
        if not hasattr(probe, "_fields"):
            raise TypeError(
                f"init of the rule {name!r} returned a {type(probe).__name__}; return a NamedTuple "
                "of tensors, or pass init=None for a rule without slots."
            )
        slots = type(probe)
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
                name=name,
                extra=() if scalars is None else base.extra_names(scalars),
            ),
        )
    )


def identity() -> Leafwise:
    """The transformation that changes nothing; what a link with a zero coefficient becomes."""
    return Leafwise(())


def name_slots(links: tuple[Link, ...]) -> Layout:
    """Choose the state keys: the field's name, or `link.field` where two links share one.

    Raises:
        ValueError: if two links share a slot name and no two different names tell them apart, or
            if a link follows a tail without being one.
    """
    for first, second in pairwise(links):
        if first.tail and not second.tail:
            raise ValueError(
                f"{second.name or 'a link'} stands after {first.name}, which reads the parameters "
                f"after the update; put {first.name} last in the chain."
            )
    owners: dict[str, list[str]] = {"step": [""]}
    for link in links:
        for field in _fields(link.slots) + _fields(link.carry):
            owners.setdefault(field, []).append(link.name)

    def key(link: Link, field: str) -> str:
        sharing = owners[field]
        if len(sharing) == 1:
            return field
        if not link.name or sharing.count(link.name) > 1:
            raise ValueError(
                f"two links of this chain have a slot called {field!r} and no names of their own; "
                "name them with named_chain, e.g. named_chain(('fast', ...), ('slow', ...))."
            )
        return f"{link.name}.{field}"

    return Layout(
        tuple(tuple(key(link, f) for f in _fields(link.slots)) for link in links),
        tuple(tuple(key(link, f) for f in _fields(link.carry)) for link in links),
    )


def _fields(record: Any) -> tuple[str, ...]:
    return () if record is None else record._fields


# ---------------------------------------------------------------- one tensor


def compute_dtype(p: Tensor) -> torch.dtype:
    """The dtype in which rules see a tensor: float64 for doubles, float32 for all others."""
    return torch.float64 if p.dtype in (torch.float64, torch.complex128) else torch.float32


def as_real(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as rules see it: complex numbers as pairs in a last dimension, and in `dtype`."""
    return (torch.view_as_real(x) if x.is_complex() else x).to(dtype)


def as_stored(x: Tensor, like: Tensor) -> Tensor:
    """The way back from `as_real`, into the dtype of `like`."""
    return (torch.view_as_complex(x) if like.is_complex() else x).to(like.dtype)


def init_slots(link: Link, p: Tensor) -> Slots:
    """A new tensor's slots for one link, as a plain tuple."""
    return () if link.init is None else tuple(link.init(p))


def run(
    links: Sequence[Link],
    g: Tensor,
    p: Tensor,
    slots: Sequence[Slots],
    numbers: Sequence[Numbers],
) -> tuple[Tensor, list[Slots]]:
    """Apply links to one tensor as it is stored: cast in, run, leave the results in compute dtype.

    A tail sees the parameter after the update, rounded as it will be stored.
    """
    dtype = compute_dtype(p)
    u, x = as_real(g, dtype), as_real(p, dtype)
    new: list[Slots] = []
    for link, mine, nums in zip(links, slots, numbers, strict=True):
        if link.tail:
            x = as_real(base.add(p, as_update(u, p)), dtype)
        u, record = link.update(u, real_slots(link, mine, dtype), x, *nums)
        new.append(tuple(record))
    return u, new


def run_stored(
    links: Sequence[Link],
    g: Tensor,
    p: Tensor,
    slots: Sequence[Slots],
    numbers: Sequence[Numbers],
) -> tuple[Tensor, list[Slots]]:
    """`run`, with the slots back in their own dtypes.

    The update stays in compute dtype (complex for a complex parameter), so that adding it to the
    parameter rounds once.
    """
    u, new = run(links, g, p, slots, numbers)
    back = [
        tuple(
            [None if old is None else as_stored(s, old) for s, old in zip(fresh, mine, strict=True)]
        )
        for fresh, mine in zip(new, slots, strict=True)
    ]
    return as_update(u, p), back


def measure(
    links: Sequence[Link],
    g: Tensor,
    p: Tensor,
    slots: Sequence[Slots],
    numbers: Sequence[Numbers],
) -> tuple[Tensor, ...]:
    """What the last link's `reduce` says of one tensor, after the links before it have run.

    The last entry of `numbers` is what that link's `before` returned.
    """
    *done, last = links
    k = len(done)
    u, _ = run(done, g, p, slots[:k], numbers[:k])
    dtype = compute_dtype(p)
    assert last.reduce is not None
    return last.reduce(u, real_slots(last, slots[k], dtype), as_real(p, dtype), *numbers[k])


def real_slots(link: Link, mine: Slots, dtype: torch.dtype) -> Any:
    """One link's slots as its rule sees them."""
    if link.slots is None:
        return ()
    return link.slots(*[None if s is None else as_real(s, dtype) for s in mine])


def as_update(u: Tensor, p: Tensor) -> Tensor:
    """An update in compute dtype, complex again for a complex parameter."""
    return torch.view_as_complex(u) if p.is_complex() else u


# ---------------------------------------------------------------- numbers


class Progress:
    """The numbers of one step, worked out link by link.

    A link that measures needs the total before it can go on: whoever drives this object measures
    with `to_measure()` and hands the total to `advance`.
    """

    def __init__(
        self, links: Sequence[Link], t: Any, carry: Sequence[Numbers], extra: dict[str, Any]
    ) -> None:
        self.links = links
        self.time = t
        self.carry = carry
        self.extra = extra
        self.numbers: list[Numbers] = []
        self.carried: list[Numbers] = []

    def following(self) -> Link | None:
        """The link whose numbers come next; None when all are known."""
        done = len(self.numbers)
        return self.links[done] if done < len(self.links) else None

    def to_measure(self) -> list[Numbers]:
        """The numbers so far, and those that the next link's reduce needs."""
        i = len(self.numbers)
        link, mine = self.links[i], self.carry[i]
        if link.before is None:
            return [*self.numbers, ()]
        args = [self.time] if link.carry is None else [self.time, type(link.carry)(*mine)]
        return [*self.numbers, tuple(link.before(*args))]

    def advance(self, total: Numbers | None = None) -> None:
        """Work out the next link's numbers, and what it carries to the next step."""
        i = len(self.numbers)
        link, mine = self.links[i], self.carry[i]
        if link.scalars is None:
            self.numbers.append(total or ())
            self.carried.append(mine)
            return
        args: list[Any] = [self.time]
        if link.carry is not None:
            args.append(type(link.carry)(*mine))
        if link.reduce is not None:
            args.append(total)
        mentioned = {name: self.extra[name] for name in link.extra if name in self.extra}
        result = link.scalars(*args, **mentioned)
        numbers, carried = (result, ()) if link.carry is None else result
        self.numbers.append(tuple(numbers))
        self.carried.append(tuple(carried))


class Caster:
    """Turns the numbers of a step into what a tensor's rule reads, once per dtype and device.

    Python numbers stay as they are. 0-dim tensors are stacked and unbound: under torch.compile
    this makes Inductor store them once instead of inlining their computation into every loop.
    """

    def __init__(self, numbers: Sequence[Numbers]) -> None:
        self.numbers = numbers
        self.cast: dict[tuple[torch.dtype, torch.device], list[Numbers]] = {}

    def __call__(self, p: Tensor) -> list[Numbers]:
        key = (compute_dtype(p), p.device)
        if key not in self.cast:
            dtype, device = key
            tensors = [x for nums in self.numbers for x in nums if isinstance(x, Tensor)]
            ready: tuple[Tensor, ...] = ()
            if tensors:
                wide = torch.stack([numeric.float64(x).to(device) for x in tensors])
                ready = wide.to(dtype).unbind()
            supply = iter(ready)
            self.cast[key] = [
                tuple([next(supply) if isinstance(x, Tensor) else x for x in nums])
                for nums in self.numbers
            ]
        return self.cast[key]


def sum_parts(parts: Sequence[Sequence[Tensor]], link: Link) -> Numbers:
    """Sum what `reduce` measured on each tensor, entry by entry, in float64.

    A measurement of a sharded tensor is itself sharded (a DTensor); it is completed first.
    """
    if not parts:
        raise ValueError(f"{link.name or 'a link'} measures the gradients, but every one is None.")
    return tuple(
        [torch.stack([_whole(x) for x in column]).sum() for column in zip(*parts, strict=True)]
    )


def _whole(x: Tensor) -> Tensor:
    full = getattr(x, "full_tensor", None)
    return numeric.float64(x if full is None else full())


# ---------------------------------------------------------------- trees


def _lift(links: tuple[Link, ...], layout: Layout) -> tuple[Callable[..., Any], Callable[..., Any]]:
    known = tuple([name for link in links for name in link.extra])

    slot_keys = [key for keys in layout.slots for key in keys]
    sizes = [len(keys) for keys in layout.slots]

    def init(params: Any) -> State:
        base.check_params(params)
        device = base.default_device(tree.leaves(params))
        columns = tree.map_unzip(
            len(slot_keys),
            lambda p: tuple([slot for link in links for slot in init_slots(link, p)]),
            params,
        )
        carry = {
            key: torch.full((), value, dtype=torch.get_default_dtype(), device=device)
            for link, keys in zip(links, layout.carry, strict=True)
            for key, value in zip(keys, link.carry or (), strict=True)
        }
        step = torch.zeros((), dtype=torch.int64, device=device)
        return State(step, carry, dict(zip(slot_keys, columns, strict=True)))

    def update(grads: Any, state: State, params: Any = None, **extra: Any) -> tuple[Any, State]:
        base.check_extra(extra, known)
        check_state(links, layout, state)
        if params is None:
            raise ValueError("update needs the parameters: call update(grads, state, params).")
        tree.check_same(
            params, grads, "params", "grads", "pass one gradient (or None) per parameter"
        )
        columns = [state.slots[key] for key in slot_keys]

        t = (state.step + 1).to(torch.float64)
        step = Progress(links, t, carry_of(layout, state.carry), extra)
        for i, link in enumerate(links):
            if link.reduce is None:
                step.advance()
                continue
            cast = Caster(step.to_measure())
            parts = [
                measure(links[: i + 1], g, p, split(slots, sizes), cast(p))
                for p, g, *slots in tree.rows(params, grads, *columns)
                if g is not None
            ]
            step.advance(sum_parts(parts, link))
        cast = Caster(step.numbers)

        def leaf(p: Tensor, g: Tensor | None, *slots: Any) -> tuple[Any, ...]:
            if g is None:
                return (None, *slots)
            u, new = run_stored(links, g, p, split(slots, sizes), cast(p))
            return (u, *[slot for mine in new for slot in mine])

        updates, *new = tree.map_unzip(1 + len(columns), leaf, params, grads, *columns)
        carried = stored_carry(layout, state.carry, step.carried)
        return updates, State(state.step + 1, carried, dict(zip(slot_keys, new, strict=True)))

    return init, update


def split(slots: Sequence[Any], sizes: Sequence[int]) -> list[Slots]:
    """Cut a tensor's slots into those of each link."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [tuple(slots[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


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
