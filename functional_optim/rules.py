"""Rules for one tensor: what a link is, and how a run of links acts on a tensor.

A rule is up to five small functions, gathered in a `Link`. Three callers drive the functions of
this file: the pure transform (`leafwise`), the engine (compiled kernels), and the optimizer object
in `adapters`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import base, numeric, sharded

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


class Layout(NamedTuple):
    """The key under which each link's slots and carried numbers are kept."""

    slots: tuple[tuple[str, ...], ...]
    carry: tuple[tuple[str, ...], ...]


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
    return as_update(x, like).to(like.dtype)


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


class Rows(NamedTuple):
    """The part of a parameter that has a sparse gradient: what lazy rules see."""

    at: tuple[Tensor, ...]
    g: Tensor
    p: Tensor
    slots: list[Slots]


def rows_of(g: Tensor, p: Tensor, slots: Sequence[Slots]) -> Rows:
    """The rows of a parameter and of its slots where a sparse COO gradient has values."""
    g = g.coalesce()
    at = g.indices().unbind()
    mine = [tuple([None if s is None else s[at] for s in own]) for own in slots]
    return Rows(at, g.values(), p[at], mine)


def run_rows(
    links: Sequence[Link],
    g: Tensor,
    p: Tensor,
    slots: Sequence[Slots],
    numbers: Sequence[Numbers],
) -> tuple[Tensor, list[Slots]]:
    """`run_stored` for a sparse COO gradient: only its rows move; the update is sparse, too."""
    rows = rows_of(g, p, slots)
    u, new = run_stored(links, rows.g, rows.p, rows.slots, numbers)
    full = [
        tuple(
            [
                None if old is None else old.index_put(rows.at, s)
                for s, old in zip(fresh, own, strict=True)
            ]
        )
        for fresh, own in zip(new, slots, strict=True)
    ]
    sparse = torch.sparse_coo_tensor(
        torch.stack(rows.at), u, p.shape, check_invariants=False, is_coalesced=True
    )
    return sparse, full


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
    if g.layout is not torch.strided:
        _, g, p, slots = rows_of(g, p, slots)
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
    """An update in compute dtype, complex again and sharded as the parameter is."""
    return sharded.placed_like(torch.view_as_complex(u) if p.is_complex() else u, p)


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

    def proceed(self) -> bool:
        """Go on to the next link that measures; False if all numbers are known."""
        while len(self.numbers) < len(self.links):
            link = self.links[len(self.numbers)]
            if link.reduce is not None:
                return True
            if link.scalars is None:
                self.carried.append(self.carry[len(self.numbers)])
                self.numbers.append(())
            elif link.carry is None and not link.extra:
                self.numbers.append(link.scalars(self.time))
                self.carried.append(())
            else:
                self.advance()
        return False

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


def sum_parts(parts: Sequence[Sequence[Tensor]]) -> Numbers:
    """Sum what `reduce` measured on each tensor, entry by entry, in float64.

    A measurement of a sharded tensor is itself sharded (a DTensor); it is completed first.
    """
    return tuple(
        [
            torch.stack([numeric.float64(sharded.whole(x)) for x in column]).sum()
            for column in zip(*parts, strict=True)
        ]
    )


def split(slots: Sequence[Any], sizes: Sequence[int]) -> list[Slots]:
    """Cut a tensor's slots into those of each link."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [tuple(slots[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
