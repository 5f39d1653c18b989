"""`compile`: a transformation as a step that updates parameters and state in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from functional_optim import kernels, numeric, tree
from functional_optim.combinators.commit import CommitIf, as_flag
from functional_optim.combinators.local_steps import Synced, advanced
from functional_optim.combinators.sharpness import SamState, SharpnessAware, check_grad_fn
from functional_optim.core import base, memory, modes
from functional_optim.core.factory import Made, factory
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.lift import State, check_state, check_trees, count_keys
from functional_optim.core.paths import chosen
from functional_optim.core.rule import Numbers
from functional_optim.core.storage import present
from functional_optim.engine.executor import How, Write
from functional_optim.engine.graph_step import WholeStep, first_places, written
from functional_optim.engine.guards import TensorGuard
from functional_optim.engine.plan import (
    PlanEntry,
    PlanLeaf,
    StepContext,
    StepPlan,
    WithoutGradient,
    commit,
    reduction_order,
    turns_in,
)
from functional_optim.kernels.interrupts import held


@factory
def compile(
    tx: base.GradientTransformation, *, donate: bool = True, strict: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Compile a transformation into a step: `params, state = step(grads, state, params, **extra)`.

    One kernel is compiled for the recipe and serves every size of tensor, every model and every
    value of the hyperparameters: compiling `adamw(lr=1e-3)` and then `adamw(lr=1e-4)` costs one
    compilation. A transformation that is not made of one-tensor rules alone is compiled whole, with
    torch.compile: once for each structure and shape of the trees, and again for all values of the
    hyperparameters that are floats.

    Args:
        tx: a transformation.
        donate: write the results into the tensors of `params` and `state`, which are then the ones
            returned (about five times faster than making new ones), whatever tx is. A tensor that
            stands in several places, such as a parameter that the state of `keep_snapshots` holds,
            is written in the first, parameters before state; the other places get tensors of their
            own. Inside a transform of torch.func only one-tensor rules write in place. A
            KeyboardInterrupt comes before all of it is written, or after. False leaves both
            untouched.
        strict: raise a RuntimeError where the step cannot be compiled, before anything is written.
            False (the default) falls back to what works, at last to the plain rules, with a warning
            that says why. Sparse gradients and tensors of odd layouts run eagerly either way.

    Returns:
        The step, which can be copied and pickled if tx can. Gradients are never changed. A `None`
        gradient leaves its parameter as it is. Traced by make_fx, or inside a transform of
        torch.func, it runs as plain operations.

    Raises:
        TypeError: if tx is not a transformation; from the step, for an unknown extra argument.
        ValueError: from the step, if grads, state and params do not fit together; with `donate`,
            also if two parameters or slots that have gradients share memory, even in part.
        RuntimeError: from the step, if `strict` and it cannot be compiled.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.sgd(lr=0.5)
        >>> step = fo.compile(tx)
        >>> params = {"w": torch.ones(2)}
        >>> params, state = step({"w": torch.ones(2)}, tx.init(params), params)
        >>> params
        {'w': tensor([0.5000, 0.5000])}
    """
    if not isinstance(tx, base.GradientTransformation):
        raise TypeError(
            f"compile takes a transformation, but got a {type(tx).__name__}; call the factory "
            "first, e.g. compile(adamw(lr=1e-3))."
        )
    if isinstance(tx, CommitIf):
        return CommittedStep(tx, donate, strict)
    if isinstance(tx, Synced):
        return LocalStep(tx, donate, strict)
    if isinstance(tx, SharpnessAware):
        return SharpnessAwareStep(tx, donate, strict)
    if isinstance(tx, Leafwise):
        return FusedStep(tx, donate, strict)
    return CompiledUpdate(tx, donate, strict)


class Step(Made):
    """What `compile` returns."""

    stateful = True

    def __init__(self, tx: base.GradientTransformation, donate: bool, strict: bool) -> None:
        self.tx: Any = tx
        self.donate = donate
        self.strict = strict

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.tx, self.donate, self.strict

    def begin(self, params: Any, state: Any, extra: dict[str, Any]) -> None:
        """Let the kernels be built that the step of these trees will need, if that is known."""

    def by_operations(
        self, grads: Any, state: Any, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, Any]:
        """The step where a tracer or a transform of torch.func must see it."""
        if self.donate and not modes.traced():
            check_params_apart(params)
        updates, new_state = self.tx.update(grads, state, params, **extra)
        new_params = base.apply_updates(params, updates)
        if not self.donate:
            return new_params, new_state
        if modes.transformed() and not isinstance(self.tx, Leafwise):
            return new_params, new_state  # a tensor may stand for all of a batch

        def write() -> tuple[Any, Any]:
            if isinstance(self.tx, Leafwise):  # whose state has memory of its own
                # but for hyperparameters under vmap, of which there is one for all of a batch
                told: Any = {} if modes.transformed() else state.hyper
                old = params, state._replace(hyper=told)
                tree.map(Tensor.copy_, old, (new_params, new_state._replace(hyper=told)))
                return params, state._replace(hyper=told or new_state.hyper)
            firsts = first_places(params, state)
            return written(params, state, new_params, new_state, firsts)

        return base.unrecorded(held, write)


class CommittedStep(Step):
    """A step that is not run where it is refused."""

    def __init__(self, tx: CommitIf, donate: bool, strict: bool) -> None:
        super().__init__(tx, donate, strict)
        self.step: Any = compile(tx.inner, donate=donate, strict=strict)

    def begin(self, params: Any, state: Any, extra: dict[str, Any]) -> None:
        self.step.begin(params, state, extra)

    def __call__(
        self, grads: Any, state: Any, params: Any, *, commit: Any, **extra: Any
    ) -> tuple[Any, Any]:
        if isinstance(commit, Tensor) and (modes.traced()):
            return self.by_operations(grads, state, params, {**extra, "commit": commit})
        return self.step(grads, state, params, **extra) if as_flag(commit) else (params, state)


class LocalStep(Step):
    """A local step, and what there is to note of it."""

    def __init__(self, tx: Synced, donate: bool, strict: bool) -> None:
        super().__init__(tx, donate, strict)
        self.step: Any = compile(tx.inner, donate=donate, strict=strict)

    def begin(self, params: Any, state: Any, extra: dict[str, Any]) -> None:
        self.step.begin(params, state.inner, extra)

    def __call__(self, grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        if self.donate:
            return held(self._in_place, grads, state, params, extra)
        params, inner = self.step(grads, state.inner, params, **extra)
        return params, advanced(state, inner)

    def _in_place(
        self, grads: Any, state: Any, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, Any]:
        params, inner = self.step(grads, state.inner, params, **extra)
        return params, state._replace(inner=inner, since=state.since.add_(1))


class SharpnessAwareStep(Step):
    """A step uphill, the gradient there, and the step of the other transformation."""

    def __init__(self, tx: SharpnessAware, donate: bool, strict: bool) -> None:
        super().__init__(tx, donate, strict)
        self.uphill: Any = compile(tx.ascent, donate=False, strict=strict)
        self.step: Any = compile(tx.inner, donate=donate, strict=strict)

    def begin(self, params: Any, state: Any, extra: dict[str, Any]) -> None:
        own = {name: x for name, x in extra.items() if name in self.tx.inner.extra}
        self.uphill.begin(params, state.ascent, {})
        self.step.begin(params, state.inner, own)

    def __call__(
        self, grads: Any, state: Any, params: Any, *, grad_fn: Any, **extra: Any
    ) -> tuple[Any, Any]:
        if modes.traced():
            return self.by_operations(grads, state, params, {**extra, "grad_fn": grad_fn})
        check_grad_fn(grad_fn)
        worse, ascent = self.uphill(grads, state.ascent, params)
        grads = grad_fn(worse)
        params, inner = self.step(grads, state.inner, params, **extra)
        if self.donate:
            ascent = tree.map(Tensor.copy_, state.ascent, ascent)
        return params, SamState(ascent, inner)


class CompiledUpdate(Step):
    """The step of a transformation of whole trees."""

    def __init__(self, tx: base.GradientTransformation, donate: bool, strict: bool) -> None:
        super().__init__(tx, donate, strict)
        self.whole = WholeStep(tx, donate, strict)

    def __call__(self, grads: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        if modes.traced():
            return self.by_operations(grads, state, params, extra)
        return base.unrecorded(self._compiled, grads, state, params, extra)

    def _compiled(
        self, grads: Any, state: Any, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, Any]:
        if self.donate:
            check_params_apart(params)
        return self.whole(grads, state, params, extra)


class FusedStep(Step):
    """The compiled step of a chain of one-tensor rules."""

    def __init__(self, tx: Leafwise, donate: bool, strict: bool) -> None:
        super().__init__(tx, donate, strict)
        self.how: How = "strict" if strict else "compiled"
        self.extra = tx.extra
        self.plan: TreePlan | None = None

    def begin(self, params: Any, state: State, extra: dict[str, Any]) -> None:
        """With gradients without memory in the place of real ones."""
        check_state(self.tx.placements, self.tx.layout, state)
        base.check_params(params)
        with suppress(Exception):  # of tensors without such gradients, whose kernels can wait
            grads = tree.map(lambda p: p.new_zeros(()).expand(p.shape), params)
            plan = TreePlan(self.tx, grads, state, params, self.how)
            wanted = base.unrecorded(plan.wanted, plan.given, extra)
            kernels.sweep_all(wanted, wait=False)

    def __call__(self, grads: Any, state: State, params: Any, **extra: Any) -> tuple[Any, State]:
        if modes.intercepted():
            return self.by_operations(grads, state, params, extra)
        return base.unrecorded(self._by_kernels, grads, state, params, extra)

    def _by_kernels(
        self, grads: Any, state: State, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, State]:
        if extra:
            base.check_extra(extra, self.extra)
        if not self.donate:
            check(self.tx, grads, state, params)
            params, state = tree.map(memory.copied, params), tree.map(memory.copied, state)
        plan = self.plan
        given = None if plan is None else plan.gradients(grads, state, params)
        if plan is None or given is None:
            if self.donate:
                check(self.tx, grads, state, params)
            plan = self.plan = TreePlan(self.tx, grads, state, params, self.how)
            given = plan.given
        plan.numbers.read(state)
        _, writes = plan.writes(given, extra)
        writes += plan.numbers.writes()
        commit(writes)
        plan.numbers.finish()
        return params, state


def check_params_apart(params: Any) -> None:
    """Raise ValueError if two parameters that are written share memory."""
    named = [(path, p) for path, p in tree.items(params) if isinstance(p, Tensor)]
    memory.check_apart([p for _, p in named], lambda i: f"parameter {named[i][0]!r}")


def check(tx: Leafwise, grads: Any, state: Any, params: Any) -> None:
    """Raise TypeError or ValueError unless the trees of a step fit together."""
    check_state(tx.placements, tx.layout, state)
    base.check_params(params)
    check_trees(tx.placements, tx.layout, params, grads, state)


class TreeNumbers:
    """The numbers of a functional state: its step count, carried numbers and hyperparameters.

    recorded: slots that an init recorded by autograd has made. fixed: hyperparameters to be written
    once.
    """

    def __init__(self, state: State) -> None:
        self.here = state.step.device.type == "cpu"
        self.carry: dict[str, Any] = {}
        self.recorded: list[Tensor] = []
        self.fixed: dict[str, float] = {}
        self.step: Tensor | None = None
        self.version = 0
        self.done = 0.0

    def read(self, state: State) -> None:
        """Take in the state of a step; its count is not read if nobody else has written to it."""
        self.state, step = state, state.step
        if state.carry:
            of = Tensor.item if self.here else numeric.float64
            self.carry = {key: of(x) for key, x in state.carry.items()}
        if not self.here:
            self.time: Any = (step + 1).to(torch.float64)
            return
        if step is not self.step or step._version != self.version:
            self.done = float(step.item())
        self.time = self.done + 1

    def writes(self) -> list[Write]:
        """The writes of what all leaves share."""
        writes: list[Write] = [numeric.filling(self.state.step, self.time)]
        if self.fixed or self.recorded:
            hyper = self.state.hyper
            writes += [numeric.filling(hyper[key], value) for key, value in self.fixed.items()]
            writes += [slot.detach_ for slot in self.recorded]  # the step itself was not recorded
        return writes

    def finish(self) -> None:
        """Note what was written."""
        if self.fixed or self.recorded:
            self.recorded, self.fixed = [], {}
        if self.here:  # on another device no count is read
            self.step, self.version = self.state.step, self.state.step._version
            self.done = self.time


class TreeEntry(PlanEntry):
    """Leaves of a tree on which the same rules act.

    changing: the hyperparameters that may have another value in every step, with the index of their
    rule.
    """

    def __init__(
        self,
        tx: Leafwise,
        leaves: list[PlanLeaf],
        places: list[int] | None,
        how: How,
        numbers: TreeNumbers,
    ) -> None:
        super().__init__(tx, leaves, places, how)
        self.numbers = numbers
        self.idle: list[Numbers] = [()] * len(tx.layout.carry)
        self.changing: list[tuple[str, int, numeric.Hyper]] = []
        placements, stored = self.tensors.placements, numbers.state.hyper
        for i, (placement, own) in enumerate(zip(placements, tx.layout.hyper, strict=True)):
            for key, (_, value) in zip(own, placement.rule.each_hyper(), strict=True):
                if key in stored and numeric.is_static(value):
                    numbers.fixed[key] = value
                elif key in stored:
                    self.changing.append((key, i, value))

    def time(self) -> Any:
        """The number of this step."""
        return self.numbers.time

    def carry(self) -> list[Numbers]:
        """What each rule carries from its last step."""
        stored = self.numbers.carry
        if not stored:
            return self.idle
        return [tuple([stored[key] for key in keys]) for keys in self.tx.layout.carry]

    def writes(self, context: StepContext) -> list[Write]:
        """The writes of what each rule carries to its next step, and of its hyperparameters."""
        state, writes = self.numbers.state, []
        if state.carry:
            writes += [numeric.filling(state.carry[k], x) for k, x in self.carried(context)]
        for key, i, value in self.changing:
            now = numeric.at(value, context.time_of(i))
            writes.append(numeric.filling(state.hyper[key], now))
        return writes


class TreePlan(StepPlan):
    """The plan of a step of trees, for all steps with the same tensors.

    Raises ValueError, when it is made, if tensors that are written share memory.
    """

    def __init__(self, tx: Leafwise, grads: Any, state: Any, params: Any, how: How) -> None:
        for key in count_keys(tx.placements, tx.layout):
            if state.carry[key].dtype is not torch.float64:
                state.carry[key] = state.carry[key].to(torch.float64)
        self.keys = tx.layout.keys
        self.structure, self.outline = tree.structure(params), tree.outline(params)
        trees = [grads, params, *[state.slots[key] for key in self.keys]]
        given, *columns = tree.places(self.structure, *trees)
        self.given = [g for g in given if g is not None]
        self._check_apart(params, given, columns)
        objects = tuple(chain(*columns))
        self.guard = TensorGuard(given, [x for x in objects if isinstance(x, Tensor)], objects)
        self.given = list(map(self.guard.apart, self.given))
        self.numbers = TreeNumbers(state)
        self.numbers.read(state)
        slots = [dict(zip(self.keys, row, strict=True)) for row in zip(*columns[1:], strict=True)]
        items = list(tree.items(params))
        turns = turns_in({0: tx}, [(0, path, p) for path, p in items])
        rows = [
            PlanLeaf(path, p, g, own, its)
            for (path, p), g, own, its in zip(
                items, given, slots or [{}] * len(given), turns, strict=True
            )
        ]
        entries = self._entries(tx, rows, how if self.guard.dense else "apart")
        order = reduction_order([(tx.placements, tx.layout.counts)]) if tx.communicates else ()
        super().__init__(entries, _absent(tx, rows, entries), order)

    def _check_apart(self, params: Any, given: list[Any], columns: list[list[Any]]) -> None:
        """Raise ValueError if two tensors that are written share memory."""
        live = [i for i, g in enumerate(given) if g is not None]
        some = [(i, k) for i in live for k, own in enumerate(columns) if own[i] is not None]

        def name(at: int) -> str:
            i, k = some[at]
            path = [path for path, _ in tree.items(params)][i]
            whose = f"parameter {path!r}"
            return whose if k == 0 else f"the slot {self.keys[k - 1]!r} of {whose}"

        memory.check_apart([columns[k][i] for i, k in some], name)

    def _entries(self, tx: Leafwise, rows: list[PlanLeaf], how: How) -> list[TreeEntry]:
        """Leaves on which the same rules act, together."""
        members: dict[Leafwise, list[tuple[int, PlanLeaf]]] = {}
        live = [leaf for leaf in rows if leaf.g is not None]
        for i, leaf in enumerate(live):
            part = tx.on(leaf.name, leaf.p)
            if part is not None:
                members.setdefault(part, []).append((i, leaf))
        entries = []
        for part, some in members.items():
            places = [i for i, _ in some] if len(some) < len(live) else None
            leaves = [leaf for _, leaf in some]
            entry = TreeEntry(part, leaves, places, how, self.numbers)
            slots = [x for row in entry.tensors.slots for x in present(row)]
            self.numbers.recorded += [slot for slot in slots if slot.grad_fn is not None]
            if how != "apart":
                entry.tensors.written += slots
            entries.append(entry)
        if tx.communicates:  # all numbers go on, those of rules that act on nothing here too
            entries.append(TreeEntry(tx, [], [], how, self.numbers))
        return entries

    def gradients(self, grads: Any, state: Any, params: Any) -> list[Tensor] | None:
        """The gradients, if the tensors are the same and the gradients like those."""
        try:
            slots = [state.slots[key] for key in self.keys]
        except (TypeError, KeyError, AttributeError):
            return None
        return self.guard.trees(self.structure, self.outline, grads, params, *slots)


def _absent(
    tx: Leafwise, rows: list[PlanLeaf], entries: Sequence[PlanEntry]
) -> list[WithoutGradient]:
    """The leaves without a gradient, for the rules whose slots go on there, too."""
    found = []
    for placement, count, keys in zip(
        tx.placements, tx.layout.counts, tx.layout.slots, strict=True
    ):
        mine = [
            (leaf.p, tuple([leaf.slots[key] for key in keys]))
            for leaf in (rows if placement.rule.absent else ())
            if leaf.g is None and chosen(placement.where, leaf.name, leaf.p)
        ]
        for k, entry in enumerate(entries if mine else ()):
            pairs = zip(entry.tensors.placements, entry.tx.layout.counts, strict=True)
            places = [i for i, (x, n) in enumerate(pairs) if (x.name, n) == (placement.name, count)]
            if places:
                found.append(WithoutGradient(k, places[0], mine))
                break
    return found
