"""A gate in front of a custom transformation of trees."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from functional_optim import tree
from functional_optim.core import base
from functional_optim.core.chain import MixedChain, Wrapped, check_moved, freezing_rules, without
from functional_optim.core.leafwise import Leafwise
from functional_optim.core.sparse import selected
from functional_optim.core.totals import given_totals


class WholeState(NamedTuple):
    """The state of a custom transformation of trees behind a gate."""

    gate: Any
    inner: Any


def gated_trees(gate: Leafwise, tx: base.GradientTransformation) -> base.GradientTransformation:
    """A custom transformation of trees behind a gate: it always runs, its result may be dropped."""
    known, reads = tx.extra, tx.reads_gradients
    gate = without(freezing_rules(tx), gate)

    def init(params: Any) -> WholeState:
        return WholeState(gate.init(params), tx.init(params))

    def update(
        grads: Any, state: WholeState, params: Any = None, **extra: Any
    ) -> tuple[Any, WholeState]:
        base.check_extra(extra, known)
        if not reads and not tree.leaves(grads):
            grads = tree.map(torch.zeros_like, params)
        updates, gated = gate.update(grads, state.gate, params)
        # without a gradient the gate is that of an earlier step
        opened = gated.carry["open_steps"] > state.gate.carry["open_steps"]
        totals = given_totals()
        if totals is not None:
            totals.gates.append(opened)
        moved, inner = tx.update(updates, state.inner, params, **extra)
        if totals is not None:
            totals.gates.pop()

        def kept(new: Any, old: Any) -> Any:
            return new if old is None else selected(opened, new, old).to(old.dtype)

        check_moved(updates, moved)
        updates = tree.map(lambda u, v: None if v is None else kept(v, u), updates, moved)
        return updates, WholeState(gated, tree.map(kept, inner, state.inner))

    return Wrapped(init, update, MixedChain((gate, tx)))
