"""Optimizer objects of the self-scaled quasi-Newton methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from functional_optim import numeric
from functional_optim.adapters.base import with_hooks
from functional_optim.adapters.joint import (
    JointOptimizer,
    check_moving,
    checked_closure,
    cleared,
    undone,
    write,
)
from functional_optim.adapters.lbfgs import number
from functional_optim.algorithms.self_scaled import ssbfgs, ssbroyden
from functional_optim.core import base, sharding
from functional_optim.core.numbers import tensor_of


class SelfScaled(JointOptimizer):
    """The base class of `SSBFGS` and `SSBroyden`."""

    def __init__(
        self, params: ParamsT, max_iter: int = 20, max_eval: int | None = None,
        tolerance_grad: numeric.Number = 1e-7, tolerance_change: numeric.Number = 0.0,
    ) -> None:  # fmt: skip
        self._construct(locals())

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make up to `max_iter` iterations.

        Args:
            closure: clears the gradients, computes the loss, calls its backward, and returns it.
                Called at every point of a line search, with gradients enabled.

        Returns:
            The loss that the first call returned.

        Raises:
            TypeError: without a closure.
            RuntimeError: if no parameter requires gradients, or the closure leaves no gradients or
                does not clear them.
            ValueError: if the loss or a gradient is not finite, groups have different
                hyperparameters, or parameters are flattened shards.

        A step that raises has changed nothing.
        """
        closure = checked_closure(type(self).__name__, closure)
        return base.unrecorded(self._step_whole, partial(base.recorded, closure))

    step = with_hooks(_step)

    def _step_whole(self, closure: Callable[[], Any]) -> Any:
        group, moving = self._group(), self._moving()
        check_moving(moving)
        tx = self.checked_transform(group, in_step=True)
        mesh = sharding.mesh_of(moving)

        def evaluated() -> tuple[Any, Tensor, list[Tensor]]:
            loss = closure()
            value = tensor_of(number(loss, mesh))
            if value.isfinite() and all(p.grad is None for p in moving):
                raise RuntimeError(
                    f"the closure of {type(self).__name__} left no gradients; call the loss's "
                    "backward() in it."
                )
            return loss, value, [torch.zeros_like(p) if p.grad is None else p.grad for p in moving]

        def value_and_grad(point: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            write(moving, point)
            with cleared(type(self).__name__, moving, "call backward() for each in the closure"):
                return evaluated()[1:]

        def run(kept: list[tuple[Tensor, Tensor]]) -> Any:
            before = [x for _, x in kept]
            loss, value, grads = evaluated()
            grads = [g.clone() for g in grads]
            updates, state = tx.update(
                grads, self._known(tx, before, moving[0]), before, value=value,
                value_and_grad=value_and_grad,
            )  # fmt: skip
            self._finish(moving, base.apply_updates(before, updates), state, kept)
            return loss

        return undone(moving, run)


class SSBFGS(SelfScaled):
    """`functional_optim.ssbfgs` as an optimizer object.

    `step(closure)` makes up to `max_iter` iterations. The closure is that of torch.optim.LBFGS: it
    clears the gradients, computes the loss, calls its backward, and returns it.

    Args:
        params: parameters, named parameters, or dicts of parameter groups, as torch takes them.
            Those that do not require gradients do not change.
        max_iter: iterations in one step, ≥ 1. Default 20, torch's for LBFGS.
        max_eval: no iteration begins after so many evaluations in one step, ≥ 1. Default 1.25
            max_iter.
        tolerance_grad: end a step when no element of the gradient is larger, ≥ 0.
        tolerance_change: end a step when the loss decreases by less than this value times
            max(|loss|, 1), ≥ 0.

    State, of the first trainable parameter: `n_iter`, `func_evals`, `pairs`, `inverse_hessian`.

    Raises:
        ValueError: for values out of range.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import SSBFGS
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        >>> opt = SSBFGS([w])
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = (w - 3).square().sum()
        ...     loss.backward()
        ...     return loss
        >>> opt.step(closure).item()
        5.0
        >>> torch.allclose(w, torch.full_like(w, 3.0))
        True
    """

    recipe, sized = ssbfgs, "inverse_hessian"


class SSBroyden(SelfScaled):
    """`functional_optim.ssbroyden` as an optimizer object.

    Args:
        params: see :class:`SSBFGS`.
        max_iter: see there.
        max_eval: see there.
        tolerance_grad: see there.
        tolerance_change: see there.

    State, of the first trainable parameter: `n_iter`, `func_evals`, `pairs`,
    `broyden_inverse_hessian`.

    Raises:
        ValueError: for values out of range.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import SSBroyden
        >>> net = torch.nn.Linear(3, 1).double()
        >>> x, y = torch.randn(9, 3).double(), torch.randn(9, 1).double()
        >>> opt = SSBroyden(net.parameters(), max_iter=50)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = (net(x) - y).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> loss = opt.step(closure)
        >>> bool(net.weight.grad.abs().max() < 1e-5)
        True
    """

    recipe, sized = ssbroyden, "broyden_inverse_hessian"
