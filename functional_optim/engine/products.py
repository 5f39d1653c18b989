"""Products and decompositions of matrices: by ATen, on stacks of equal shapes.

The rules around them run in kernels as ever, before each product and after the last. Only the last
of these kernels writes what is stepped: a product that raises leaves everything as it was.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import kernels
from functional_optim.core import memory, modes
from functional_optim.core.execution import Leaf, batches, fresh_ones, run, run_batch, run_batched
from functional_optim.core.numbers import Numbers, form_of, in_turn
from functional_optim.core.ownership import Partition, Partitions, run_owned
from functional_optim.core.recording import Body
from functional_optim.core.rule import Placement, Rule
from functional_optim.core.scalars import BoundScalars, Caster
from functional_optim.core.storage import Slots, Storage, compute_dtype, present
from functional_optim.core.views import MATRICES
from functional_optim.engine.executor import Executor, How, Runner, Write
from functional_optim.engine.native import KernelExecutor, in_memory, kind_of, reason
from functional_optim.kernels.private import DispatchMode


class Between(NamedTuple):
    """The slot of `PUT` and `TAKE`. update: the output of a part, like the parameter, but in the
    compute dtype."""

    update: Tensor


def _put(u: Tensor, slots: Between, p: Tensor) -> tuple[Tensor, Between]:
    return u, Between(u)


def _take(u: Tensor, slots: Between, p: Tensor, *numbers: Any) -> tuple[Tensor, Between]:
    return slots.update, slots


PUT = Placement(Rule((_put,), storage=Storage(slots=Between)))
"""Stores the update in a slot."""

TAKE = Placement(Rule((_take,), storage=Storage(slots=Between)))
"""Continues with the update in its slot, and ignores the scalars of the rule that it replaces."""


class ProductExecutor(Executor):
    """Rules that multiply matrices, and others around them, on plain tensors of any shapes, where
    kernels are native or Triton's."""

    through_memory = True

    def __init__(self, group: Any, members: list[int], grads: list[Tensor]) -> None:
        super().__init__(group, members, grads)
        self.staged: dict[Any, StagedStep] = {}
        self.stacks: dict[int, Stacks | OwnedStacks] = {}

    @classmethod
    def accepts(
        cls, placements: tuple[Placement, ...], g: Tensor, p: Tensor, slots: list[Slots], how: How
    ) -> Hashable | None:
        """Contiguous real tensors of the CPU, or of a GPU."""
        fit = how in ("compiled", "strict") and not p.is_complex()
        fit = fit and DispatchMode is not None  # without which nothing is recorded
        fit = fit and (p.device.type == "cpu" or p.device.type in kernels.DRIVERS)
        if not fit or not in_memory(g, [p, *present(slots)]):
            return None
        return kind_of(g, p, slots) if p.is_contiguous() else None

    def wanted(self, grads: list[Tensor], scalars: BoundScalars) -> list[kernels.Source]:
        """The libraries of the kernels between the products."""
        step, mine = self._step(grads, scalars), self.mine(grads)
        pairs = [] if step is None else step.bound(scalars)
        return [one for x, own in pairs for one in x.wanted(mine, [own])]

    def prepare(self, grads: list[Tensor], scalars: BoundScalars) -> Runner | None:
        """The task in stages; None if one of the kernels between the products cannot be had."""
        step = self._step(grads, scalars)
        return step if step is not None and step.prepare(self.mine(grads), scalars) else None

    def _step(self, grads: list[Tensor], scalars: BoundScalars) -> StagedStep | None:
        """A task in stages; None if neither it nor an earlier one has any."""
        if scalars.task not in self.staged:
            at = self._by_aten(scalars)
            products = at or self.staged or any(x.rule.runs.batched for x in self.group.placements)
            if at is None or not products:
                return None
            self.staged[scalars.task] = StagedStep(self, self.mine(grads), scalars, at)
        return self.staged[scalars.task]

    def _by_aten(self, scalars: BoundScalars) -> list[int] | None:
        """The indices of the rules that ATen runs: those that take batches or turns, and all with
        an operation that no kernel has. None if one of them looks back, or reads new parameters."""
        found: list[int] = []
        run = len(scalars.placements) - (scalars.goal == "reduce")  # the last one only measures
        for i, placement in enumerate(scalars.placements[:run]):
            rule, own = placement.rule, scalars.numbers[i]
            if not rule.updates:
                continue
            alone = rule.runs.batched or (rule.runs.turns and len(rule.updates) > 1)
            if alone or not self._has_kernel(placement, own, i):
                if placement.lookback is not None or rule.runs.after == "step":
                    return None
                if rule in (PUT.rule, TAKE.rule):  # there is no kernel for any rule
                    return None
                found.append(i)
        return found

    def _has_kernel(self, placement: Placement, own: Numbers, i: int) -> bool:
        """Whether a single rule can be a kernel."""
        if placement.lookback is not None or placement.rule.storage.weight_codec is not None:
            return True
        first = self.slots[0][i]
        missing = [tuple([x is None for x in first])]
        placement = placement._replace(gate=0, owners=None)
        body = Body([placement], missing, (form_of(own),), "step", self.group.kept)
        try:
            for p, mine in zip(self.params, self.slots, strict=True):
                body.find(torch.empty_like(p, dtype=compute_dtype(p)), p, [mine[i]])
        except kernels.Unsuitable as error:
            self.why = reason([placement], error)
            return False
        return True

    def keeps_memory(self) -> bool:
        """Yes: the stacks of matrices."""
        return True

    def stacks_of(self, i: int) -> Stacks | OwnedStacks:
        """What goes into the product at this index among the rules, the same for all tasks."""
        if i not in self.stacks:
            turns = [own[i] if own else 0 for own in self.turns]
            slots, owners = [own[i] for own in self.slots], self.group.placements[i].owners
            shared = [self.group.parts[k] for k in self.members] if self.group.parts else None
            rule = self.group.placements[i].rule
            if shared is not None and _are_local(rule, shared, slots, i):
                made = Stacks(self.params, slots, turns, rule)
            elif shared is not None:
                parts = [(x.part, x.slots[i]) for x in shared]
                made = OwnedStacks(self.params, slots, turns, parts, spread=owners is not None)
            elif owners is not None:
                alone = [Partition(p.shape, owners.group, None) for p in self.params]
                parts = [(x, (None,) * len(own)) for x, own in zip(alone, slots, strict=True)]
                made = OwnedStacks(self.params, slots, turns, parts, spread=True)
            else:
                made = Stacks(self.params, slots, turns, rule)
            self.stacks[i] = made
        return self.stacks[i]


def _are_local(rule: Rule, shared: list[Partitions], slots: list[Slots], i: int) -> bool:
    """Whether each process has whole matrices of stacks, and their slots. i: of the rule."""
    view = rule.storage.view
    if view is None or not view.is_plain_stack() or rule.storage.codecs:
        return False
    for own, mine in zip(shared, slots, strict=True):
        pairs = zip(own.slots[i], mine, strict=True)
        parts = [own.part, *[part for part, x in pairs if x is not None]]
        if len(own.part.shape) != 3 or any(x is None or x.dim != 0 for x in parts):
            return False
    return True


class StagedStep:
    """A task in stages: for each product the kernel before it, and at last all the rest."""

    def __init__(
        self, owner: ProductExecutor, grads: list[Tensor], scalars: BoundScalars, at: list[int]
    ) -> None:
        self.owner = owner
        self.at = at
        self.stages: list[tuple[Stacks | OwnedStacks, Any]] = []
        placements = list(scalars.placements)
        acts = [bool(x.rule.updates) for x in placements]  # kernels do not see the other slots
        slots = [[x if k else () for x, k in zip(own, acts, strict=False)] for own in owner.slots]
        for i in self.at:
            stacks = owner.stacks_of(i)
            for own, update in zip(slots, stacks.updates, strict=True):
                own[i] = (update,)
            self.stages.append((stacks, self._group([*placements[:i], PUT], slots, grads)))
            placements[i] = TAKE
        self.last = self._group(placements, slots, grads)

    def _group(self, placements: list[Placement], slots: list[list[Slots]], grads: Any) -> Any:
        owner, used = self.owner, len(placements)
        given = tuple(placements), owner.params, [own[:used] for own in slots], grads
        return owner.group.of(*given, counts=(0,) * used, turns=owner.turns)

    def prepare(self, grads: list[Tensor], scalars: BoundScalars) -> bool:
        """Compile its kernels; False if one of them cannot be had."""
        for tensors, bound in self.bound(scalars):
            tensors.prepare(grads, bound)
            if not all(isinstance(x, (KernelExecutor, ProductExecutor)) for x in tensors.executors):
                return False
        return True

    def bound(self, scalars: BoundScalars) -> list[tuple[Any, BoundScalars]]:
        """Each group of kernels with the numbers that its rules read."""
        numbers = [() if i in self.at else own for i, own in enumerate(scalars.numbers)]
        found = []
        for i, (_, tensors) in zip(self.at, self.stages, strict=True):
            own: list[Numbers] = [*numbers[:i], ()]
            found.append((tensors, BoundScalars(tensors, own, "stage")))
        last = BoundScalars(self.last, numbers, scalars.goal)
        return [*found, (self.last, last)]

    def measure(self, grads: list[Tensor], scalars: BoundScalars) -> list[Sequence[Any]]:
        """What the last of the rules measures, behind the products before it."""
        mine = self.owner.mine(grads)
        *_, (last, bound) = self._advance(mine, scalars)[0]
        return last.prepare(mine, bound).measure(mine, bound)

    def step(self, grads: list[Tensor], scalars: BoundScalars) -> list[Write]:
        """The last kernel and the slots of the products: these have run by then."""
        mine = self.owner.mine(grads)
        (*_, (last, bound)), writes = self._advance(mine, scalars)
        return [*last.prepare(mine, bound).step(mine, bound), *writes]

    def _advance(
        self, grads: list[Tensor], scalars: BoundScalars
    ) -> tuple[list[tuple[Any, BoundScalars]], list[Write]]:
        """Run all stages. Also returns the writes of the slots that the products have."""
        device = self.owner.params[0].device.type
        with torch.no_grad():
            return modes.uncast(device, self._advanced, grads, scalars)

    def _advanced(
        self, grads: list[Tensor], scalars: BoundScalars
    ) -> tuple[list[tuple[Any, BoundScalars]], list[Write]]:
        bound, writes = self.bound(scalars), list[Write]()
        cast = Caster(scalars.numbers)
        numbers = cast(self.owner.params[0])
        for i, (stacks, _), (tensors, own) in zip(self.at, self.stages, bound, strict=False):
            for one in tensors.prepare(grads, own).step(grads, own):
                one()
            writes += stacks.multiply(scalars.placements[i], numbers[i])
        return bound, writes


class Stacks:
    """What goes into a product, as one tensor for each shape, and its slots.

    params: the parameters. slots, turns: of each; the matrices of a stack are so many parameters.
    rule: what runs on them. updates: views of what goes into the product, and then of what comes
    out, one for each parameter. Tensors of one turn are next to each other, as they take one
    variant.
    """

    def __init__(
        self, params: list[Tensor], slots: list[Slots], turns: list[int], rule: Rule
    ) -> None:
        self.params: list[Tensor] = []
        self.slots: list[Slots] = []
        self.turns: list[int] = []
        self.started = False
        """Whether a rule with a `start` has started all of them."""
        self.batches: list[tuple[list[int], Tensor, list[StackedSlot]]] = []
        updates: dict[int, Tensor] = {}
        view = rule.storage.view
        self.split = view is not None and view.is_plain_stack() and not rule.storage.codecs
        alike: dict[Any, list[int]] = {}
        for i in sorted(range(len(params)), key=turns.__getitem__):
            p, own = params[i], slots[i]
            kind = (p.shape, *[None if s is None else s.shape for s in own])
            alike.setdefault(kind, []).append(i)
        for some in alike.values():
            p = params[some[0]]
            whole = p.new_empty((len(some), *p.shape), dtype=compute_dtype(p))
            updates.update(zip(some, whole.unbind(), strict=True))
            cut = self.split and p.dim() > 2
            first = len(self.params)
            for i in some:
                self._add(params[i], slots[i], turns[i], math.prod(p.shape[:-2]) if cut else None)
            whole = whole.flatten(0, -3) if cut else whole
            members = [*range(first, len(self.params))]
            for batch in batches(members, whole[:1].numel()):
                stack = whole[batch[0] - first : batch[-1] + 1 - first]
                mine = list(map(StackedSlot, zip(*[self.slots[i] for i in batch], strict=True)))
                self.batches.append((batch, stack, mine))
        self.updates = [updates[i] for i in range(len(params))]

    def _add(self, p: Tensor, slots: Slots, turn: int, matrices: int | None) -> None:
        """A parameter, or the matrices of a stack."""
        if matrices is None:
            self.params.append(p)
            self.slots.append(slots)
            self.turns.append(turn)
            return
        self.params += p.reshape(matrices, *p.shape[-2:]).unbind()
        each = [[None] * matrices if x is None else x.unbind() for x in slots]
        self.slots += zip(*each, strict=True) if each else [()] * matrices
        self.turns += [turn] * matrices

    def multiply(self, placement: Placement, numbers: Numbers) -> list[Write]:
        """Run the rule on all tensors. Returns the writes of its slots."""
        writes: list[Write] = []
        if self.split:
            placement = placement._replace(rule=placement.rule.stored_by(view=MATRICES))
        away = any(p.device.type != "cpu" for p in self.params[:1])
        if away and placement.rule.runs.start is not None and self._has_started(placement.rule):
            rule = placement.rule
            placement = placement._replace(rule=rule._replace(runs=rule.runs._replace(start=None)))
        for members, stack, own in self.batches:
            packed = placement.rule.storage.codecs  # in blocks of one tensor, not of a stack
            if placement.rule.runs.batched and len(members) > 1 and not packed:
                for run_of, given in self._runs(members, numbers):
                    old = tuple([slot.read(run_of) for slot in own])
                    p, u = self.params[members[0]], stack[run_of]
                    update, new = run_batch(placement.rule, u, old, p, given)
                    update, *new = memory.apart([update, *new], [u, *old])
                    for slot, x, y in zip(own, old, new, strict=True):
                        writes += [] if y is x else slot.written(run_of, y)
                    u.copy_(update)
                continue
            for i, mine in zip(members, stack.unbind(), strict=True):
                given = in_turn(numbers, self.turns[i])
                leaf = Leaf(mine, self.params[i], [self.slots[i]], [given])
                ((update, (new,)),) = run([placement], [leaf])
                places = [mine, self.params[i], *self.slots[i]]
                update, _, *new = memory.apart([update, None, *new], places)
                pairs = zip(self.slots[i], new, strict=True)
                writes += [partial(x.copy_, y) for x, y in pairs if x is not None and y is not x]
                mine.copy_(update)
        return writes

    def _has_started(self, rule: Rule) -> bool:
        """Whether no tensor waits for its first gradient. Once this is so, nothing is read from
        the device any more."""
        if not self.started:
            pairs = zip(self.params, self.slots, strict=True)
            fresh = [x for x in [fresh_ones(rule, p, own, p) for p, own in pairs] if x is not None]
            self.started = not fresh or not torch.stack(fresh).any().item()
        return self.started

    def _runs(self, members: list[int], numbers: Numbers) -> list[tuple[slice, Numbers]]:
        """The parts of a batch that take one variant, with their numbers."""
        found: list[tuple[slice, Numbers]] = []
        start = 0
        for own, some in groupby(members, lambda i: in_turn(numbers, self.turns[i])):
            stop = start + len(list(some))
            found.append((slice(start, stop), own))
            start = stop
        return found


class OwnedStacks:
    """What goes into a product where several processes share the matrices.

    slots: the local ones. shared: what each tensor is a part of. spread: whether each matrix
    is computed in one process only. updates: as in `Stacks`.
    """

    def __init__(
        self,
        params: list[Tensor],
        slots: list[Slots],
        turns: list[int],
        parts: Sequence[tuple[Partition, Sequence[Partition | None]]],
        *,
        spread: bool,
    ) -> None:
        self.slots = slots
        self.turns = turns
        self.parts, self.slot_parts = zip(*parts, strict=True)
        self.spread = spread
        self.updates = [p.new_empty(p.shape, dtype=compute_dtype(p)) for p in params]

    def multiply(self, placement: Placement, numbers: Numbers) -> list[Write]:
        """Run the rule on whole matrices. Returns the writes of its slots."""

        def run_some(some: list[int], us: list[Tensor], slots: list[Slots]) -> list[Any]:
            rows = zip(some, us, slots, strict=True)
            leaves = [Leaf(u, u, [own], [numbers], [self.turns[i]]) for i, u, own in rows]
            return run_batched(placement.rule, us, leaves, 0)

        found = run_owned(
            run_some,
            self.updates,
            self.slots,
            self.parts,
            self.slot_parts,
            spread=self.spread,
        )
        writes: list[Write] = []
        for mine, old, (u, new) in zip(self.updates, self.slots, found, strict=True):
            mine.copy_(u)
            pairs = zip(old, new, strict=True)
            writes += [partial(x.copy_, y) for x, y in pairs if x is not None and y is not x]
        return writes


class StackedSlot:
    """One slot of several tensors. whole: the tensor whose parts they are, if there is one."""

    def __init__(self, slots: tuple[Any, ...]) -> None:
        self.slots = slots
        self.whole = None if slots[0] is None else memory.whole(slots)

    def read(self, part: slice) -> Tensor | None:
        """Some of the slots as one tensor."""
        if self.slots[0] is None:
            return None
        return torch.stack(self.slots[part]) if self.whole is None else self.whole[part]

    def written(self, part: slice, new: Tensor) -> list[Write]:
        """The writes of their new values."""
        if self.whole is not None:
            return [partial(self.whole[part].copy_, new)]
        pairs = zip(self.slots[part], new.unbind(), strict=True)
        return [partial(x.copy_, y) for x, y in pairs]
