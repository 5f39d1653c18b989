"""Sharpness-aware minimization as an optimizer object: each step calls the closure twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from functional_optim import numeric
from functional_optim.adapters.optimizer import Optimizer, with_hooks
from functional_optim.adapters.state.recipes import Recipe
from functional_optim.combinators.sharpness import check_rho, climb, plain, relative
from functional_optim.core import base
from functional_optim.engine.group import Compile
from functional_optim.kernels.interrupts import held

RHO = "rho"
"""The entry of a parameter group with the distance of its gradients."""


class SAM(Optimizer):
    """An `Optimizer` whose gradients are those at a point uphill of the parameters.

    A step calls its closure at the parameters, moves them to `params + rho · g / ‖g‖` with the norm
    of all groups, calls the closure there, moves them back, and steps as the recipe says.
    `functional_optim.sam` is the same as a pure function. Batch normalization sees both calls.

    Args:
        params, recipe, compile, hyperparameters: those of :class:`Optimizer`.
        rho: the distance, ≥ 0. Default 0.05, the authors'. A group may have its own.

    State of each parameter: `step` and the recipe's slots.

    Raises:
        ValueError: for a negative rho.
        TypeError: from a step without a closure.

    Example::

        >>> import torch, functional_optim as fo
        >>> from functional_optim.adapters import SAM
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> opt = SAM([w], fo.sgd, rho=1.0, lr=0.1, compile=False)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = w @ w
        ...     loss.backward()
        ...     return loss
        >>> opt.step(closure).item(), w.detach()
        (25.0, tensor([2.2800, 3.0400]))
    """

    default_rho: ClassVar[float] = 0.05
    measured: ClassVar[Callable[[Tensor, Tensor], Tensor]] = staticmethod(plain)

    def __init__(
        self,
        params: ParamsT,
        recipe: Recipe,
        rho: numeric.Hyper | None = None,
        *,
        compile: Compile = True,
        **hyperparameters: Any,
    ) -> None:
        distance = self.default_rho if rho is None else rho
        check_rho(type(self).__name__, distance)
        super().__init__(params, recipe, compile=compile, **hyperparameters)
        self.defaults[RHO] = distance
        for group in self.param_groups:
            group.setdefault(RHO, distance)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; see :meth:`Optimizer.add_param_group`.

        Args:
            param_group: `params`, and values that differ from the defaults, `rho` among them.
        """
        if isinstance(param_group, dict):
            check_rho(type(self).__name__, param_group.get(RHO, 0.0))
        super().add_param_group(param_group)

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step.

        Args:
            closure: clears the gradients, computes the loss, calls its backward, and returns it. It
                is called twice, with gradients enabled. If it raises, the parameters are as they
                were.

        Returns:
            The loss of the first call, at the parameters.

        Raises:
            TypeError: without a closure.
        """
        if closure is None:
            raise TypeError(
                f"{type(self).__name__} needs the gradients at two points, so step needs a closure:"
                " a function that clears the gradients, computes the loss, calls its backward, and "
                "returns it."
            )
        loss = base.recorded(closure)
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.detach().clone() for p in params]
        try:
            base.unrecorded(self._climb)
            base.recorded(closure)
        finally:
            held(partial(base.unrecorded, _put_back, params, before))
        return super()._step(lambda: loss)

    step = with_hooks(_step)

    def _climb(self) -> None:
        """Move all parameters uphill; the norm is that of all groups."""
        every = [p for group in self.param_groups for p in group["params"]]
        ways = climb([p.grad for p in every], every, 1.0, type(self).measured)
        rho = [numeric.at(group[RHO], 1) for group in self.param_groups for _ in group["params"]]
        for p, way, distance in zip(every, ways, rho, strict=True):
            if way is not None:
                p.copy_(base.add(p, distance * way))

    def _check_keys(self, group: dict[str, Any]) -> None:
        super()._check_keys({key: x for key, x in group.items() if key != RHO})

    def __setstate__(self, state: dict[str, Any]) -> None:
        defaults = state.get("defaults") or self.defaults  # of a copy; a loaded state has none
        for group in state["param_groups"]:
            group.setdefault(RHO, defaults[RHO])
        super().__setstate__(state)


class ASAM(SAM):
    """`SAM` with a distance that is relative to each weight, as `functional_optim.asam` has it.

    Args:
        params, recipe, compile, hyperparameters: those of :class:`Optimizer`.
        rho: the distance, ≥ 0. Default 0.5, the paper's for CIFAR-10. A group may have its own.

    State of each parameter: `step` and the recipe's slots.

    Raises:
        ValueError: for a negative rho.
        TypeError: from a step without a closure.

    Example::

        >>> import torch, functional_optim as fo
        >>> from functional_optim.adapters import ASAM
        >>> w = torch.nn.Parameter(torch.tensor([2.0]))
        >>> opt = ASAM([w], fo.sgd, lr=0.1, compile=False)
        >>> def closure():
        ...     opt.zero_grad()
        ...     loss = w.square().sum()
        ...     loss.backward()
        ...     return loss
        >>> opt.step(closure).item(), w.detach()  # the gradient at 3
        (4.0, tensor([1.4000]))
    """

    default_rho = 0.5
    measured = staticmethod(relative)


def _put_back(params: list[Tensor], before: list[Tensor]) -> None:
    for p, value in zip(params, before, strict=True):
        p.copy_(value)
