"""Optimizer objects with different parameters for training and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_optim.adapters.base import with_hooks
from functional_optim.adapters.optimizer import Optimizer
from functional_optim.adapters.state.loading import TRAINING
from functional_optim.combinators.averaging import from_average, to_average
from functional_optim.combinators.master_weights import cells_of
from functional_optim.core import base, sharding
from functional_optim.core.cells import WEIGHT_SLOTS
from functional_optim.kernels.interrupts import held


class AveragingOptimizer(Optimizer):
    """An `Optimizer` for recipes with `schedule_free` or `gpa`, with a training and an evaluation
    mode.

    In training mode the parameters are the points at which gradients are taken; a new optimizer is
    in this mode. `eval()` writes the averages into the parameters, in place, and `train()` restores
    the parameters of training, up to rounding. Call `eval()` before you evaluate, export, or save
    the model for inference, and `train()` before the next step.

    You can save a checkpoint of model and optimizer in either mode, and a resumed run is bitwise
    equal: the mode is in the parameter groups, as `train_mode`. Load both.

    Args:
        params, recipe, compile, stored, hyperparameters: those of :class:`Optimizer`.

    State of each parameter: `step` and the recipe's slots, among them `z` and `average_share`.

    Raises:
        TypeError, ValueError: as :class:`Optimizer` does.
        RuntimeError: from a step in evaluation mode.

    Example::

        >>> import torch, functional_optim as fo
        >>> from functional_optim.adapters import AveragingOptimizer
        >>> def recipe(lr):
        ...     return fo.gpa(fo.adamw(lr), train_interp_coeff=0.7, eval_interp_coeff=0.9)
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = AveragingOptimizer(model.parameters(), recipe, lr=0.1, compile=False)
        >>> for _ in range(2):
        ...     opt.zero_grad()
        ...     model(torch.ones(2)).square().sum().backward()
        ...     opt.step()
        >>> opt.eval()  # model has the averages now
        >>> opt.train()
    """

    @property
    def training(self) -> bool:
        """Whether the parameters are those for training."""
        return all(group.get(TRAINING, True) for group in self.param_groups)

    def train(self, mode: bool = True) -> None:
        """Write the parameters of training into the parameters.

        Args:
            mode: False does what `eval` does, as in torch.nn.Module.
        """
        if not mode:
            return self.eval()
        return self._switch(True, from_average)

    def eval(self) -> None:
        """Write the averages into the parameters."""
        return self._switch(False, to_average)

    def _switch(self, training: bool, other: Callable[[Tensor, Tensor, float], Tensor]) -> None:
        """Set the mode of all groups, without interruption by Ctrl-C. other: one point from z."""
        late = [group for group in self.param_groups if group.get(TRAINING, True) != training]
        states = [(p, self.state.get(p) or {}) for group in late for p in group["params"]]
        averaged = [
            (p, z, _entry(mine, *WEIGHT_SLOTS), float(_entry(mine, "average_share")))
            for p, mine in states
            if (z := _entry(mine, "z", "z.bfloat16")) is not None
        ]

        def replace() -> None:
            for *tensors, share in averaged:  # one by one: a model has no room for a second one
                p, z, low = map(sharding.shard, tensors)  # DTensors do not shift bits
                if low is None or p.dtype is not torch.bfloat16:
                    p.copy_(other(p, z.to(p.device), share))
                    continue
                cells = cells_of(low)
                w = other(cells.decode((p, low.to(p.device))), z.to(p.device, torch.float32), share)
                for old, new in zip((p, low), cells.encode(w, None), strict=True):
                    old.copy_(new)
            for group in late:
                group[TRAINING] = training

        if late:
            held(partial(base.unrecorded, replace))

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; see :meth:`Optimizer.step`.

        Raises:
            RuntimeError: in evaluation mode.
        """
        if not self.training:
            raise RuntimeError(
                f"{type(self).__name__} is in evaluation mode, in which the parameters are "
                "averages, not the points of the gradients; call opt.train() before the forward "
                "pass, and opt.eval() before you evaluate the model or save it for inference."
            )
        return super()._step(closure)

    step = with_hooks(_step)

    def transform(self, group: dict[str, Any]) -> base.GradientTransformation:
        """The recipe, called with a group's hyperparameters.

        Raises:
            TypeError: if it contains no average.
        """
        tx = super().transform(group)
        if isinstance(tx, base.GradientTransformation) and not any(
            "z" in x.rule.keys and "average_share" in getattr(x.rule.carry, "_fields", ())
            for x in tx.placements
        ):
            raise TypeError(
                f"{type(self).__name__} needs a recipe with schedule_free or gpa in it, e.g. "
                "lambda lr: fo.schedule_free(fo.sgd(lr)); use Optimizer for others."
            )
        return tx

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, in the mode of the others; see :meth:`Optimizer.add_param_group`.

        Args:
            param_group: `params`, and values that differ from the defaults.
        """
        mode = self.training
        super().add_param_group(param_group)
        self.param_groups[-1][TRAINING] = mode

    def _check_keys(self, group: dict[str, Any]) -> None:
        super()._check_keys({key: x for key, x in group.items() if key != TRAINING})

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group.setdefault(TRAINING, True)
        super().__setstate__(state)


def _entry(mine: dict[str, Any], *names: str) -> Any:
    """What a parameter's state has under a name, perhaps after labels and the name of a rule; None
    if it has nothing."""
    ends = tuple([f".{name}" for name in names])
    found = [x for key, x in mine.items() if (key in names or key.endswith(ends)) and x is not None]
    if len(found) > 1:
        raise ValueError(
            f"a parameter has {len(found)} averages ({', '.join(mine)}); use one schedule_free or "
            "gpa for each parameter."
        )
    return found[0] if found else None
