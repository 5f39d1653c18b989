"""Stepping many tensors in place: with compiled kernels whatever the model, or eagerly.

A cohort is a list of tensors that share rules and numbers. Those of one kind form a bank, which one
kernel serves; the others are stepped one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor

from functional_optim import base, kernels, sharded
from functional_optim.banks import Bank, Pack, fits, write
from functional_optim.bundles import Bundle
from functional_optim.looks import PLAIN
from functional_optim.progress import Caster, Progress, over_groups, sum_parts
from functional_optim.rules import (
    Leaf,
    Link,
    Numbers,
    Slots,
    check_lazy,
    measure,
    present,
    rows_of,
    run_all_stored,
    run_stored,
    settled,
)

How = Literal["compiled", "strict", "eager", "apart"]

Compile = bool | Literal["strict"]
"""What a user says of kernels."""


def how_to(compile: Compile) -> How:
    """How a cohort is run that a user wants compiled so.

    Raises:
        ValueError: for anything but True, False and "strict".
    """
    if compile == "strict":
        return "strict"
    if isinstance(compile, bool):
        return "compiled" if compile else "eager"
    raise ValueError(
        f'compile must be True, False, or "strict" (an error where True falls back with a '
        f"warning), but got {compile!r}."
    )


class Cohort:
    """Tensors that share rules and numbers, ready to be stepped in place again and again.

    Args:
        links: the rules.
        params: their tensors; all different.
        slots: for each tensor, the slots of each link.
        grads: gradients like those of the steps to come: in type, dtype, shape and strides.
        how: "compiled" uses kernels where the layout of a tensor allows; "strict", too, and raises
            where one cannot be compiled; "eager" runs the rules on tensors joined or cut; "apart"
            on every tensor as it is, which can be traced.
        replace: put new tensors into `slots` instead of writing into the old ones, so that autograd
            can go back through the step.
        counts: of each link, the how manieth of its name it is in the whole chain.
    """

    def __init__(
        self,
        links: tuple[Link, ...],
        params: list[Tensor],
        slots: list[list[Slots]],
        grads: list[Tensor],
        *,
        how: How,
        counts: tuple[int, ...],
        replace: bool = False,
    ) -> None:
        self.links = links
        self.counts = counts
        self.gated = any(link.gate for link in links)
        self.params = params
        self.slots = slots
        self.replace = replace
        self.loose: list[int] = []
        self.written: list[Tensor] = []
        flat = all(link.flat for link in links)
        kinds: dict[Any, list[int]] = {}
        for i, p in enumerate(params):
            mine = present(slots[i])
            joined = how in ("compiled", "strict") or (how == "eager" and flat)
            if not (joined and type(grads[i]) in PLAIN and fits([p, *mine], flat)):
                self.loose.append(i)
                continue
            dtypes = tuple([x.dtype for x in (grads[i], p, *mine)])
            holes = tuple([tuple([slot is None for slot in own]) for own in slots[i]])
            shape = None if flat else (tuple(p.shape), p.stride())
            kinds.setdefault((dtypes, holes, p.device, shape), []).append(i)
            self.written.append(p)
        self.strict = how == "strict"
        self.banks: list[Bank] = []
        self.bundles: list[Bundle] = []
        for (*_, shape), members in kinds.items():
            if how == "eager":
                self.bundles.append(Bundle(members, params, slots))
                continue
            flat = shape is None
            bank = Bank(members, params, slots, grads, flat=flat, strict=self.strict)
            self.banks.append(bank)

    def relink(self, links: tuple[Link, ...]) -> bool:
        """Take links with other numbers; False, and nothing done, if their code differs."""
        if len(links) != len(self.links) or not all(
            _same_code(a, b) for a, b in zip(links, self.links, strict=True)
        ):
            return False
        self.links = links
        return True

    def _pack(self, numbers: list[Numbers]) -> Pack:
        """The numbers of a step, with the links that read them: those behind shut gates do not."""
        links, shut = self.links[: len(numbers)], None
        if self.gated:
            said = [own[0] for link, own in zip(links, numbers, strict=True) if link.gate]
            if not any(isinstance(x, Tensor) for x in said):
                shut = tuple([not x > 0 for x in said])
                links, numbers = settled(links, numbers)
        return Pack(links, numbers, shut)

    def measure(self, grads: list[Tensor], numbers: list[Numbers]) -> list[Sequence[Any]]:
        """What the link after the known numbers measures, in parts still to be summed."""
        pack = self._pack(numbers)
        parts: list[Sequence[Any]] = []
        if self.loose or self.bundles:
            cast = Caster(pack.numbers)
            for i in self.loose:
                p = self._seen(i)
                parts.append(measure(pack.links, grads[i], p, self.slots[i], cast(p)))
            for bundle in self.bundles:
                parts += bundle.measure(pack.links, grads, cast(bundle.params[0]))
        return parts + [bank.measure(grads, pack) for bank in self.banks]

    def prepare(self, numbers: list[Numbers]) -> None:
        """Compile what `apply` needs, which must not fail halfway."""
        pack = self._pack(numbers)
        for bank in self.banks:
            bank.prepare(pack)

    def apply(self, grads: list[Tensor], numbers: list[Numbers]) -> None:
        """Step every tensor and its slots, in place."""
        pack = self._pack(numbers)
        if self.loose or self.bundles:
            self._apply_eagerly(grads, pack, Caster(pack.numbers))
        for bank in self.banks:
            bank.step(grads, pack)
        if self.written:  # through memory alone, or through views made without autograd
            torch.autograd.graph.increment_version(self.written)

    def _apply_eagerly(self, grads: list[Tensor], pack: Pack, cast: Caster) -> None:
        links = pack.links
        for bundle in self.bundles:
            bundle.step(links, pack.shut, grads, cast(bundle.params[0]))
        dense = [i for i in self.loose if grads[i].layout is torch.strided]
        for i in self.loose:
            if grads[i].layout is not torch.strided:
                p = self.params[i]
                _write_rows(links, grads[i], p, self.slots[i], cast(p))
        for some in [dense] if any(link.stack for link in links) else [[i] for i in dense]:
            self._apply_loose(some, grads, links, cast)

    def _apply_loose(
        self, members: list[int], grads: list[Tensor], links: tuple[Link, ...], cast: Caster
    ) -> None:
        leaves = [
            Leaf(grads[i], self._seen(i), self.slots[i], cast(self.params[i])) for i in members
        ]
        for i, (u, new) in zip(members, run_all_stored(links, leaves), strict=True):
            p, mine = self.params[i], self.slots[i]
            if self.replace:
                p.add_(u)
                self.slots[i] = new
            else:
                write(p, base.add(p, u), mine, new)

    def _seen(self, i: int) -> Tensor:
        """A parameter as rules read it: autograd keeps that, and the tensor is about to change."""
        return self.params[i].clone() if self.replace else self.params[i]


class Turn(Progress):
    """A cohort's part in one step: its gradients, and the progress of its numbers."""

    def __init__(
        self, cohort: Cohort, grads: list[Tensor], t: Any, carry: Any, extra: dict[str, Any]
    ) -> None:
        super().__init__(cohort.links, t, carry, extra)
        self.cohort = cohort
        self.grads = grads
        if cohort.loose:
            self.grads = list(map(sharded.gradient_of, cohort.params, grads))


def advance(turns: Sequence[Turn], agenda: Agenda = ()) -> None:
    """Step all cohorts of an optimizer once, in place; each turn then has what it carries on.

    A measurement of one name is summed over all cohorts, so a global norm spans parameter groups.

    agenda: the measurements that are summed over processes, too. All processes go through all of
    them in this order, also where nothing is measured: one that is not met would keep the others
    waiting.
    """
    left = list(agenda)
    while (waiting := [turn for turn in turns if turn.proceed()]) or left:
        key = _next_measurement(waiting, left)
        meeting = waiting if key is None else [x for x in waiting if _ahead(x)[0] == key]
        parts: list[Sequence[Any]] = []
        for turn in meeting:
            if not turn.is_shut():
                parts += turn.cohort.measure(turn.grads, turn.to_measure())
        total = _total(parts) if parts else None
        if left and key == left[0][0]:
            total = over_groups(left.pop(0)[1], total)
        for turn in meeting:
            turn.advance(total)
    for turn in turns:
        if turn.cohort.strict:
            turn.cohort.prepare(turn.numbers)
    for turn in turns:
        turn.cohort.apply(turn.grads, turn.numbers)


def _total(parts: list[Sequence[Any]]) -> Numbers:
    """The sum of measurements, some of them Python numbers: such a number itself where it can be.

    On another device it stays a tensor, so that nobody waits for it, and so it does where autograd
    records it, or somebody traces.
    """
    numbers = [part for part in parts if isinstance(part[0], float)]
    total = [sum(column) for column in zip(*numbers, strict=True)]
    tensors = [part for part in parts if not isinstance(part[0], float)]
    if tensors:
        sums = sum_parts(tensors)
        traced = torch.compiler.is_compiling() or kernels.bypass()
        if not (torch.is_grad_enabled() or traced):
            sums = tuple([x.item() if x.device.type == "cpu" else x for x in sums])
        total = [x + y for x, y in zip(total, sums, strict=True)] if numbers else list(sums)
    return tuple(total)


Key = tuple[str, int]
"""A measurement: the name of its link, and the how manieth of it."""

Agenda = Sequence[tuple[Key, Link]]


def agenda_of(chains: Iterable[tuple[Sequence[Link], Sequence[int]]]) -> Agenda:
    """The measurements that links sum over processes, in an order that suits all chains of them.

    chains: links, and of each the how manieth of its name it is.
    """
    known: dict[Key, Link] = {}
    plans: list[list[Key]] = []
    for links, counts in chains:
        pairs = zip(links, counts, strict=True)
        own = {(x.name, n): x for x, n in pairs if x.over and x.reduce is not None}
        known.update(own)
        plans.append(list(own))
    order: list[Key] = []
    while plans := [plan for plan in plans if plan]:
        order.append(_in_reach(plans))
        plans = [plan[1:] if plan[0] == order[-1] else plan for plan in plans]
    return [(key, known[key]) for key in order]


def _next_measurement(waiting: list[Turn], left: Agenda) -> Key | None:
    """The next measurement; None: that of the only cohort that waits for one."""
    if len(waiting) == 1 and not left:
        return None
    plans = [_ahead(turn) for turn in waiting]
    if left:
        plans.append([key for key, _ in left])
    return _in_reach(plans)


def _in_reach(plans: list[list[Key]]) -> Key:
    """The first of one plan that nobody has still before it out of reach."""
    for key, *_ in plans:
        if all(key not in plan[1:] for plan in plans):
            return key
    names = " and ".join(sorted({plan[0][0] for plan in plans}))
    raise ValueError(
        f"two parameter groups measure {names} in different orders, so no sum over both exists; "
        "put these links in the same order in both."
    )


def _ahead(turn: Turn) -> list[Key]:
    """The measurements that a cohort still needs: the name, and the how manieth of it."""
    return [
        (link.name, turn.cohort.counts[i])
        for i, link in enumerate(turn.links)
        if link.reduce is not None and i >= len(turn.numbers)
    ]


def _write_rows(
    links: tuple[Link, ...], g: Tensor, p: Tensor, mine: list[Slots], numbers: list[Numbers]
) -> None:
    """Step the rows that have a sparse gradient, in place."""
    check_lazy(links)
    rows = rows_of(g, p, mine)
    u, new = run_stored(links, rows.g, rows.p, rows.slots, numbers)
    p.index_put_(rows.at, base.add(rows.p, u))
    for own, fresh in zip(mine, new, strict=True):
        for slot, value in zip(own, fresh, strict=True):
            if slot is not None:
                slot.index_put_(rows.at, value)


def _same_code(a: Link, b: Link) -> bool:
    """Do two links differ in their numbers at most?"""
    return (
        a.name == b.name
        and a.slots is b.slots
        and a.tail == b.tail
        and a.gate == b.gate
        and a.back == b.back
        and a.flat == b.flat
        and a.over == b.over
        and _same_function(a.update, b.update)
        and _same_function(a.reduce, b.reduce)
    )


def same_leaves(links: tuple[Link, ...], wheres: Sequence[Any] | None) -> bool:
    """Do links act on the leaves that these choices select, as far as their code says?"""
    if wheres is None or len(links) != len(wheres):
        return False
    for link, where in zip(links, wheres, strict=True):
        if len(link.where) != len(where):
            return False
        for (a, x), (b, y) in zip(link.where, where, strict=True):
            if x != y or a.patterns != b.patterns or not _same_function(a.predicate, b.predicate):
                return False
    return True


def _same_function(a: Any, b: Any) -> bool:
    """Are two functions one code with the same constants?"""
    if a is b:
        return True
    if type(a) is not FunctionType or type(b) is not FunctionType or a.__code__ is not b.__code__:
        return False
    return (
        a.__defaults__ == b.__defaults__
        and a.__kwdefaults__ == b.__kwdefaults__
        and all(map(_same_cell, a.__closure__ or (), b.__closure__ or ()))
    )


def _same_cell(a: Any, b: Any) -> bool:
    x, y = a.cell_contents, b.cell_contents
    if x is y or _same_function(x, y):
        return True
    if type(x) is not type(y):
        return False
    return x == y if type(x) in (bool, int, str) else kernels.static_key(x) == kernels.static_key(y)
