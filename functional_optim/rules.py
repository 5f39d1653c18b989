"""Rules for one tensor: what a link is, and how a run of links acts on a tensor.

A rule is up to five small functions, gathered in a `Link`. Three callers drive the functions of
this file: the pure transform (`leafwise`), the engine (compiled kernels), and the optimizer object
in `adapters`. What numbers a rule reads, `progress` works out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import base, sharded
from functional_optim.paths import Choice

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
    hyper: tuple[tuple[str, Any], ...] = ()
    """Hyperparameters by name, to be read from the state."""
    where: tuple[Choice, ...] = ()
    """Which leaves it acts on; all, if empty."""
    gate: int = 0
    """How many links before it stands the gate that may shut it out; 0: none."""
    back: int | None = None
    """How many links before it the update stood that `update` gets after p; None: it gets none."""
    final: bool = False
    """Works on the step that will be added, so that no learning rate may follow."""
    whole: bool = False
    """Must it see all rows? It then takes no sparse gradients."""
    over: tuple[Any, ...] = ()
    """The process groups over which its measurement is summed; None: the default group."""


def compute_dtype(p: Tensor) -> torch.dtype:
    """The dtype in which rules see a tensor: float64 for doubles, float32 for all others."""
    return torch.float64 if p.dtype in (torch.float64, torch.complex128) else torch.float32


def wide_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a slot that holds sums or copies of p: p's own, float32 for half types."""
    return p.dtype if p.is_complex() else compute_dtype(p)


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
    stacks gets all updates of one shape at once. The numbers of a link behind a gate begin with
    what the gate says: where that is not above 0, update and slots stay as they were. A link that
    looks back also gets the update as it came to the first of so many links before it.
    """
    dtypes = [compute_dtype(leaf.p) for leaf in leaves]
    us = [as_real(leaf.g, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    xs = [as_real(leaf.p, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    new: list[list[Slots]] = [[] for _ in leaves]
    passed: list[list[Tensor]] = []
    looks_back = any(link.back is not None for link in links)
    for k, link in enumerate(links):
        if looks_back:
            passed.append(list(us))
        if link.stack and len(leaves) > 1:
            given = [leaf.numbers[k] for leaf in leaves]
            opened, own = _opened(link, given[0])
            stacked = us if opened is False else _run_stacked(link, us, [own] * len(us))
            us = [_kept(opened, u, old) for u, old in zip(stacked, us, strict=True)]
            for mine in new:
                mine.append(())
            continue
        for i, (_, p, slots, numbers) in enumerate(leaves):
            opened, own = _opened(link, numbers[k])
            if opened is False:
                new[i].append(tuple(real_slots(link, slots[k], dtypes[i])))
                continue
            if link.tail:
                xs[i] = as_real(base.add(p, as_update(us[i], p)), dtypes[i])
            mine = real_slots(link, slots[k], dtypes[i])
            past = () if link.back is None else (passed[k - link.back][i],)
            u, record = link.update(us[i], mine, xs[i], *past, *own)
            us[i] = _kept(opened, u, us[i])
            pairs = zip(record, mine, strict=True)
            new[i].append(tuple([_kept(opened, x, old) for x, old in pairs]))
    return list(zip(us, new, strict=True))


def _opened(link: Link, numbers: Numbers) -> tuple[Any, Numbers]:
    """What the gate before a link says, True or False where that is known, and its own numbers."""
    if not link.gate:
        return True, numbers
    said, *own = numbers
    return (said > 0, tuple(own))


def _kept(opened: Any, new: Any, old: Any) -> Any:
    """The new value behind an open gate, else the old one."""
    return new if opened is True or new is None else torch.where(opened, new, old)


def either(condition: Any, a: Tensor, b: Any) -> Tensor:
    """a if a number is above 0, else b, a tensor like a or a float.

    The number is one of a rule's: where it is known, this costs no operation.
    """
    if isinstance(condition, Tensor):
        return torch.where(condition > 0, a, b)
    if condition > 0:
        return a
    return b if isinstance(b, Tensor) else torch.full_like(a, b)


def settled(
    links: tuple[Link, ...], numbers: Sequence[Numbers]
) -> tuple[tuple[Link, ...], list[Numbers]]:
    """The same without gates, where what all of them say is known: shut links do nothing."""
    plain: list[Link] = []
    left: list[Numbers] = []
    for link, own in zip(links, numbers, strict=False):
        if not link.gate:
            plain.append(link)
            left.append(own)
        elif own[0] > 0:
            plain.append(link._replace(gate=0))
            left.append(own[1:])
        else:
            plain.append(link._replace(update=_nothing, gate=0, back=None, stack=False, tail=False))
            left.append(())
    return tuple(plain), left


def _nothing(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor, Any]:
    return u, slots


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


def check_part(link: Link, path: str, p: Tensor, *, flat: bool) -> None:
    """Raise ValueError where a link would take a part of the model for all of it, or sum it twice.

    flat: is p this process's part of what FSDP1 has flattened?
    """
    name = link.name or "a link"
    if flat and not link.flat:
        raise ValueError(
            f"{name} looks at whole tensors, but FullyShardedDataParallel has flattened the "
            f"parameter {path!r}, and this process has a part of it; use fully_shard, which leaves "
            "shapes as they are."
        )
    if flat and link.reduce is not None and not link.over:
        raise ValueError(
            f"{name} measures the whole model, but FullyShardedDataParallel has left this process "
            f"a part of it (parameter {path!r}); put the recipe into fo.sharded_over(...), which "
            "sums over the processes, or use fully_shard."
        )
    if link.over and link.reduce is not None and sharded.is_sharded(p):
        raise ValueError(
            f"{name} is inside of sharded_over, but the parameter {path!r} is a DTensor, which is "
            "measured as a whole in every process; leave sharded_over out."
        )


def check_lazy(links: Sequence[Link]) -> None:
    """Raise RuntimeError if a link cannot act on the rows of a sparse gradient alone."""
    for link in links:
        if link.whole:
            raise RuntimeError(
                f"{link.name} does not take sparse gradients, since what it keeps of other rows "
                "would be lost; pass dense ones, e.g. from Embedding(..., sparse=False)."
            )


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
    check_lazy(links)
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

    The last entry of `numbers` is what that link's `before` returned, behind a gate with what that
    says in front.
    """
    if g.layout is not torch.strided:
        _, g, p, slots = rows_of(g, p, slots)
    *done, last = links
    k = len(done)
    ((u, _),) = run(done, [Leaf(g, p, slots[:k], numbers[:k])])
    dtype = compute_dtype(p)
    assert last.reduce is not None
    _, own = _opened(last, numbers[k])
    return last.reduce(u, real_slots(last, slots[k], dtype), as_real(p, dtype), *own)


def real_slots(link: Link, mine: Slots, dtype: torch.dtype) -> Any:
    """One link's slots as its rule sees them."""
    if link.slots is None:
        return ()
    return link.slots(*[None if s is None else as_real(s, dtype) for s in mine])


def as_update(u: Tensor, p: Tensor) -> Tensor:
    """An update in compute dtype, complex again and sharded as the parameter is."""
    return sharded.placed_like(torch.view_as_complex(u) if p.is_complex() else u, p)


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


def times(u: Tensor, slots: Any, p: Tensor, factor: Any) -> tuple[Tensor, Any]:
    """The `update` of a rule that multiplies by a number."""
    return factor * u, slots


def squares(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor]:
    """The `reduce` of a rule that measures the Euclidean norm: its square."""
    return ((u * u).sum(),)
