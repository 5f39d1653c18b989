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
    stack: bool
    name: str
    extra: tuple[str, ...]


class Layout(NamedTuple):
    """The key under which each link's slots and carried numbers are kept."""

    slots: tuple[tuple[str, ...], ...]
    carry: tuple[tuple[str, ...], ...]


_layouts: dict[Any, Layout] = {}


def name_slots(links: tuple[Link, ...]) -> Layout:
    """Choose the state keys: the field's name, or `link.field` where two links share one.

    Worked out once for each kind of chain: a recipe is built anew whenever a number changes.

    Raises:
        ValueError: if two links share a slot name and no two different names tell them apart, or
            if a link follows a tail without being one.
    """
    if torch.compiler.is_compiling():
        return _name_slots(links)
    kind = tuple([(link.name, link.slots, type(link.carry), link.tail) for link in links])
    layout = _layouts.get(kind)
    if layout is None:
        layout = _layouts[kind] = _name_slots(links)
    return layout


def _name_slots(links: tuple[Link, ...]) -> Layout:
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


class Leaf(NamedTuple):
    """A tensor as it is stored, with the numbers that its links read."""

    g: Tensor
    p: Tensor
    slots: Sequence[Slots]
    numbers: Sequence[Numbers]


def run(links: Sequence[Link], leaves: Sequence[Leaf]) -> list[tuple[Tensor, list[Slots]]]:
    """Apply links to tensors: cast in, run, leave the results in compute dtype.

    A tail sees the parameter after the update, rounded as it will be stored. A link that takes
    stacks gets all updates of one shape at once.
    """
    dtypes = [compute_dtype(leaf.p) for leaf in leaves]
    us = [as_real(leaf.g, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    xs = [as_real(leaf.p, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    new: list[list[Slots]] = [[] for _ in leaves]
    for k, link in enumerate(links):
        if link.stack and len(leaves) > 1:
            us = _run_stacked(link, us, [leaf.numbers[k] for leaf in leaves])
            for mine in new:
                mine.append(())
            continue
        for i, (_, p, slots, numbers) in enumerate(leaves):
            if link.tail:
                xs[i] = as_real(base.add(p, as_update(us[i], p)), dtypes[i])
            mine = real_slots(link, slots[k], dtypes[i])
            us[i], record = link.update(us[i], mine, xs[i], *numbers[k])
            new[i].append(tuple(record))
    return list(zip(us, new, strict=True))


def at_once(size: int) -> int:
    """How many tensors of this size to stack: few enough to stay in the cache.

    Four matrices of 256 × 1024 are orthogonalized in 0.58 of the time that one by one takes, twelve
    in 0.67; of 64 × 64, sixteen in 0.1.
    """
    return min(16, max(4, (1 << 20) // max(size, 1)))


def _run_stacked(link: Link, us: list[Tensor], numbers: list[Numbers]) -> list[Tensor]:
    alike: dict[Any, list[int]] = {}
    for i, u in enumerate(us):
        kind = i if sharded.is_sharded(u) else (u.shape, u.dtype, u.device)
        alike.setdefault(kind, []).append(i)
    results = list(us)
    for members in alike.values():
        most = at_once(us[members[0]].numel())
        for at in range(0, len(members), most):
            some = members[at : at + most]
            if len(some) == 1:
                results[some[0]], _ = link.update(us[some[0]], (), None, *numbers[some[0]])
                continue
            whole, _ = link.update(torch.stack([us[i] for i in some]), (), None, *numbers[some[0]])
            for i, part in zip(some, whole.unbind(), strict=True):
                results[i] = part
    return results


def run_stored(
    links: Sequence[Link],
    g: Tensor,
    p: Tensor,
    slots: Sequence[Slots],
    numbers: Sequence[Numbers],
) -> tuple[Tensor, list[Slots]]:
    """`run` on one tensor, with the slots back in their own dtypes.

    The update stays in compute dtype (complex for a complex parameter), so that adding it to the
    parameter rounds once.
    """
    (result,) = run_all_stored(links, [Leaf(g, p, slots, numbers)])
    return result


def run_all_stored(
    links: Sequence[Link], leaves: Sequence[Leaf]
) -> list[tuple[Tensor, list[Slots]]]:
    """`run_stored` for several tensors."""
    results = []
    for (_, p, slots, _), (u, new) in zip(leaves, run(links, leaves), strict=True):
        back = [
            tuple(
                [
                    None if old is None else as_stored(s, old)
                    for s, old in zip(fresh, mine, strict=True)
                ]
            )
            for fresh, mine in zip(new, slots, strict=True)
        ]
        results.append((as_update(u, p), back))
    return results


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
    ((u, _),) = run(done, [Leaf(g, p, slots[:k], numbers[:k])])
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


def present(slots: Sequence[Slots]) -> list[Tensor]:
    """The slots that a tensor has, in one list."""
    return [slot for own in slots for slot in own if slot is not None]


def with_holes(given: Sequence[Tensor], holes: Sequence[Sequence[bool]]) -> list[Slots]:
    """The way back from `present`: which slots of each link are missing, `holes` says."""
    supply = iter(given)
    return [tuple([None if hole else next(supply) for hole in own]) for own in holes]


def laid_out_like(g: Tensor, p: Tensor) -> Tensor:
    """A gradient as it is, or copied into the memory layout of its parameter."""
    return g if g.stride() == p.stride() else torch.empty_like(p, dtype=g.dtype).copy_(g)


def split(slots: Sequence[Any], sizes: Sequence[int]) -> list[Slots]:
    """Cut a tensor's slots into those of each link."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [tuple(slots[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
