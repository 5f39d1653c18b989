"""Steps of groups with transformations that do not consist of one-tensor rules.

The tree is a list of the parameters, or a dict if they have names. Its state has no slots per
parameter, so all of it is kept with the group's first parameter, as in torch's LBFGS: a flat dict
from each tensor's path in the state to the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.adapters.state.names import check_count, check_distinct, named, names_of
from functional_optim.adapters.state.places import check_places, remember, remembered
from functional_optim.core import base, draws, sharding
from functional_optim.core.memory import Written
from functional_optim.core.numbers import Numbers
from functional_optim.core.paths import subtree
from functional_optim.core.scalars import Key
from functional_optim.core.state_keys import indices_by_name
from functional_optim.core.totals import Missing, ReductionOrder, Totals
from functional_optim.engine.executor import Write
from functional_optim.engine.graphs import check_updates

if TYPE_CHECKING:
    from functional_optim.adapters.base import OptimizerBase


UNNAMED = (
    ". If parameters are passed with their names, as those of model.named_parameters(), they may "
    "be removed and moved together with these"
)
"""What to do if parameters without names are removed or moved."""


class TreeGroup:
    """One parameter group, stepped as one tree, eagerly."""

    def __init__(
        self, optimizer: OptimizerBase, group: int, tx: base.GradientTransformation
    ) -> None:
        self.optimizer = optimizer
        self.group = group
        self.tx = tx
        self.params: list[Tensor] = list(optimizer.param_groups[group]["params"])
        check_count(optimizer.param_groups[group])
        check_distinct(optimizer.param_groups[group])
        self.names: list[str] | None = names_of(optimizer.param_groups[group])
        unnamed = self.names is None and group > 0  # paths start at "0" in each group
        others = {name for each in optimizer.param_groups[:group] for name in names_of(each) or ()}
        again = not others.isdisjoint(self.names or ())
        self.place = f"{group}." if unnamed else f"{group}:" if again else ""
        with subtree(), draws.within(self.place):
            self.fresh = self._in_phase(tx.init(self._tree(self.params)))
        self.places = {p: path for path, p in named(optimizer.param_groups[group])}
        check_places(optimizer, self.places, UNNAMED if self.names is None else "")
        self.home, self.before = remembered(optimizer, self.places)

    def _in_phase(self, fresh: Any) -> Any:
        """A first state with the numbers of the other groups' gates, which are the optimizer's."""
        gates = [x.rule for x in self.tx.placements if x.rule.runs.shared and x.rule.carry]
        shared = {key for rule in gates for key in rule.carry._fields}
        firsts = [group["params"][0] for group in self.optimizer.param_groups if group["params"]]
        known = [x for x in map(self.optimizer.state.get, firsts) if x]

        def begun(path: str, leaf: Tensor) -> Tensor:
            *above, key = path.split(".")
            if key not in shared or "carry" not in above:
                return leaf
            found = next((x[path] for x in known if path in x), leaf)
            return found.to(leaf.device, leaf.dtype, copy=True)

        return tree.with_leaves(fresh, [begun(path, leaf) for path, leaf in tree.items(fresh)])

    def counts(self) -> tuple[int, ...]:
        """For each one-tensor rule inside, its index among those of its name."""
        return indices_by_name(self.tx.placements)

    def takes_part(self, elsewhere: bool) -> bool:
        """Whether the group has to be stepped.

        elsewhere: whether other groups have gradients. The gates of the optimizer then advance
            here, too.
        """
        if not self.tx.reads_gradients or self.tx.communicates:
            return True
        if any(p.grad is not None for p in self.params):
            return True
        return (
            elsewhere
            and bool(self.params)
            and any(placement.rule.runs.shared for placement in self.tx.placements)
        )

    def updated(self, extra: dict[str, Any]) -> tuple[Any, Any]:
        """The updates and the new state; nothing is written.

        extra: extra arguments of the update.
        """
        grads = [p.grad for p in self.params]
        params = self._tree(self.params)
        asked = {name: extra[name] for name in self.tx.extra if name in extra}
        with draws.within(self.place):
            return self.tx.update(self._tree(grads), self.state(), params, **asked)

    def state(self) -> Any:
        """The state of the transformation, as stored."""
        kept = (None if self.home is None else self.optimizer.state.get(self.home)) or {}
        return tree.with_leaves(
            self.fresh,
            [
                kept[path].to(leaf.dtype).reshape(leaf.shape) if path in kept else leaf
                for path, leaf in tree.items(self.fresh)
            ],
        )

    def written(self, updates: Any, state: Any) -> Write:
        """The step of the group's parameters, in place, and of their state, ready to be written.

        Parameters that the state references, as in `keep_snapshots`, are copied, and so are
        gradients: `backward` and `zero_grad` write into them.
        """
        check_updates(self._tree(self.params), updates)
        rows = tree.rows(self._tree(self.params), updates)
        moved = [(p, base.add(p, u)) for p, u in rows if u is not None]
        grads = [p.grad for p in self.params if p.grad is not None]
        here = Written(map(sharding.part, [*self.params, *grads]))
        new = {
            path: x if x.numel() and not here.meets(sharding.part(x)) else x.detach().clone()
            for path, x in tree.items(state)
        }

        def write() -> None:
            for p, value in moved:
                p.copy_(value)
            if self.params:
                self._keep(new)

        return write

    def _keep(self, new: dict[str, Tensor]) -> None:
        """Store the state with the first parameter."""
        state, first = self.optimizer.state, self.params[0]
        if self.home is not None and self.home is not first:
            state[first].update(state.pop(self.home, {}))
            self.home = first
        state[first].update(new)
        remember(self.optimizer, self.places, self.before)

    def _tree(self, values: list[Any]) -> Any:
        return values if self.names is None else dict(zip(self.names, values, strict=True))


class TreePart:
    """A tree's part in one step: its update, which runs again after each total that it requests.

    elsewhere: whether other groups have gradients. If this group has none, its counts still
    advance.
    alone: whether no other part of the step measures. It then runs once, with its own totals.
    order: the measurements that are summed over processes by the step.
    """

    def __init__(
        self,
        tree_group: TreeGroup,
        extra: dict[str, Any],
        elsewhere: bool,
        *,
        alone: bool,
        order: ReductionOrder,
    ) -> None:
        self.tree_group = tree_group
        self.extra = extra
        here = any(p.grad is not None for p in tree_group.params)
        keys = [key for key, _ in order]
        self.totals = Totals(alone=alone, everyone=elsewhere and not here, agenda=keys)
        self.missing: Missing | None = None
        self.result: tuple[Any, Any] | None = None

    def proceed(self) -> bool:
        """Run the update up to the next unknown total; False if it has finished."""
        if self.missing is None and self.result is None:
            try:
                with self.totals:
                    self.result = self.tree_group.updated(self.extra)
            except Missing as missing:
                self.missing = missing
        return self.missing is not None

    def ahead(self) -> list[Key]:
        """The requested measurement, and those that may follow, in order."""
        assert self.missing is not None
        pairs = zip(self.tree_group.tx.placements, self.tree_group.counts(), strict=True)
        keys = [
            (placement.name, count)
            for placement, count in pairs
            if placement.rule.reduce is not None
        ]
        key = self.missing.key
        return keys[keys.index(key) :] if key in keys else [key]

    def measure(self) -> list[Sequence[Any]]:
        """The measurements, in parts that are not yet summed."""
        assert self.missing is not None
        return [*self.missing.parts]

    def advance(self, total: Numbers | None = None) -> None:
        """Receive the requested total."""
        assert self.missing is not None
        parts = [sharding.part(x) for part in self.missing.parts for x in part]
        device = parts[0].device if parts else torch.device("cpu")
        wide = {"dtype": torch.float64, "device": device}
        self.totals.known.append(tuple([torch.as_tensor(x, **wide) for x in total or ()]))
        self.missing = None

    def step(self) -> list[Write]:
        """The results, ready to be written."""
        return [] if self.result is None else [self.tree_group.written(*self.result)]
