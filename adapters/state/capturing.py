"""Optimizer objects whose numbers are kept on the device, so that a captured step replays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_optim import kernels

KEY = "capturable"
"""The keyword, and the entry of a group, which torch's own classes have."""


def is_capturable(optimizer: Any, group: Mapping[str, Any]) -> bool:
    """Whether the numbers of a group's steps are worked out on the device.

    As in torch, `fused` asks for it, too: its step is skipped on the device where gradients are not
    finite.
    """
    return bool(group.get(KEY) or group.get("fused") or vars(optimizer).get(KEY))


def number_device(optimizer: Any, group: Mapping[str, Any], p: Tensor) -> torch.device | None:
    """Where the count and the carried scalars of a parameter are kept; None: on the CPU."""
    return p.device if p.device.type != "cpu" and is_capturable(optimizer, group) else None


def check_capture(optimizer: Any, plan: Any) -> None:
    """Raise RuntimeError unless a step that is being captured can be replayed.

    plan: of the step before, if it holds for this one.
    """
    if not kernels.capturing():
        return
    if not all(is_capturable(optimizer, group) for group in optimizer.param_groups):
        raise RuntimeError(
            f"a step of {type(optimizer).__name__} is being captured, but its step count is kept "
            "on the CPU, so each replay would make the same step again; pass capturable=True."
        )
    if plan is None:
        raise RuntimeError(
            f"a step of {type(optimizer).__name__} is being captured, but it is the first one with "
            "these parameters, gradients or hyperparameters, which compiles kernels and makes the "
            "state; make a few such steps before, on a side stream, as "
            "torch.cuda.make_graphed_callables does it."
        )
