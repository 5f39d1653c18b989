"""The loss that a closure returns, for rules that read it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base, modes, sharding


def asks(tx: base.GradientTransformation) -> bool:
    """Whether a transformation reads the loss."""
    return "value" in tx.extra


def extra_of(loss: Any, mesh: Any = None) -> dict[str, Any]:
    """The extra arguments of a step in an optimizer object: `value`, the closure's loss.

    mesh: of sharded parameters. All processes must go one way, so all get the mean of their losses.

    Raises:
        RuntimeError: if there was no closure.
    """
    if loss is None:
        raise RuntimeError(
            "this recipe reads the loss; call opt.step(closure) with a function that computes the "
            "loss and its gradients, and returns the loss. A GradScaler steps without a closure, "
            "as under Lightning's 16-mixed precision: take bfloat16, which needs no scaler."
        )
    if mesh is not None:
        return {"value": sharding.mean_over(loss, mesh)}
    if isinstance(loss, Tensor):
        plain = loss.device.type == "cpu" and not torch.compiler.is_compiling()
        recorded = torch.is_grad_enabled() or modes.intercepted()
        return {"value": loss.item() if plain and not recorded else numeric.float64(loss)}
    return {"value": float(loss)}
