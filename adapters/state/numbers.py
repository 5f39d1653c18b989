"""The scalars in the state of an optimizer, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from functional_optim import numeric
from functional_optim.adapters.state.names import named
from functional_optim.adapters.stepping.columns import Readings
from functional_optim.adapters.stepping.shared_counts import STEPS
from functional_optim.adapters.stepping.tree_groups import TreeGroup
from functional_optim.checkpoint.lookup import entries_of, read, single
from functional_optim.core.leafwise import Leafwise

if TYPE_CHECKING:
    from functional_optim.adapters.base import OptimizerBase


States: TypeAlias = list[tuple[str, dict[str, Any]]]
"""The states of a group's parameters, with the names of these."""


def numbers_of(optimizer: OptimizerBase, names: Sequence[str]) -> dict[str, float]:
    """The scalars of the states of all parameter groups."""
    found: dict[str, Any] = {}
    groups = optimizer.param_groups
    paths = [path for group in groups for path, _ in named(group)]
    alone = len(set(paths)) == len(paths)
    labels = [str(group.get("name", k)) for k, group in enumerate(groups)]
    if len(set(labels)) < len(labels):
        labels = list(map(str, range(len(groups))))
    for k, group in enumerate(groups):
        tx = optimizer.checked_transform(group, in_step=True)
        label = labels[k] if len(groups) > 1 else ""
        within = "" if alone else f"{label}."
        if isinstance(tx, Leafwise):
            states = [(path, optimizer.state.get(p) or {}) for path, p in named(group)]
            _add(found, tx, states, label, within)
        elif optimizer.keeps_trees and group["params"]:
            for key, x in single(entries_of(TreeGroup(optimizer, k, tx).state())).items():
                name, _, path = key.partition("/")
                found[_joined(name, within + path if path else label)] = x
    return read(found, names)


def _add(found: dict[str, Any], tx: Leafwise, states: States, label: str, within: str) -> None:
    """Add the scalars of a group. label: its name, if there are several groups. within: the prefix
    of its parameters' names."""
    known = {key: x for _, mine in reversed(states) for key, x in mine.items()}
    shared = {key for rule, _, keys in tx.rules if rule.runs.shared for key in keys}
    each = {key for _, mine in states for key, x in mine.items() if not _is_number(x)}
    counts = [mine[key] for _, mine in states for key in (STEPS, "step") if key in mine]
    steps = list(map(Readings(), counts))
    if steps:
        found["step"] = max(*steps, found.get("step", 0.0))
    for i, (placement, keys) in enumerate(zip(tx.placements, tx.layout.hyper, strict=True)):
        gate = tx.layout.carry[i - placement.gate][0] if placement.gate else ""
        t = known.get(gate, 1.0) if gate else max(steps, default=1.0)
        for key, (_, value) in zip(keys, placement.rule.each_hyper(), strict=True):
            found[_joined(key, label)] = numeric.at(value, numeric.maximum(t, 1.0))
    for path, mine in states:
        for key, x in mine.items():
            if key in shared:
                found.setdefault(key, x)
            elif key not in each and key not in ("step", STEPS):
                found[f"{key}/{within}{path}"] = x


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) or (isinstance(x, Tensor) and x.dim() == 0)


def _joined(name: str, path: str) -> str:
    return f"{name}/{path}" if path else name
