"""The plan of a step of an optimizer object, which the next step reuses if it is still valid.

Other code may replace `param_groups`, `state`, gradients and the tensors in them, so every step
reads all of them. The plan is reused as long as they are the same objects; any difference discards
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from functools import partial
from itertools import chain
from operator import is_not
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from functional_optim.adapters.state.capturing import is_capturable
from functional_optim.adapters.state.hyperparameters import (
    PLAIN_NUMBERS,
    Placeholders,
    changed_values,
    constants,
    host_values,
)
from functional_optim.adapters.state.names import named
from functional_optim.adapters.state.storage import storage_of
from functional_optim.adapters.stepping.columns import EXACT, Column, Integers, Readings
from functional_optim.adapters.stepping.leaves import (
    Changes,
    Names,
    checked_leaves,
    live_params,
    own_numbers,
    put_into_stacks,
    signature,
    turns_of_params,
)
from functional_optim.adapters.stepping.loss import extra_of
from functional_optim.adapters.stepping.shared_counts import STEPS, SharedCounts, counts_in
from functional_optim.adapters.stepping.tree_groups import TreeGroup, TreePart
from functional_optim.core import base, modes, sharding
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.lift import check_parts, everywhere
from functional_optim.core.numbers import Numbers
from functional_optim.core.recording import kept_for
from functional_optim.core.totals import reduction_order
from functional_optim.engine.executor import Write
from functional_optim.engine.group import how_to, same_leaves
from functional_optim.engine.guards import TensorGuard
from functional_optim.engine.plan import PlanEntry, PlanLeaf, StepContext, StepPlan, commit

if TYPE_CHECKING:
    from functional_optim.adapters.base import OptimizerBase


FLAGS = {"fused", "capturable"}
"""Hyperparameters that are checked against the parameters when a plan is made."""


class ParamEntry(PlanEntry):
    """Parameters of one group that have stepped together: one step count.

    optimizer: not stored, since it references the plan. group: the index of the group. done: the
    number of finished steps. values: the carried scalars of these parameters. shared: the columns
    of scalars that the optimizer counts once, by key. written: ids of the columns that earlier
    entries write; this one adds its ids.
    """

    def __init__(
        self,
        optimizer: OptimizerBase,
        group: int,
        tx: Leafwise,
        leaves: list[PlanLeaf],
        places: list[int] | None,
        done: float,
        values: Sequence[float],
        shared: dict[str, Column],
        written: set[int],
    ) -> None:
        self.sparse = any(leaf.g.layout is not torch.strided for leaf in leaves)
        how = "apart" if self.sparse else how_to(optimizer.compile)
        super().__init__(tx, leaves, places, how, kept=kept_for(optimizer))
        self.group = group
        self.first = (leaves[0].name, leaves[0].p) if leaves else None
        self.done = done
        states = [leaf.slots for leaf in leaves]
        captured = is_capturable(optimizer, optimizer.param_groups[group])
        made = partial(Column, states, captured=captured)
        self.step: Column | None = None
        if optimizer.counts_steps and leaves:
            self.step = Integers(states, "step") if optimizer.integer_steps else made("step", done)
        self.captured = self.step is not None and self.step.captured
        own = zip(own_numbers(tx) if leaves else (), values, strict=True)
        self.columns = {**shared, **{key: made(key, value) for key, value in own}}
        self.mine = {key for key, column in self.columns.items() if id(column) not in written}
        written.update(map(id, self.columns.values()))
        self.idle: list[Numbers] = [()] * len(tx.layout.carry)
        self.noted: list[tuple[Column, Any]] = []
        self.every = [x for x in (self.step, *self.columns.values()) if x is not None]
        self.fill = self.step.fill() if self.step is not None and not self.columns else None
        """The write of the step count, if it is the only scalar."""

    def time(self) -> Any:
        """The number of this step; on the device, if it is counted there."""
        return self.step.read() + 1 if self.step and self.step.captured else self.done + 1

    def carry(self) -> list[Numbers]:
        """The carried scalars of each rule; without leaves, the initial values of those that are
        not shared."""
        if not self.columns:
            return self.idle
        return [
            tuple(
                [
                    self.columns[key].read() if key in self.columns else first
                    for key, first in zip(keys, placement.rule.carry or (), strict=True)
                ]
            )
            for placement, keys in zip(self.tx.placements, self.tx.layout.carry, strict=True)
        ]

    def writes(self, context: StepContext) -> list[Write]:
        """The writes of the step count and of the carried scalars."""
        if self.fill is not None and context.time < EXACT:
            return [partial(self.fill, context.time)]
        self.noted = [] if self.step is None else [(self.step, context.time)]
        if self.columns:
            carried = self.carried(context)
            self.noted += [(self.columns[key], x) for key, x in carried if key in self.mine]
        if context.skip is not None:
            skip = context.skip
            self.noted = [(own, own.unless(skip, value)) for own, value in self.noted]
        return [write for column, value in self.noted for write in column.writes(value)]

    def can_skip(self) -> bool:
        """Whether a scalar on the device can make the step be skipped."""
        captured = all(column.captured for column in self.every)
        return captured and all(x.skips for x in self.tensors.executors)

    def finish(self) -> bool:
        """Record the writes; True if there are new tensors."""
        self.done += 1
        moved = False
        for column, value in self.noted:
            moved |= column.written(value)
        return moved

    def recount(self, done: float) -> bool:
        """Take in the scalars of the states, after steps of other plans; False if they are no
        longer equal, or a count is none. done: the count of an entry without parameters."""
        for column in self.every:
            values = column.values()
            if values != values[:1] * len(values):
                return False
        if self.step is not None and self.step.tensors:
            self.done = self.step.read()
            self.fill = self.step.fill() if not self.columns else None
        elif self.first is None:
            self.done = done
        return 0 <= self.done < math.inf

    def numbers(self) -> list[Tensor]:
        """The tensors of the step counts and the carried scalars."""
        return [x for column in self.every for x in column.tensors]

    def retake(self, tx: base.GradientTransformation) -> bool:
        """Accept a transformation with other hyperparameters; False if it differs otherwise."""
        if not isinstance(tx, Leafwise):
            return False
        if self.first is None:
            self.tx = tx
            return self.tensors.take_numbers(everywhere(tx.placements, tx.layout))
        part = tx.on(*self.first)
        if part is None or not self.tensors.take_numbers(part.placements):
            return False
        self.tx = part
        return True


def _settings(optimizer: OptimizerBase) -> tuple[Any, ...]:
    """What an object itself says of its steps, which may be replaced between two of them."""
    own = vars(optimizer)
    return own.get("recipe"), own.get("compile"), own.get("stored"), own.get("capturable")


class OptimizerPlan(StepPlan):
    """The plan of an optimizer's step, built from its groups and state.

    Args:
        optimizer: missing entries are added to its state.
        made: receives the new entries of the state; `discard` removes them again.
        last: the plan of the step before. If there was none, slots of rules that take batches may
            be moved.

    Raises:
        TypeError, ValueError: if a gradient or slot does not fit its parameter, or two tensors that
            are written share memory.
    """

    entries: list[ParamEntry]

    def __init__(
        self, optimizer: OptimizerBase, made: Changes, last: OptimizerPlan | None = None
    ) -> None:
        groups = optimizer.param_groups
        recipe = getattr(optimizer, "recipe", None)
        recipe = getattr(recipe, "__func__", recipe)  # a method would reference the optimizer
        own = (type(optimizer).transform, recipe)
        given = [storage_of(optimizer, group) for group in groups]
        self.placeholders = [Placeholders(*own, *filter(callable, [x])) for x in given]
        self.settings = _settings(optimizer)
        self.names = [copy(group.get("param_names")) for group in groups]
        self.hyper = list(map(host_values, groups))
        self.constants = list(map(constants, groups))
        transforms = [
            optimizer.checked_transform({**group, **hyper}, in_step=True)
            for group, hyper in zip(groups, self.hyper, strict=True)
        ]
        chains = [(k, tx) for k, tx in enumerate(transforms) if isinstance(tx, Leafwise)]
        self.wheres = [
            [placement.where for placement in tx.placements] if isinstance(tx, Leafwise) else None
            for tx in transforms
        ]
        turns = turns_of_params(optimizer, chains)
        read, names = Readings(), Names()
        counts = SharedCounts(optimizer, chains)
        self.done = counts.time(read) if counts.counts_steps else None
        self.trees: list[TreeGroup] = []
        found: dict[Any, list[tuple[int, PlanLeaf]]] = {}
        before = 0  # gradients of earlier groups
        for k, (group, tx) in enumerate(zip(groups, transforms, strict=True)):
            live = live_params(group)
            if isinstance(tx, Leafwise):
                for i, part, leaf, new in checked_leaves(optimizer, k, tx, turns, made, names):
                    kind = (k, part, leaf.g.layout, *signature(optimizer, leaf, part, new, read))
                    found.setdefault(kind, []).append((before + i, leaf))
                check_parts(tx.placements, named(group))
            else:
                self.trees.append(TreeGroup(optimizer, k, tx))
                for name, p, g in live:
                    base.check_gradient(name, g, p)
                    names.add(name, p, {})
            before += len(live)
        self.sharing = counts.groups()
        counts.gather()
        counts.start([(k, tx) for k, tx in chains if tx.communicates], made)
        columns = counts.columns(read)
        written: set[int] = set()
        entries = []
        for (k, part, _, done, values, _), members in found.items():
            places = [i for i, _ in members] if len(members) < before else None
            leaves = [leaf for _, leaf in members]
            if last is None:
                put_into_stacks(leaves, part)
            keys = set(chain.from_iterable(part.layout.carry)).difference(own_numbers(part))
            shared = {key: columns[k, key] for key in keys}
            entries.append(
                ParamEntry(optimizer, k, part, leaves, places, done, values, shared, written)
            )
        names.check()
        for k, tx in chains:  # where other processes may have gradients for shared rules
            mine = {key: column for (group, key), column in columns.items() if group == k}
            idle = counts.counts_steps and not entries and counts.known()
            if tx.communicates and (idle or not written.issuperset(map(id, mine.values()))):
                entries.append(
                    ParamEntry(optimizer, k, tx, [], [], self.done or 0.0, (), mine, written)
                )
        self.steps: Column | None = None
        if self.done is not None and self._is_behind(entries):
            live = [(leaf.p, leaf.slots) for members in found.values() for _, leaf in members]
            self.steps = counts.count(self.done, live or counts.known(), made)
        parts = [(tx.placements, tx.layout.counts) for _, tx in chains if tx.communicates]
        parts += [(x.tx.placements, x.counts()) for x in self.trees if x.tx.communicates]
        missing = counts.waiting([(entry.group, entry.tx) for entry in entries])
        super().__init__(entries, missing, reduction_order(parts))
        self.keys = {"step", STEPS}.union(*[keys for _, tx in chains for keys in tx.layout.carry])
        self.guard = self._guard(optimizer)
        self.asking = any("value" in part.tx.extra for part in (*self.entries, *self.trees))
        self.captured = next((entry for entry in entries if entry.captured), None)
        self.mesh = sharding.mesh_of([p for group in groups for p in group["params"]])
        self.others: tuple[OptimizerPlan, ...] = ()
        if last is not None and not self.trees:
            self.others = self.beside((last, *last.others))
            for plan in (last, *self.others):
                plan.others = ()

    @property
    def driven(self) -> bool:
        """Whether its steps may be captured for replay."""
        return self.guard.driven

    def fresh(self, optimizer: OptimizerBase) -> list[Tensor]:
        """The gradients, right after the plan was made."""
        live = [row for group in optimizer.param_groups for row in live_params(group)]
        return [self.guard.apart(g) for _, _, g in live]

    def _guard(self, optimizer: OptimizerBase) -> TensorGuard:
        """The guard that checks whether this plan is valid for the next step: whether parameters,
        gradients and state are still the same objects."""
        params = tuple([tuple(group["params"]) for group in optimizer.param_groups])
        every = list(chain.from_iterable(params))
        states = tuple(optimizer.state.values())
        dicts = [x if isinstance(x, dict) else {} for x in states]
        slots = [
            x
            for mine in dicts
            for name, x in mine.items()
            if name not in self.keys and isinstance(x, Tensor)
        ]
        numbers = [x for entry in self.entries for x in entry.numbers()]
        numbers += [] if self.steps is None else self.steps.tensors
        if self.done is not None:  # which a copy of the optimizer writes, too
            counts = [x for x in counts_in(dicts) if isinstance(x, Tensor)]
            numbers += [x if x._base is None else x._base for x in counts]
        once = tuple({id(x): x for x in numbers}.values())
        live = [p for p in every if p.grad is not None]
        values = tuple([tuple(x.values()) for x in dicts])
        return TensorGuard([p.grad for p in every], live, slots, params, states, values, once)

    def gradients(self, optimizer: OptimizerBase) -> list[Tensor] | None:
        """The gradients, if the plan is still valid; applies new hyperparameters of the groups."""
        found = self.guard.gradients(optimizer.param_groups, optimizer.state, self.constants)
        if found is None or any(map(is_not, self.settings, _settings(optimizer))):
            return None
        if self.names != [group.get("param_names") for group in optimizer.param_groups]:
            return None  # by which recipes select parameters
        grads, changed = found
        return grads if not changed or self._take_numbers(optimizer, changed) else None

    def again(self, optimizer: OptimizerBase) -> list[Tensor] | None:
        """The gradients, if the plan is valid after steps of others; it takes in their counts."""
        steps = [] if self.steps is None else [self.steps]
        every = [*steps, *[column for entry in self.entries for column in entry.every]]
        if not all(column.here for column in every):
            return None
        self.guard.settle()
        grads = self.gradients(optimizer)
        if grads is None:
            return None
        if self.done is not None:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            counts = counts_in([optimizer.state.get(p, {}) for p in params])
            self.done = max(map(float, counts), default=0.0)
        if not all(entry.recount(self.done or 0.0) for entry in self.entries):
            return None
        behind = self.steps is None and self._is_behind(self.entries)
        return None if behind else grads

    def _is_behind(self, entries: Sequence[ParamEntry]) -> bool:
        """Whether the optimizer has made more steps than each parameter of its entries."""
        counts = [entry.done if entry.first else -1.0 for entry in entries]
        return bool(counts) and self.done is not None and self.done > max(counts)

    def _take_numbers(self, optimizer: OptimizerBase, groups: list[int]) -> bool:
        before = self._equal_numbers()
        for k in groups:
            group = optimizer.param_groups[k]
            hyper = self._new_numbers(k, group)
            changed = changed_values(self.hyper[k], hyper)
            if not FLAGS.isdisjoint(changed):
                return False
            if not changed or self.placeholders[k].take(changed):
                self.hyper[k] = hyper
                continue
            make = partial(optimizer.checked_transform, in_step=True)
            tx = self.placeholders[k].transform(make, {**group, **hyper}, changed)
            if isinstance(tx, Leafwise) and not same_leaves(tx.placements, self.wheres[k]):
                return False
            for tree_group in self.trees:
                if tree_group.group == k:
                    tree_group.tx = tx
            for entry in self.entries:
                if entry.group == k and not entry.retake(tx):
                    return False
            self.hyper[k] = hyper
        return self._equal_numbers() == before

    def _equal_numbers(self) -> list[Any]:
        """The hyperparameters that groups have in common: whether they count together depends on
        these."""
        first: dict[Any, int] = {}

        def known(x: Any) -> Any:
            parts = x if type(x) is tuple else (x,)
            plain = all(type(y) in PLAIN_NUMBERS for y in parts)
            return (*map(type, parts), x) if plain else id(x)

        several = self.sharing if len(self.sharing) > 1 else ()
        rows = [(k, self.hyper[k]) for k in several]
        return [[first.setdefault((key, known(x)), k) for key, x in own.items()] for k, own in rows]

    def _new_numbers(self, k: int, group: dict[str, Any]) -> dict[str, Any]:
        """A group's hyperparameters; cheap if a few plain numbers replaced others."""
        seen = self.constants[k]
        if seen is not None and group.keys() == seen.keys():
            changed = {key: x for key, x in group.items() if seen[key] is not x}
            if all(type(x) in PLAIN_NUMBERS for x in changed.values()):
                seen.update(changed)
                return {**self.hyper[k], **changed}
        self.constants[k] = constants(group)
        return host_values(group)

    def can_skip(self) -> bool:
        """Whether a scalar on the device can make the step be skipped, without being read."""
        rest = self.missing_grad or self.trees or self.steps is not None
        return not rest and all(entry.can_skip() for entry in self.entries)

    def run(
        self,
        optimizer: OptimizerBase,
        grads: list[Tensor],
        loss: Any,
        made: Changes,
        skip: Tensor | None = None,
    ) -> None:
        """Step all tensors, or none, and store this plan for the next step.

        grads: the result of the plan's `gradients`. made: emptied once the step is being written.
        skip: not 0 if nothing is to be written; only if `can_skip`.
        """
        extra = extra_of(loss, self.mesh) if self.asking else {}
        for entry in self.entries:
            if entry.sparse:
                group = optimizer.param_groups[entry.group]
                places = range(len(grads)) if entry.places is None else entry.places
                known = {i: optimizer.dense_gradient(grads[i], group) for i in places}
                grads = [known.get(i, g) for i, g in enumerate(grads)]
        done = None if self.done is None else self.done + 1
        shared = done if self.captured is None or done is None else self.captured.time()
        trees = self._tree_parts(extra, bool(grads)) if self.trees else ()
        _, writes = self.writes(grads, extra, shared, trees, skip)
        if made:
            writes.insert(0, made.clear)
        if self.steps is not None:
            writes += self.steps.writes(done)
        commit(writes)
        if self.steps is not None:
            self.steps.written(done)
        if self.entries:
            self.done = done
        moved = bool(self.trees)
        for entry in self.entries:
            moved |= entry.finish()
        if moved:
            self.guard = self._guard(optimizer)
        else:
            self.guard.settle()
        optimizer.__dict__["_plan"] = self

    def _tree_parts(self, extra: dict[str, Any], elsewhere: bool) -> list[TreePart]:
        """The parts of the groups that are stepped as trees. elsewhere: whether there is any
        gradient."""
        taking = [tree_group for tree_group in self.trees if tree_group.takes_part(elsewhere)]
        others = any(
            placement.rule.reduce
            for entry in self.entries
            for placement in entry.tensors.placements
        )
        alone = not (self.order or others or len(taking) > 1)
        return [TreePart(x, extra, elsewhere, alone=alone, order=self.order) for x in taking]


def valid_plan(
    last: OptimizerPlan | None, optimizer: OptimizerBase
) -> tuple[OptimizerPlan | None, list[Tensor] | None]:
    """The plan of a step and its gradients: that of the last step, or of an earlier one in which
    the same gradients were missing. The last one and None if there is none."""
    grads = None if last is None else last.gradients(optimizer)
    if last is None or grads is not None or not last.others or modes.intercepted():
        return last, grads
    kinds = tuple([type(p.grad) for group in optimizer.param_groups for p in group["params"]])
    for plan in last.others:
        grads = plan.again(optimizer) if plan.guard.kinds == kinds else None
        if grads is not None:
            plan.others = (last, *[x for x in last.others if x is not plan])
            last.others = ()
            return plan, grads
    return last, None
