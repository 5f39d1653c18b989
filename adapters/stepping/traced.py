"""Steps that are traced, inside a transform of torch.func, or recorded by autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from functional_optim import numeric
from functional_optim.adapters.state.names import named
from functional_optim.adapters.stepping.leaves import (
    Changes,
    Names,
    Row,
    checked_leaves,
    discard,
    live_params,
    turns_of_params,
)
from functional_optim.adapters.stepping.loss import extra_of, left_to_step, unscale
from functional_optim.adapters.stepping.shared_counts import SharedCounts
from functional_optim.core import modes, sharding
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.numbers import Numbers
from functional_optim.core.totals import reduction_order
from functional_optim.engine.executor import Write
from functional_optim.engine.plan import PlanEntry, StepContext, StepPlan, make
from functional_optim.kernels.interrupts import held

if TYPE_CHECKING:
    from functional_optim.adapters.base import OptimizerBase


def step_in_graph(optimizer: OptimizerBase, loss: Any, in_place: Callable[[Any], None]) -> None:
    """A step that torch.compile traces; `in_place` outside of its graph if sums over processes are
    in it.

    Processes with different gradients have different graphs, whose sums may be in another order. In
    the graph of a process without gradients, shared counts would not advance.
    """
    every = [optimizer.checked_transform(group, in_step=True) for group in optimizer.param_groups]
    if any(tx.communicates for tx in every):
        why = "a recipe of fo.sharded_over steps outside of graphs: all processes must sum alike"
        torch.compiler.disable(in_place, reason=why)(loss)
    else:
        step_traced(optimizer, loss, replace=False)


def step_traced(optimizer: OptimizerBase, loss: Any, *, replace: bool) -> None:
    """Step every parameter; with `replace`, put new tensors into the state for autograd.

    loss: what the closure returned, for rules that read it.

    The plan has an entry for each parameter, with its `step` tensor as the time: in a graph, values
    of tensors cannot be compared. It is rebuilt in each step.

    What a GradScaler leaves to the step is read: torch.compile breaks its graph there, and traces
    that cannot read it raise torch's error.
    """
    scale, skip = left_to_step(optimizer)
    if skip is not None and skip.item():
        return
    made: Changes = []
    try:
        if scale is not None:
            grads = [g for x in optimizer.param_groups for _, _, g in live_params(x)]
            held(unscale, grads, scale, made)
        _step(optimizer, loss, replace, made)
    except BaseException:
        try:
            held(discard, optimizer, made)
        finally:
            held(discard, optimizer, made)  # again, as in `transaction`
        raise


class TracedEntry(PlanEntry):
    """One parameter. row: its row from `checked_leaves`. new: whether this is its first step."""

    def __init__(self, optimizer: OptimizerBase, row: Row, place: int, replace: bool) -> None:
        _, tx, leaf, self.new = row
        super().__init__(tx, [leaf], [place], "apart", replace=replace)
        self.optimizer = optimizer
        self.state: Any = leaf.slots

    def time(self) -> Any:
        """The number of this step, as a tensor if the optimizer counts steps."""
        if self.optimizer.counts_steps:
            return numeric.float64(self.state["step"] + 1)
        return 1.0 if self.new else 2.0

    def carry(self) -> list[Numbers]:
        """The carried scalars of each rule, as stored."""
        return [
            tuple([self.state[key].to(torch.float64) for key in keys])
            for keys in self.tx.layout.carry
        ]

    def writes(self, context: StepContext) -> list[Write]:
        """One write, of the step count, the carried scalars and slots that are new tensors."""
        return [partial(self._write, context)] if self.state else []

    def _write(self, context: StepContext) -> None:
        if self.optimizer.counts_steps:
            with torch.no_grad():
                self.state["step"] += 1
        values = [x for each in context.carried for x in each]
        for (key, first), value in zip(self.tx.carried.items(), values, strict=True):
            self.state[key] = numeric.stored(value, dtype=numeric.carry_dtype(first))
        if self.tensors.replace:
            for keys, values in zip(self.tx.layout.slots, self.tensors.slots[0], strict=True):
                self.state.update(zip(keys, values, strict=True))


def _step(optimizer: OptimizerBase, loss: Any, replace: bool, made: Changes) -> None:
    chains: list[tuple[int, Leafwise]] = []
    for k, group in enumerate(optimizer.param_groups):
        tx = optimizer.checked_transform(group, in_step=True)
        if not isinstance(tx, Leafwise):
            raise TypeError(
                "a step that torch.compile or make_fx traces, or autograd records, needs a recipe "
                "made of one-tensor rules; this one also has another transformation."
            )
        if tx.communicates:
            _check_processes(group)
        chains.append((k, tx))
    counts = SharedCounts(optimizer, chains)
    count = counts.traced_time() if counts.counts_steps else None
    names, turns = Names(), turns_of_params(optimizer, chains)
    found = [
        (k, row)
        for k, tx in chains
        for row in checked_leaves(optimizer, k, tx, turns, made, names, recorded=replace)
    ]
    if not modes.traced():
        names.check()
    counts.gather()
    entries = [TracedEntry(optimizer, row, i, replace) for i, (_, row) in enumerate(found)]
    parts = [(k, entry.tx) for (k, _), entry in zip(found, entries, strict=True)]
    over = [(tx.placements, tx.layout.counts) for _, tx in chains if tx.communicates]
    plan = StepPlan(entries, (), reduction_order(over))
    every = [p for group in optimizer.param_groups for p in group["params"]]
    asked = any("value" in part.extra for _, part in parts)
    extra = extra_of(loss, sharding.mesh_of(every)) if asked else {}

    def step() -> None:
        contexts, writes = plan.writes([leaf.g for _, (_, _, leaf, _) in found], extra, count)
        last = partial(counts.write_apart, contexts, parts, count, replace=replace)
        held(make, [made.clear, *writes, last])

    if replace and _keeps_doubles(entries):
        numeric.storing_wide(step)
    else:
        step()


def _check_processes(group: dict[str, Any]) -> None:
    """Raise RuntimeError for a missing gradient where other processes may have one, and numbers of
    this one would not advance."""
    for name, p in named(group):
        if p.grad is None:
            raise RuntimeError(
                f"parameter {name!r} has no gradient; with fo.sharded_over, a step that autograd "
                "records or make_fx traces needs one for each parameter: pass zeros."
            )


def _keeps_doubles(entries: list[TracedEntry]) -> bool:
    """Whether all carried scalars in the state are float64, as in numerical checks.

    Counts, which always are, do not matter.
    """
    found = [
        entry.state[key].dtype
        for entry in entries
        for key, first in entry.tx.carried.items()
        if type(first) is not int
    ]
    return bool(found) and set(found) == {torch.float64}
