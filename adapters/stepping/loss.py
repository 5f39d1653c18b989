"""The loss of a closure, and unscaling of gradients that a GradScaler leaves to the step.

torch's `fused=True` works in this way: the scaler sets `grad_scale` and `found_inf` on the
optimizer and calls `step`, which is skipped on the device, without synchronization.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from functional_optim import numeric
from functional_optim.core import base, modes, sharding
from functional_optim.solvers.arguments import is_number


def loss_of(closure: Any) -> Any:
    """What the closure of a step returns; raises TypeError for anything else than a closure."""
    if not callable(closure):
        raise TypeError(
            f"step takes a closure or nothing, but got a {type(closure).__name__}; call "
            "loss.backward() and step(), or pass a function that computes the loss and "
            "its gradients and returns the loss."
        )
    return base.recorded(closure)


def extra_of(loss: Any, mesh: Any = None) -> dict[str, Any]:
    """The extra arguments of a step in an optimizer object: `value`, the closure's loss.

    mesh: that of sharded parameters. All processes must take the same path, so all receive the mean
    of their losses.

    Raises:
        RuntimeError: if there was no closure.
        TypeError: if it returned something other than a number.
    """
    if loss is None:
        raise RuntimeError(
            "this recipe reads the loss; call opt.step(closure) with a function that computes the "
            "loss and its gradients, and returns the loss. A GradScaler steps without a closure, "
            "as under Lightning's 16-mixed precision: use bfloat16, which needs no scaler."
        )
    check_loss(loss)
    if mesh is not None:
        return {"value": sharding.mean_over(loss, mesh)}
    if isinstance(loss, Tensor):
        plain = loss.device.type == "cpu" and not torch.compiler.is_compiling()
        recorded = torch.is_grad_enabled() or modes.intercepted()
        return {"value": loss.item() if plain and not recorded else numeric.float64(loss)}
    return {"value": float(loss)}


def check_loss(loss: Any) -> None:
    """Raise TypeError if what a closure returned is not one real number."""
    if not is_number(loss):
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise TypeError(
            "the closure must return the loss, one real number, but it returned a "
            f"{type(loss).__name__}{shape}."
        )


def left_to_step(optimizer: Any) -> tuple[Tensor | None, Tensor | None]:
    """The scale of the gradients, and the scalar that is not 0 if one is not finite; None if it is
    not set, or a GradScaler does not leave it to this optimizer.

    The scaler does so if the optimizer was created with `fused`; a load may change the groups.
    """
    scale, found = [getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")]
    if scale is None and found is None:
        return None, None
    left = getattr(optimizer, "_step_supports_amp_scaling", False)
    left = left or any(group.get("fused") for group in optimizer.param_groups)
    return (scale, found) if left else (None, None)


def forget_scale(optimizer: Any) -> None:
    """Delete what a GradScaler has set for a step that raises an error or is interrupted.

    The scaler deletes it only after a step that returns. It multiplies the scale of the next step
    by a scale that it finds.
    """
    shared = vars(optimizer)
    if shared.pop("found_inf", None) is not None:
        shared.pop("grad_scale", None)


@torch.no_grad()
def unscale(
    grads: Iterable[Tensor], scale: Tensor, made: list[tuple[Tensor, Any]] | None = None
) -> None:
    """Divide gradients by a GradScaler's scale, in place, as its own function rounds them.

    made: each is recorded there with the scale, by which `discard` multiplies it.
    """
    inverse = scale.double().reciprocal().float().reshape(())
    here = {inverse.device: inverse}
    for g in grads:
        if g.device not in here:
            here[g.device] = inverse.to(g.device, non_blocking=True)
        multiply(g, here[g.device])
        if made is not None:
            made.append((g, scale))


def multiply(g: Tensor, factor: Tensor) -> None:
    """Multiply a gradient by a 0-dim tensor, in place."""
    values = g._values() if g.is_sparse else g
    if values.element_size() > 2:
        values.mul_(factor)
    else:  # rounded once
        values.copy_(values.float().mul_(factor))
