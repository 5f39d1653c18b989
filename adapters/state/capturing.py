"""Optimizer objects with counts and scalars on the device, so that a captured step can be
replayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_optim import kernels

KEY = "capturable"
"""The keyword, and the key of a group, as in torch's classes."""


def is_capturable(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Whether the scalars of a group's steps are computed on the device.

    As in torch, also with `fused`: the device skips its step if gradients are not finite.
    """
    return bool(group.get(KEY) or group.get("fused") or vars(optimizer).get(KEY))


def number_device(optimizer: Any, group: Mapping[str, Any], p: Tensor) -> torch.device | None:
    """The device of the count and the carried scalars of a parameter; None: the CPU."""
    return p.device if p.device.type != "cpu" and is_capturable(optimizer, group) else None


def check_capture(optimizer: Any, plan: Any) -> None:
    """Raise RuntimeError unless a step that is being captured can be replayed.

    plan: that of the previous step, if it is valid for this one.
    """
    if not kernels.capturing():
        return
    if not all(is_capturable(optimizer, group) for group in optimizer.param_groups):
        raise RuntimeError(
            f"a step of {type(optimizer).__name__} is being captured, but its step count is kept "
            "on the CPU, so each replay would repeat the same step; pass capturable=True."
        )
    if plan is None:
        raise RuntimeError(
            f"a step of {type(optimizer).__name__} is being captured, but it is the first one with "
            "these parameters, gradients or hyperparameters, which compiles kernels and creates "
            "the state; take a few such steps before, on a side stream, as "
            "torch.cuda.make_graphed_callables does it."
        )
