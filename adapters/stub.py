"""Stubs for trainers that require an optimizer and a loss when weights are updated elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.adapters.base import OptimizerBase, with_hooks
from functional_optim.adapters.state.recipes import check_iterable
from functional_optim.adapters.stepping.loss import loss_of
from functional_optim.core import base
from functional_optim.core.ravel import real_dtype
from functional_optim.transforms.scaling import set_to_zero

READ = {"lr": 0.0, "weight_decay": 0.0}
"""Keys that trainers and schedulers read from every parameter group."""


class OptimizerStub(OptimizerBase):
    """A torch.optim.Optimizer that changes nothing, for trainers that update weights themselves.

    It supports checkpoints, pickle, hooks and LR schedulers like any other; its step calls the
    closure, if there is one, and changes no parameter. It needs no parameters. The corresponding
    transformation is `set_to_zero`.

    Args:
        params: as torch takes them, or nothing at all (the default).
        hyperparameters: defaults of the parameter groups, for schedulers and loggers, such as
            `momentum` for OneCycleLR. A group without `lr` or `weight_decay` has 0.

    `param_groups` is initially `[]` and `defaults` is `{}`; `state` stays empty.

    Raises:
        ValueError: from load_state_dict, for a checkpoint of another kind of optimizer.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import OptimizerStub
        >>> opt = OptimizerStub()
        >>> opt.param_groups, opt.state_dict()
        ([], {'state': {}, 'param_groups': []})
        >>> opt.step(lambda: torch.tensor(0.5))
        tensor(0.5000)
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> opt.add_param_group({"params": [w], "lr": 0.1})
        >>> scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
        >>> opt.step()
        >>> scheduler.step()
        >>> opt.param_groups[0]["lr"], w.item()
        (0.05, 1.0)
    """

    counts_steps = False

    def __init__(self, params: Any = (), **hyperparameters: Any) -> None:
        check_iterable("OptimizerStub", params)
        given = params if isinstance(params, Tensor) else list(params)  # a tensor: torch's error
        nothing = not isinstance(given, Tensor) and not given
        super().__init__([{"params": []}] if nothing else given, hyperparameters)
        if nothing:  # torch requires a group
            self.param_groups.clear()

    __str__ = OptimizerBase.__repr__  # there are no gradients, and no slots

    def transform(self, group: dict[str, Any]) -> base.GradientTransformation:
        """`set_to_zero`, for every group."""
        return set_to_zero()

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure once, with gradients enabled, and return the loss; change nothing.

        Args:
            closure: returns the loss.

        Returns:
            The closure's loss; None without a closure.
        """
        return None if closure is None else loss_of(closure)

    step = with_hooks(_step)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch does. Its parameters do not change, either.

        Args:
            param_group: `params`, and hyperparameters to be read.

        Raises:
            TypeError, ValueError: torch's, for invalid parameters. The optimizer is then unchanged.
        """
        if isinstance(param_group, dict):
            param_group = {**READ, **self.defaults, **param_group}
        super().add_param_group(param_group)

    def check_loaded(self, given: dict[str, Any], before: list[set[str]]) -> None:
        """Raise ValueError if what was loaded does not fit, such as the state of an optimizer that
        learns."""
        super().check_loaded(given, before)
        if self.state:
            raise ValueError(
                f"an OptimizerStub keeps no state, but the loaded state dict has "
                f"{len(self.state)} entries in its state; load a checkpoint of a stub, or "
                "construct the optimizer that wrote this one."
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in READ.items():
                group.setdefault(key, value)


def zero_loss(*args: Any) -> Tensor:
    """A loss of zero with gradients of zero.

    Use it as the criterion for trainers that call `loss.backward()`.

    Args:
        args: any trees of tensors: outputs and labels, or the parameters. Each of them that
            requires gradients gets a gradient of zero, even if its values are NaN or infinite; if
            none does, the loss itself is a leaf.

    Returns:
        0-dim, in the real dtype and on the device of the first tensor that requires gradients, or
        else of the first floating-point one.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import zero_loss
        >>> w = torch.tensor([torch.nan, 2.0], requires_grad=True)
        >>> loss = zero_loss(3 * w, torch.tensor([0, 1]))
        >>> loss.backward()
        >>> loss.item(), w.grad
        (0.0, tensor([0., 0.]))
    """
    found = [x for x in tree.leaves(args) if isinstance(x, Tensor)]
    smooth = [x for x in found if x.is_floating_point() or x.is_complex()]
    live = [x for x in smooth if x.requires_grad]
    if not live:
        like = smooth[0] if smooth else torch.empty(())
        return torch.zeros((), dtype=real_dtype(like), device=like.device, requires_grad=True)
    parts = [(x.real if x.is_complex() else x).reshape(-1)[:0].sum() for x in live]
    return sum(parts[1:], start=parts[0])
