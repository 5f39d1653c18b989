"""Rules for one tensor, lifted to trees: the pure driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.core import base, memory, modes, sharding
from functional_optim.core.first_slots import init_slots, slots_like
from functional_optim.core.numbers import Numbers
from functional_optim.core.paths import check_choices, chosen
from functional_optim.core.rows import (
    Kind,
    Row,
    absent_slots,
    check_groups,
    grouped,
    in_turns,
    measured,
    stepped,
    summed_elsewhere,
)
from functional_optim.core.rule import Placement, takes_turns
from functional_optim.core.scalars import Caster, StepScalars
from functional_optim.core.state_keys import Layout
from functional_optim.core.storage import stands_beside
from functional_optim.core.totals import given_totals
from functional_optim.core.traits import check_part, check_sizes, of_package
from functional_optim.kernels.private import keep_numbers_open


class State(NamedTuple):
    """The state of a fused chain.

    step: 0-dim int64, the number of finished steps.
    carry: dict of 0-dim tensors, the carried scalars.
    slots: dict of trees like the parameters, by slot name.
    hyper: dict of 0-dim float64 tensors, the hyperparameters of the last step, or of the first
        before it. For reading, with `fo.get`: writing to them changes nothing.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx, w = fo.adam(lr=0.1), {"w": torch.tensor([1.0])}
        >>> updates, state = tx.update({"w": torch.tensor([2.0])}, tx.init(w), w)
        >>> state.slots["exp_avg"]
        {'w': tensor([0.2000])}
        >>> int(state.step), float(state.hyper["lr"])
        (1, 0.1)
    """

    step: Tensor
    carry: dict[str, Tensor]
    slots: dict[str, Any]
    hyper: dict[str, Tensor]


class Look:
    """Trees that were checked once: trees that look the same need no checks."""

    def __init__(self) -> None:
        self.known: tuple[Any, Callable[..., bool], list[int]] | None = None

    def note(self, trees: Any) -> None:
        """Store trees that were checked, instead of earlier ones; plain tensors only."""
        leaves, structure = optree.tree_flatten(trees)
        plain = all(isinstance(x, Tensor) and memory.has_address(x) for x in leaves)
        self.known = (
            (structure, memory.same_looks(leaves), list(map(_bytes, leaves))) if plain else None
        )

    def same(self, trees: Any) -> bool:
        """Whether trees have the structure, types, dtypes, sizes, strides, devices and storages of
        those."""
        if self.known is None:
            return False
        structure, check, sizes = self.known
        leaves, own = optree.tree_flatten(trees)
        if own != structure:
            return False
        strided = torch.strided  # on a nested tensor torch's guards crash the process
        plain = [isinstance(x, Tensor) and x.layout is strided and not x.is_nested for x in leaves]
        return all(plain) and check(*leaves) and list(map(_bytes, leaves)) == sizes


def _bytes(x: Tensor) -> int:
    """The bytes of a tensor's storage from its first element on."""
    size, first = x.untyped_storage().nbytes(), int(x.storage_offset())
    return size - first * x.element_size() if first else size


def frozen(u: Tensor, slots: Any, p: Tensor) -> tuple[Tensor, Any]:
    """The update of a rule that freezes its leaves."""
    return u, slots


def freezes(placement: Placement) -> bool:
    """Whether a rule freezes its leaves."""
    return placement.rule.updates[0] is frozen


def route(placements: tuple[Placement, ...], path: str, leaf: Any) -> tuple[int, ...] | None:
    """The indices of the rules that act on a leaf; None if it is frozen."""
    places = [i for i, x in enumerate(placements) if chosen(x.where, path, leaf)]
    return None if any(freezes(placements[i]) for i in places) else tuple(places)


def everywhere(placements: tuple[Placement, ...], layout: Layout) -> tuple[Placement, ...]:
    """A chain's rules for a leaf to which all of them apply."""
    return part_of(placements, layout, tuple(range(len(placements))))[0]


def part_of(
    placements: tuple[Placement, ...], layout: Layout, places: tuple[int, ...]
) -> tuple[tuple[Placement, ...], Layout]:
    """Some of a chain's rules, and their names in the chain."""
    mine = []
    for at, i in enumerate(places):
        gate, back = placements[i].gate, placements[i].lookback
        if back is not None:
            back = sum([i - back <= j < i for j in places])
        gate = at - places.index(i - gate) if gate else 0
        mine.append(placements[i]._replace(where=(), gate=gate, lookback=back))
    return tuple(mine), layout.pick(places)


def lift(
    placements: tuple[Placement, ...], layout: Layout
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`init` and `update` of a chain of rules, over trees."""
    keys, routed = layout.keys, layout.routed
    every = tuple(range(len(placements)))
    meets = any(x.reduce_groups for x in placements)
    spread = takes_turns(placements)
    look = Look()

    def kind_of(places: tuple[int, ...]) -> Kind:
        mine, names = part_of(placements, layout, places) if routed else (placements, layout)
        return Kind.of(mine, places, names.slots, keys)

    def init(params: Any) -> State:
        base.check_params(params)
        leaves = tree.leaves(params)
        device = base.default_device(leaves)

        def first(path: str, p: Tensor) -> tuple[Any, ...]:
            places = route(placements, path, p) if routed else every
            empty = (None,) * len(keys)
            if places is None:
                return empty
            kind = kind_of(places)
            new = [init_slots(x.rule, p, path) for x in kind.placements]
            return memory.separate(kind.put(empty, new), p)

        check_parts(placements, tree.items(params))
        columns = tree.map_unzip_with_path(len(keys), first, params)
        choices = [choice for placement in placements for choice in placement.choices()]
        if choices:
            check_choices((choices, dict(tree.items(params))))
        carry = {
            key: base.batched(numeric.stored(value, device), leaves)
            for (rule, *_), own in zip(placements, layout.carry, strict=True)
            for key, value in zip(own, rule.carry or (), strict=True)
        }
        step = base.first_step(leaves)
        hyper = {
            key: _to_read(name, value, 1.0, device)
            for (rule, *_), own in zip(placements, layout.hyper, strict=True)
            for key, (name, value) in zip(own, rule.each_hyper(), strict=True)
        }
        return State(step, carry, dict(zip(keys, columns, strict=True)), hyper)

    def update(grads: Any, state: State, params: Any = None, **extra: Any) -> tuple[Any, State]:
        base.check_extra(
            extra, tuple([name for (rule, *_) in placements for name in rule.reads.extra])
        )
        check_state(placements, layout, state)
        base.check_passed(params)
        columns = [state.slots[key] for key in keys]
        given, seen = (params, grads, columns), False
        if not torch.compiler.is_compiling():
            seen = not modes.intercepted() and look.same(given)
            if not seen:
                check_trees(placements, layout, params, grads, state)
        rows: list[Row | None] = []
        kinds: dict[tuple[int, ...], Kind] = {}

        def gather(path: str, p: Tensor, g: Any, *slots: Any) -> None:
            places = route(placements, path, p) if routed else every
            if places is None:
                rows.append(None)
                return
            if places not in kinds:
                kinds[places] = kind_of(places)
            kind = kinds[places]
            g = g if type(g) is Tensor else sharding.gradient_of(p, g)
            rows.append(Row(kind, p, g, kind.pick(slots)))

        if routed:
            tree.map_with_path(gather, params, grads, *columns)
        else:
            tree.map(partial(gather, ""), params, grads, *columns)
        if spread:
            rows = in_turns(rows)
        traced, count = modes.traced(), state.step + 1
        t = numeric.float64(count) if traced else known_number(count)
        if type(t) is float and t < 1:
            raise ValueError(
                f"the step of the state is {t - 1:g}; it must be the number of finished steps, 0 "
                "or more."
            )
        totals = given_totals()
        before = None if totals is None else totals.enter(placements)
        if not rows and not meets:
            return grads, base.replaced(state, step=count)

        groups = grouped(rows)
        used, names, at = placements, layout, every
        if meets or (totals and totals.everyone):  # other parts may have gradients
            used = everywhere(placements, layout)
        elif routed or not groups:  # without gradients, rules do not measure or count
            at = tuple(sorted({i for group in groups for i in group.kind.at}))
            used, names = part_of(placements, layout, at)
            groups = [group.reindexed(at) for group in groups]
        step = StepScalars(used, t, carry_of(names, state.carry, known=not traced), extra)
        if not seen and not traced:
            check_groups(groups, step)
            if of_package(placements):
                look.note(given)
            else:
                for group in groups:
                    check_sizes(group.kind.placements, [row.p for row in group.rows])
        while step.proceed():
            if totals is None or before is None or totals.alone:
                step.advance(measured(groups, step))
                continue
            i = len(step.numbers)
            key = (used[i].name, before[used[i].name] + names.counts[i])
            step.advance(summed_elsewhere(groups, step, key, totals))
        cast = Caster(step.numbers)
        found = stepped(groups, cast)
        if any(x.rule.runs.absent is not None for x in used):
            for k, row in enumerate(rows):
                if row is not None and row.g is None:
                    found[k] = (None, absent_slots(row, at, cast(row.p)))
        supply = iter(range(len(rows)))

        def leaf(p: Tensor, g: Any, *slots: Any) -> tuple[Any, ...]:
            k = next(supply)
            row = rows[k]
            if row is None or k not in found:
                return (None, *slots)
            u, new = found[k]
            own = row.kind.put(slots, new)
            if seen:
                own = _kept_apart(own, g, p)
            elif not torch.compiler.is_compiling():
                own = memory.separate(own, g, p)
            return (u, *own)

        updates, *new = tree.map_unzip(1 + len(columns), leaf, params, grads, *columns)
        carried = {**state.carry, **stored_carry(used, names, state.carry, step.carried)}
        hyper = {
            key: _to_read(name, value, step.time_of(i), state.step.device)
            for i, ((rule, *_), own) in enumerate(zip(used, names.hyper, strict=True))
            for key, (name, value) in zip(own, rule.each_hyper(), strict=True)
        }
        if len(at) < len(every):  # otherwise the old ones are not inputs of a compiled step
            hyper = {**{key: x.detach() for key, x in state.hyper.items()}, **hyper}
        slots = dict(zip(keys, new, strict=True))
        if torch.compiler.is_compiling():
            keep_numbers_open()
        return updates, State(count, carried, slots, hyper)

    return init, update


def _kept_apart(results: Sequence[Any], *given: Tensor | None) -> list[Any]:
    """Results, plain tensors, with copies of those in the memory of a given tensor."""
    places = [x.untyped_storage().data_ptr() for x in given if x is not None]
    return [
        x.clone() if x is not None and x.untyped_storage().data_ptr() in places else x
        for x in results
    ]


def _to_read(name: str, hyper: numeric.Hyper, t: Any, device: torch.device) -> Tensor:
    try:
        value = numeric.at(hyper, t)
    except numeric.NotANumber as error:
        raise error.among([(name, hyper)]) from None
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)  # not the user's own memory
    return torch.full((), value, dtype=torch.float64, device=device)


def check_matrices(acting: Iterable[tuple[Sequence[Placement], Tensor, str]]) -> None:
    """Raise ValueError or TypeError if a rule for matrices does not take a parameter.

    acting: the rules of each parameter, the parameter and its path.
    """
    tried: set[Any] = set()
    for placements, p, path in acting:
        for rule, *_ in placements:
            kind = (id(rule), p.shape, p.dtype)
            if rule.storage.view is None or kind in tried:
                continue
            rule.storage.view.check(rule.name, p.shape, path)
            try:  # a small one: operations on the meta device import sympy
                init_slots(rule, torch.zeros((1,) * p.dim(), dtype=p.dtype, device="cpu"), path)
            except Exception:
                with suppress(RuntimeError):  # of an init that reads values
                    slots_like(rule, p, path)
            tried.add(kind)


def check_parts(placements: tuple[Placement, ...], named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if a rule would treat a shard of the parameters as the whole."""
    found = list(named)
    flattened = sharding.flat_parts([p for _, p in found])
    for (path, p), flat in zip(found, flattened, strict=True):
        if flat or sharding.is_sharded(p):
            for i in route(placements, path, p) or ():
                check_part(placements[i], path, p, flat=flat)


def carry_of(layout: Layout, stored: dict[str, Tensor], *, known: bool) -> list[Numbers]:
    """The carried scalars of each rule, in float64. known: as Python floats, where possible."""
    read = known_number if known else numeric.float64
    return [tuple([read(stored[key]) for key in keys]) for keys in layout.carry]


def known_number(x: Tensor) -> Any:
    """A scalar of a state as a Python float; one that is on another device, or has derivatives, as
    a 0-dim float64 tensor."""
    known = type(x) is Tensor and x.device.type == "cpu" and not x.requires_grad
    return float(x) if known and x.numel() == 1 else numeric.float64(x)


def stored_carry(
    placements: Sequence[Placement], layout: Layout, old: dict[str, Tensor], new: Iterable[Numbers]
) -> dict[str, Tensor]:
    """New carried scalars under their keys, in the dtype of the old ones; counts in float64.

    Copies: one may be the tensor of a hyperparameter, which the user may fill later.
    """
    counts = count_keys(placements, layout)

    def stored(key: str, value: Any) -> Tensor:
        dtype = torch.float64 if key in counts else old[key].dtype
        return numeric.stored(value, old[key].device, dtype=dtype)

    return {
        key: stored(key, value)
        for keys, values in zip(layout.carry, new, strict=True)
        for key, value in zip(keys, values, strict=True)
    }


def count_keys(placements: Sequence[Placement], layout: Layout) -> set[str]:
    """The keys of carried scalars that are counts; an older state may have them in float32."""
    return {
        key
        for (rule, *_), keys in zip(placements, layout.carry, strict=True)
        for key, first in zip(keys, rule.carry or (), strict=True)
        if type(first) is int
    }


def check_trees(
    placements: Sequence[Placement], layout: Layout, params: Any, grads: Any, state: State
) -> None:
    """Raise an error unless gradients and slots match the parameters."""
    base.check_grads(params, grads)
    known = list(zip(tree.items(params), tree.rows(params, grads), strict=True))
    routes = [route(tuple(placements), path, p) or () for (path, p), _ in known]
    for i, (placement, keys) in enumerate(zip(placements, layout.slots, strict=True)):
        # rules without a common leaf may have slots of the same name
        acts = [i in places for places in routes]
        away = placement.rule.storage.home is not None
        for k, key in enumerate(keys):
            of = (
                params,
                state.slots[key],
                "params",
                f"the slot {key!r} of the state",
                "pass the state that this chain's own init returned for these parameters",
            )
            tree.check_same(*of, shapes=False)
            rows = tree.rows(params, state.slots[key])
            alike = [
                own and stands_beside(placement.rule, k, slot, p, path)
                for own, (p, slot), ((path, _), _) in zip(acts, rows, known, strict=True)
            ]
            tree.check_same(*of, shapes=alike)
            for ((path, p), (_, g)), (_, slot), own in zip(known, rows, alike, strict=True):
                if own and g is not None:
                    base.check_slot(path, key, slot, p, away=away)


def check_state(placements: Sequence[Placement], layout: Layout, state: Any) -> None:
    """Raise an error unless the state belongs to a chain of these rules."""
    mine = set(layout.keys)
    if not isinstance(state, State):
        names = ", ".join(x.name or "?" for x in placements)
        raise TypeError(
            f"chain({names}) got a state of type {type(state).__name__}; pass the state that this "
            "chain's own init returned, in this order: update(grads, state, params)."
        )
    if state.slots.keys() != mine:
        names = ", ".join(x.name or "?" for x in placements)
        raise ValueError(
            f"chain({names}) keeps the slots {sorted(mine)}, but got a state with "
            f"{sorted(state.slots)}; pass the state that this chain's own init returned."
        )
    if not isinstance(state.step, Tensor):
        raise TypeError(
            f"the step of the state is {state.step!r}; it must be a 0-dim tensor of "
            "int64, the number of finished steps, e.g. torch.tensor(3)."
        )
    if state.step.numel() != 1:
        raise ValueError(
            f"the state is one of {state.step.numel()} models, made by torch.func.vmap(tx.init); "
            "pass it to torch.func.vmap(tx.update)."
        )
    missing = [key for keys in layout.carry for key in keys if key not in state.carry]
    if missing:
        names = ", ".join(x.name or "?" for x in placements)
        raise ValueError(
            f"chain({names}) carries the numbers {', '.join(missing)}, which the state lacks; pass "
            "the state that this chain's own init returned."
        )
