"""The base class of optimizer objects that step all parameter groups together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from functional_optim.adapters.base import OptimizerBase
from functional_optim.adapters.state.recipes import check_arguments, check_iterable
from functional_optim.core import base
from functional_optim.kernels.interrupts import held


class JointOptimizer(OptimizerBase):
    """An optimizer object of a transformation that needs all parameters at once.

    All groups have the same hyperparameters. Parameters that do not require gradients do not
    change. The state is stored with the first trainable parameter.
    """

    keeps_trees = False

    def _construct(self, params: ParamsT, hyper: dict[str, Any]) -> None:
        check_arguments(type(self).__name__, params)
        check_iterable(type(self).__name__, params)
        self.compile, self.stored, self.capturable = False, None, False
        super().__init__(params, hyper)

    def _moving(self) -> list[Tensor]:
        """The trainable parameters."""
        every = [p for group in self.param_groups for p in group["params"]]
        return [p for p in every if p.requires_grad]

    def _group(self) -> dict[str, Any]:
        """The hyperparameters, which all groups have in common."""
        who = f"{type(self).__name__} steps all groups together"
        return agreed(who, self.param_groups, self.defaults)

    def _known(self, tx: base.GradientTransformation, values: list[Tensor], first: Tensor) -> Any:
        """The state; missing entries come from `init`."""
        old = self.state.get(first) or {}
        fresh = tx.init(values)
        return type(fresh)(**{name: old.get(name, x) for name, x in fresh._asdict().items()})

    def _finish(self, moving: list[Tensor], new: list[Tensor], state: Any) -> None:
        """Write parameters and state, atomically."""

        def finish() -> None:
            for p, value in zip(moving, new, strict=True):
                p.copy_(value)
            self.state[moving[0]] = state._asdict()

        held(finish)


def agreed(who: str, groups: Sequence[dict[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """The first group, if all have the same values under these names.

    Raises:
        ValueError: otherwise; it begins with `who`.
    """
    first = groups[0]
    for name in names:
        values = [group[name] for group in groups]
        if any(x != first[name] for x in values[1:]):
            raise ValueError(
                f"{who}, but they have different {name}: {values}; use one value for all."
            )
    return first


def check_moving(moving: Collection[Any]) -> None:
    """Raise RuntimeError if nothing can be stepped."""
    if not moving:
        raise RuntimeError("no parameter requires gradients; there is nothing to step.")
