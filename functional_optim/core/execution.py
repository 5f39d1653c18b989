"""Execution of rules on one tensor, on several of one shape, and on rows of a sparse gradient.

The pure transform, the kernels and the eager executors all run rules through this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core import base, modes, sharding
from functional_optim.core.numbers import Numbers, Own, as_args, in_turn, parts_of, plain
from functional_optim.core.ownership import Partition, run_owned, slot_parts_of
from functional_optim.core.returned import check_results, checked_sums, watched
from functional_optim.core.rule import Placement, Rule, Update, master_of, number_of
from functional_optim.core.storage import (
    Slots,
    SlotSpec,
    as_real,
    as_update,
    beside,
    closed,
    compute_dtype,
    missing_slots,
    opened,
    present,
)
from functional_optim.core.views import seen_update


class Leaf(NamedTuple):
    """A tensor as it is stored, with the numbers that its rules read."""

    g: Tensor
    p: Tensor
    slots: Sequence[Slots]
    numbers: Sequence[Numbers]
    turns: Sequence[int] = ()
    """Its turn for each rule; empty if no rule has several."""

    def own(self, k: int) -> Numbers:
        """The numbers of the k-th rule for this tensor."""
        return in_turn(self.numbers[k], self.turns[k]) if self.turns else self.numbers[k]


def run(
    placements: Sequence[Placement], leaves: Sequence[Leaf]
) -> list[tuple[Tensor, list[Slots]]]:
    """Each leaf's update in compute dtype, with complex numbers as pairs, and its new slots.

    A rule that reads the new parameters sees them as stored, plus any low bits kept in a slot. A
    batched rule gets all updates of one shape at once. A rule with a lookback also gets the input
    of an earlier rule. torch.autocast casts nothing here.
    """
    device = leaves[0].p.device.type if leaves else "cpu"
    if all(placement.rule.own for placement in placements):
        return modes.uncast(device, _run, placements, leaves)
    return modes.uncast(device, watched, _run, placements, leaves)


def _run(
    placements: Sequence[Placement], leaves: Sequence[Leaf]
) -> list[tuple[Tensor, list[Slots]]]:
    dtypes = [compute_dtype(leaf.p) for leaf in leaves]
    us = [as_real(leaf.g, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    xs = [weights_of(placements, leaf) for leaf in leaves]
    new: list[list[Slots]] = [[] for _ in leaves]
    passed: list[list[Tensor]] = []
    looks_back = any(placement.lookback is not None for placement in placements)
    for k, placement in zip(range(len(placements)), placements, strict=True):
        rule, lookback = placement.rule, placement.lookback
        if looks_back:
            passed.append(list(us))
        if rule.storage.weight_codec is not None:
            for mine, leaf in zip(new, leaves, strict=True):
                mine.append(leaf.slots[k])
            continue
        if rule.runs.batched:
            results = _run_owned(placement, us, leaves, k)
            us = [u for u, _ in results]
            for mine, (_, own) in zip(new, results, strict=True):
                mine.append(own)
            continue
        after = rule.runs.after == "step"
        for i, leaf in zip(range(len(leaves)), leaves, strict=True):
            p, slots = leaf.p, leaf.slots
            if after:
                if master_of(placements, p) is None:
                    xs[i] = as_real(base.add(p, as_update(us[i], p)), dtypes[i])
                else:
                    xs[i] = weights_of(placements, leaf) + us[i]
            given = (xs[i],) if lookback is None else (xs[i], passed[k - lookback][i])
            us[i], mine = _run_one(rule, us[i], slots[k], p, given, leaf.own(k))
            new[i].append(mine)
    return list(zip(us, new, strict=True))


def weights_of(placements: Sequence[Placement], leaf: Leaf) -> Tensor:
    """A parameter as rules see it, with its bits from a slot."""
    p, k = leaf.p, master_of(placements, leaf.p)
    if k is None:
        return as_real(p, compute_dtype(p))
    codec = placements[k].rule.storage.weight_codec
    assert codec is not None
    kept = present([beside(p, leaf.slots[k])])
    found = codec.decode((p, *kept), SlotSpec(p.shape, torch.float32))
    return _with_gradient_of(as_real(p, torch.float32), found)


def _divided(
    placements: Sequence[Placement], leaf: Leaf, u: Tensor, new: list[Slots]
) -> tuple[Tensor, list[Slots]]:
    """The update of the stored parameter, and the slots with its remaining bits.

    The sum of a parameter and its update is exact, unless weights of both signs differ by more than
    24 bits; the remainder is then dropped.
    """
    k = master_of(placements, leaf.p)
    if k is None:
        return u, new
    p, codec = leaf.p, placements[k].rule.storage.weight_codec
    assert codec is not None
    _, key, _ = parts_of(leaf.own(k))
    u = as_update(u, p)  # cells encode the shards of p
    wanted, *rest = codec.encode(weights_of(placements, leaf) + u, *key)
    step = torch.where(wanted == p, 0.0, wanted.to(torch.float32) - p.to(torch.float32))
    step = _with_gradient_of(u, step)
    met = base.add(p, step) == wanted
    kept = iter([torch.where(met, x, torch.zeros_like(x)) for x in rest])
    slots = tuple([None if x is None else next(kept).to(x.device) for x in leaf.slots[k]])
    return step, [*new[:k], slots, *new[k + 1 :]]


def _with_gradient_of(x: Tensor, rounded: Tensor) -> Tensor:
    """Rounded values, with the derivative of the unrounded ones."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return rounded
    return rounded.detach() + (x - x.detach())


def _run_one(
    rule: Rule, u: Tensor, stored: Slots, p: Tensor, given: tuple[Any, ...], own: Numbers
) -> tuple[Tensor, Slots]:
    """One rule on one tensor, or on a batch. given: the arguments between slots and numbers."""
    if not rule.updates:
        return u, stored
    if type(own) is not Own and rule.runs.start is None:
        return _run_update(rule, p, given, own, (), rule.updates[0], u, stored)
    which, key, values = parts_of(own)
    run = functools.partial(_run_update, rule, p, given, values, key)
    acts = which[0] if which else 1
    if rule.runs.start is None:
        return _run_selected(rule, u, stored, acts, run)
    return _run_started(rule, u, stored, p, acts, run)


def _run_update(
    rule: Rule,
    p: Tensor,
    given: tuple[Any, ...],
    values: Numbers,
    key: tuple[Any, ...],
    update: Update,
    u: Tensor,
    stored: Slots,
) -> tuple[Tensor, Slots]:
    """One update of a rule on one tensor. key: of the random numbers for rounding its slots."""
    storage, shape, dtype = rule.storage, u.shape, u.dtype
    slots = () if storage.slots is None else opened(rule, stored, p)
    arguments = (*given, *values) if type(values) is tuple else (*given, values)
    view = storage.view
    if view is None:
        found = update(u, slots, *arguments)
    else:
        found = seen_update(view, rule.init, update, u, slots, p, arguments, rule.name)
    if not rule.own:
        check_results(rule, found, slots, p)
    u, record = found
    if u.shape != shape:
        raise ValueError(
            f"update of the rule {rule.name!r} returned a tensor of shape {tuple(u.shape)} for an "
            f"update of shape {tuple(shape)}; return one of the same shape, e.g. by expand_as(u)."
        )
    if type(u) is not Tensor:  # torch leaves some sums of DTensors to be finished
        u = sharding.placed_like(plain(u), p)
    own = closed(rule, record, stored, p, *key) if stored or len(record) else ()
    return u if u.dtype is dtype else u.to(dtype), own


Run = Callable[[Update, Tensor, Slots], tuple[Tensor, Slots]]
"""An update of a rule, on a tensor and its slots."""


def _run_selected(
    rule: Rule, u: Tensor, stored: Slots, acts: Any, run: Run
) -> tuple[Tensor, Slots]:
    if not isinstance(acts, Tensor):
        k = number_of(rule, acts)
        return run(rule.updates[k - 1], u, stored) if k else (u, stored)
    new_u, new = u, stored
    for k in range(len(rule.updates)):
        here = acts == k + 1 if len(rule.updates) > 1 else acts > 0
        its_u, its = run(rule.updates[k], u, stored)
        new_u = torch.where(here, its_u, new_u)
        new = tuple([_where(here, x, old) for x, old in zip(its, new, strict=True)])
    return new_u, new


def _run_started(
    rule: Rule, u: Tensor, stored: Slots, p: Tensor, acts: Any, run: Run
) -> tuple[Tensor, Slots]:
    """A rule that initializes each tensor with its first gradient, on one tensor or a batch."""
    fresh = fresh_ones(rule, u, stored, p)
    if rule.runs.start is None or fresh is None or not (isinstance(acts, Tensor) or acts):
        return _run_selected(rule, u, stored, acts, run)
    start, _ = rule.runs.start
    known = None if isinstance(acts, Tensor) else _read(fresh)
    if known is None:
        started, first = run(start, u, stored)
        update, later = _run_selected(rule, u, stored, acts, run)
        fresh = fresh & (acts > 0) if isinstance(acts, Tensor) else fresh
        pairs = zip(first, later, strict=True)
        return _where(fresh, started, update), tuple([_where(fresh, x, y) for x, y in pairs])

    def acted(one: bool, u: Tensor, own: Slots) -> tuple[Tensor, Slots]:
        return run(start, u, own) if one else _run_selected(rule, u, own, acts, run)

    if len(set(known)) == 1:
        return acted(known[0], u, stored)
    results: list[tuple[Tensor, Slots]] = []
    for i, one in enumerate(known):
        mine = tuple([x if x is None else x[i : i + 1] for x in stored])
        results.append(acted(one, u[i : i + 1], mine))
    columns = zip(*[new for _, new in results], strict=True)
    new = tuple([None if x[0] is None else torch.cat(x) for x in columns])
    return torch.cat([x for x, _ in results]), new


def fresh_ones(rule: Rule, u: Tensor, stored: Slots, p: Tensor) -> Tensor | None:
    """The tensors of a batch that a rule has not initialized yet, by the first columns of the slots
    that its start writes; None if there are none."""
    if rule.runs.start is None or not rule.updates:
        return None
    slots, first = opened(rule, stored, p), u.dim() - p.dim()
    found = [getattr(slots, name) for name in rule.runs.start[1]]
    there = [x for x in found if x is not None and x.numel()]
    columns = [x if x.dim() == first + 1 else x.select(-1, 0).flatten(first) for x in there]
    if not columns:
        return None
    made = [x.any(-1) for x in columns]
    return (made[0] if len(made) == 1 else functools.reduce(torch.logical_or, made)).logical_not()


def _read(flags: Tensor) -> list[bool] | None:
    """Flags as Python bools; None in a trace."""
    if torch.compiler.is_compiling() or modes.recorded():
        return None
    try:
        return flags.reshape(-1).tolist()
    except RuntimeError:  # inside of vmap
        return None


def _where(condition: Tensor, new: Any, old: Any) -> Any:
    """Per element, or per tensor of a batch."""
    if old is None:
        return None
    return torch.where(condition[(...,) + (None,) * (old.dim() - condition.dim())], new, old)


def _run_owned(
    placement: Placement, us: list[Tensor], leaves: Sequence[Leaf], k: int
) -> list[tuple[Tensor, Slots]]:
    """A rule on all updates; each matrix in one process, if they are spread over several.

    In a step that is traced or differentiated every process computes all of them. The same applies
    to packed slots of DTensors, since blocks of shards are not blocks of whole matrices.
    """
    rule, owners = placement.rule, placement.owners
    packed = rule.storage.codecs and any(map(sharding.is_sharded, us))
    if packed or owners is None or modes.traced() or any(u.requires_grad for u in us):
        return run_batched(rule, us, leaves, k)
    parts = [Partition.of(u, owners.group) for u in us]
    slot_parts = [slot_parts_of(leaf.slots[k]) for leaf in leaves]
    known = [part for part in parts if part is not None]
    known_slots = [own for own in slot_parts if own is not None]
    if len(known) < len(parts) or len(known_slots) < len(parts):
        return run_batched(rule, us, leaves, k)

    def run_some(some: list[int], us: list[Tensor], slots: list[Slots]) -> list[Any]:
        rows = zip(some, us, slots, strict=True)
        whole = [leaves[i]._replace(p=u, slots=[()] * k + [x]) for i, u, x in rows]
        return run_batched(rule, us, whole, k)

    here = [sharding.part(u) for u in us]
    slots = [tuple([None if x is None else sharding.part(x) for x in y.slots[k]]) for y in leaves]
    found = run_owned(run_some, here, slots, known, known_slots, spread=True)
    return [
        (_like(u, old), tuple([_like(x, y) for x, y in zip(new, leaf.slots[k], strict=True)]))
        for (u, new), old, leaf in zip(found, us, leaves, strict=True)
    ]


def _like(x: Any, old: Any) -> Any:
    """A shard of a result as a DTensor with the placements of the old one."""
    return sharding.from_part(x, old) if x is not None and sharding.is_sharded(old) else x


def _run_shard(
    rule: Rule, u: Tensor, stored: Slots, p: Tensor, own: Numbers
) -> tuple[Tensor, Slots]:
    """A rule on a sharded tensor: in each process on its matrices of a stack, or on the whole
    tensor, since DTensor does not support all reshapes. Each process keeps its shard of the
    result."""
    view = rule.storage.view
    rows = all(x is None or sharding.is_divided_by_rows(x) for x in stored)
    local = view is not None and rows and view.is_local(u) and view.is_local(p)
    take, put = (sharding.part, _like) if local else (sharding.whole, sharding.placed_like)
    slots = tuple([x if x is None else take(x) for x in stored])
    new_u, new = run_batch(rule, take(u), slots, sharding.part(p) if local else p, own)
    return put(new_u, u), tuple([x if x is None else put(x, stored[i]) for i, x in enumerate(new)])


def run_batched(
    rule: Rule, us: list[Tensor], leaves: Sequence[Leaf], k: int
) -> list[tuple[Tensor, Slots]]:
    """A rule on all updates, those of one shape together. k: its index among the rules."""
    if rule.storage.codecs:
        return _run_unpacked(rule, us, leaves, k)
    alike: dict[Any, list[int]] = {}
    for i, (u, leaf) in enumerate(zip(us, leaves, strict=True)):
        own = tuple([None if s is None else (s.shape, s.dtype) for s in leaf.slots[k]])
        kind = i if sharding.is_sharded(u) else (u.shape, u.dtype, u.device, own, _choice(leaf, k))
        alike.setdefault(kind, []).append(i)
    results: list[tuple[Tensor, Slots]] = [(u, ()) for u in us]
    for members in alike.values():
        for some in batches(members, us[members[0]].numel()):
            first = leaves[some[0]]
            if len(some) == 1:
                u = us[some[0]]
                one = _run_shard if sharding.is_sharded(u) else run_batch
                results[some[0]] = one(rule, u, first.slots[k], first.p, first.own(k))
                continue
            columns = zip(*[leaves[i].slots[k] for i in some], strict=True)
            stored = tuple([None if x[0] is None else torch.stack(x) for x in columns])
            u, new = run_batch(
                rule, torch.stack([us[i] for i in some]), stored, first.p, first.own(k)
            )
            apart = [[None] * len(some) if x is None else _each(x) for x in new]
            for i, own, *slots in zip(some, u.unbind(), *apart, strict=True):
                results[i] = (own, tuple(slots))
    return results


def _each(x: Tensor) -> Sequence[Tensor]:
    """The slots of a batch; copies, if its tensors have one memory: later steps write to them."""
    return x.unbind() if x.stride(0) else x.clone().unbind()


def _run_unpacked(
    rule: Rule, us: list[Tensor], leaves: Sequence[Leaf], k: int
) -> list[tuple[Tensor, Slots]]:
    """The same for a rule with packed slots: decoded before each leaf, and encoded after it."""
    plain = rule.without_codecs()
    whole = [
        leaf._replace(slots=[()] * k + [tuple(opened(rule, leaf.slots[k], leaf.p))])
        for leaf in leaves
    ]
    found: list[tuple[Tensor, Slots]] = []
    results = run_batched(plain, us, whole, k)
    for (u, new), before, leaf in zip(results, whole, leaves, strict=True):
        _, key, _ = parts_of(leaf.own(k))
        same = all(x is y for x, y in zip(new, before.slots[k], strict=True))
        stored = leaf.slots[k]
        found.append((u, stored if same else closed(rule, new, stored, leaf.p, *key)))
    return found


def _choice(leaf: Leaf, k: int) -> Any:
    """The k-th rule's variant for a tensor, if tensors differ in it; its turn if that is
    unknown."""
    own = leaf.numbers[k]
    if type(own) is not Own or len(own.which) < 2:
        return None
    which = own.which[leaf.turns[k]]
    return (leaf.turns[k],) if isinstance(which, Tensor) else which


def batches(members: list[int], size: int) -> list[list[int]]:
    """Tensors of one shape in batches that are small enough for the cache. size: of one.

    Compared with single matrices, ATen orthogonalizes four of 256 × 1024 in 0.58 of the time,
    twelve in 0.67; sixteen of 64 × 64 in 0.1.
    """
    most = min(64, max(4, (1 << 20) // max(size, 1)))
    return [members[at : at + most] for at in range(0, len(members), most)]


def run_batch(
    rule: Rule, u: Tensor, stored: Slots, p: Tensor, numbers: Numbers
) -> tuple[Tensor, Slots]:
    """A batched rule on a batch, or on a single tensor. p: one of the parameters.

    It determines the storage of slots; the rule gets None instead.
    """
    return _run_one(rule, u, stored, p, (None,), numbers)


def run_stored(placements: Sequence[Placement], leaf: Leaf) -> tuple[Tensor, list[Slots]]:
    """A tensor's update and new slots.

    The update stays in compute dtype (complex for a complex parameter), so that adding it to the
    parameter rounds once.
    """
    (result,) = run_all_stored(placements, [leaf])
    return result


def run_all_stored(
    placements: Sequence[Placement], leaves: Sequence[Leaf]
) -> list[tuple[Tensor, list[Slots]]]:
    """`run_stored` for several tensors."""
    found: list[tuple[Tensor, list[Slots]]] = []
    for leaf, (u, new) in zip(leaves, run(placements, leaves), strict=True):
        u, new = _divided(placements, leaf, u, new)
        found.append((as_update(u, leaf.p), new))
    return found


def measure(placements: Sequence[Placement], leaf: Leaf) -> tuple[Tensor, ...]:
    """The measurement of the last rule's `reduce` on one tensor, after the rules before it.

    The last of the leaf's numbers are the result of that rule's `before`.
    """
    if leaf.g.layout is not torch.strided:
        _, leaf = rows_of(placements, leaf._replace(slots=leaf.slots[: len(placements)]))
    _, p, slots, numbers, *_ = leaf
    k = len(placements) - 1
    rule, own, lookback = placements[k].rule, numbers[k], placements[k].lookback
    assert rule.reduce is not None
    _, _, values = parts_of(own)
    known = () if rule.storage.slots is None else opened(rule, slots[k], p)
    earlier = () if lookback is None else (_after(placements[: k - lookback], leaf),)
    given = (
        _after(placements[:k], leaf),
        known,
        weights_of(placements, leaf),
        *earlier,
        *as_args(values),
    )
    return checked_sums("reduce", modes.uncast(p.device.type, rule.reduce, *given))


def _after(placements: Sequence[Placement], leaf: Leaf) -> Tensor:
    """The update of one tensor after some rules, in compute dtype."""
    return run(placements, [leaf])[0][0] if placements else as_real(leaf.g, compute_dtype(leaf.p))


def slots_without_gradient(rule: Rule, p: Tensor, slots: Slots, numbers: Numbers) -> Slots:
    """A tensor's stored slots for one rule after a step without a gradient."""
    which, key, values = parts_of(in_turn(numbers, 0))  # a rule acts in all turns, or in none
    acts = which[0] if which else 1
    shut = not isinstance(acts, Tensor) and not acts > 0
    if rule.runs.absent is None or shut or any(missing_slots(rule, slots)):
        return slots
    new = closed(rule, rule.runs.absent(opened(rule, slots, p), *as_args(values)), slots, p, *key)
    if isinstance(acts, Tensor):
        return tuple([torch.where(acts > 0, x, old) for x, old in zip(new, slots, strict=True)])
    return new


def rows_of(placements: Sequence[Placement], leaf: Leaf) -> tuple[tuple[Tensor, ...], Leaf]:
    """The rows of a sparse COO gradient, and the leaf of these rows: the input of lazy rules.

    Raises:
        RuntimeError: if a slot has other rows.
    """
    g, p = leaf.g.coalesce(), leaf.p
    at = g.indices().unbind()
    for placement, own in zip(placements, leaf.slots, strict=False):
        for s in present([own]):
            if s.shape[: len(at)] != p.shape[: len(at)]:
                raise RuntimeError(
                    f"{placement.name or 'a rule'} does not take sparse gradients, since its slot "
                    f"of shape {tuple(s.shape)} has other rows than the parameter, whose shape is "
                    f"{tuple(p.shape)}; pass dense ones, e.g. from Embedding(..., sparse=False)."
                )
    slots = [tuple([None if s is None else s[at] for s in own]) for own in leaf.slots]
    return at, leaf._replace(g=g.values(), p=p[at], slots=slots)
