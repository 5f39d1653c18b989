"""Stepping a group with a transformation of whole trees, which knows no single tensors.

The tree is a list of the parameters, or a dict of them where they have names. Its state has no
slots per parameter, so all of it is kept with the group's first parameter, as torch's LBFGS does: a
flat dict from each tensor's path in the state to the tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from functional_optim import base, tree
from functional_optim.adapters.names import names_of
from functional_optim.combine import extra_names, meets, reads_gradients

if TYPE_CHECKING:
    from functional_optim.adapters.optimizer import Runs


class WholeTree:
    """One parameter group, stepped as one tree, eagerly."""

    def __init__(self, optimizer: Runs, group: int, tx: base.GradientTransformation) -> None:
        self.optimizer = optimizer
        self.group = group
        self.tx = tx
        self.params: list[Tensor] = list(optimizer.param_groups[group]["params"])
        self.names: list[str] | None = names_of(optimizer.param_groups[group])
        self.fresh = tx.init(self._tree(self.params))

    def run(self, extra: dict[str, Any]) -> None:
        """Step the group's parameters, in place, and keep the new state.

        extra: arguments for those who take them.
        """
        grads = [p.grad for p in self.params]
        if all(g is None for g in grads) and reads_gradients(self.tx) and not meets(self.tx):
            return
        kept = self.optimizer.state[self.params[0]] if self.params else {}
        state = tree.with_leaves(
            self.fresh,
            [
                kept[path].to(leaf.dtype).reshape(leaf.shape) if path in kept else leaf
                for path, leaf in tree.items(self.fresh)
            ],
        )
        params = self._tree(self.params)
        asked = {name: extra[name] for name in extra_names(self.tx) if name in extra}
        updates, state = self.tx.update(self._tree(grads), state, params, **asked)
        for p, u in tree.rows(params, updates):
            if u is not None:
                p.copy_(base.add(p, u))
        kept.update(tree.items(state))

    def _tree(self, values: list[Any]) -> Any:
        return values if self.names is None else dict(zip(self.names, values, strict=True))
