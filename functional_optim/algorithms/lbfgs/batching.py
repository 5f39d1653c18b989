"""Conversion between a state and a run: one problem, or a batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from functional_optim.algorithms.lbfgs.quasi_newton import Memory, split_blocks
from functional_optim.core.ravel import Ravel


class BatchLayout:
    """The shapes of vectors, scalars and pairs in a run.

    many: a batch of problems, possibly of one; else one problem. whole: keep a place for every pair
    that may be stored, so that shapes are constant.
    """

    def __init__(self, flat: Ravel, *, many: bool, whole: bool) -> None:
        self.flat = flat
        self.many = many
        self.whole = whole

    def vector(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.flat.size) if self.many else x

    def number(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 1) if self.many else x

    def count(self, x: Tensor) -> Any:
        return x.reshape(-1, 1) if self.many else int(x)

    def condition(self, x: Tensor) -> Any:
        return x.reshape(-1, 1) if self.many else bool(x)

    def lr(self, lr: Any) -> Any:
        if self.many:
            lr = torch.as_tensor(lr, dtype=self.flat.dtype, device=self.flat.device)
            return lr.reshape(-1, 1)
        return lr.reshape(()) if isinstance(lr, Tensor) else lr

    def value(self, f: Any) -> Any:
        """The function's values; for one problem as a Python float, as in torch."""
        f = checked_value(f, self.flat).detach()
        if self.many:
            return f.to(self.flat.dtype).reshape(-1, 1)
        return float(f)

    def memory(self, state: Any) -> Memory:
        """The pairs of a state, without its empty places unless they are wanted."""
        m = state.ro.shape[-1]
        used = m if self.whole else max((state.ro != 0).sum(-1).flatten().tolist(), default=0)
        stacks = [state.old_stps, state.old_dirs, state.ro]
        if self.many:
            widths = (self.flat.size, self.flat.size, 1)
            stacks = [x.reshape(-1, m, n) for x, n in zip(stacks, widths, strict=True)]
            s, y, rho = [split_blocks(x[:, m - used :]) for x in stacks]
        else:
            s, y, rho = [list(x[m - used :].unbind()) for x in stacks]
        return Memory(s, y, rho, self.number(state.H_diag))

    def stored(self, memory: Memory, state: Any) -> dict[str, Tensor]:
        """The pairs in the format of a state, empty places first."""
        pairs = zip(("old_stps", "old_dirs", "ro"), memory[:3], strict=True)
        m = state.ro.shape[-1]
        stacks = {name: self._stack(places, getattr(state, name), m) for name, places in pairs}
        return {**stacks, "H_diag": like(memory.gamma, state.H_diag)}

    def _stack(self, places: list[Tensor], old: Tensor, m: int) -> Tensor:
        if self.many:
            stack = torch.cat(places, 1)
            room = stack.new_zeros(stack.shape[0], m - stack.shape[1], stack.shape[2])
            return torch.cat([room, stack], 1).reshape(old.shape)
        return torch.cat([torch.zeros_like(old[len(places) :]), *[x.unsqueeze(0) for x in places]])


def checked_value(f: Any, flat: Ravel) -> Tensor:
    """The function's value, or values; raises TypeError for anything else."""
    if not isinstance(f, Tensor) or f.numel() != math.prod(flat.problems):
        what = f"shape {tuple(f.shape)}" if isinstance(f, Tensor) else f"type {type(f).__name__}"
        raise TypeError(
            f"the value has {what}, but must be a tensor of shape {flat.problems}. value_and_grad "
            "returns (value, gradients); torch.func.grad_and_value has them in reverse."
        )
    return f


def like(x: Any, old: Tensor) -> Tensor:
    """A scalar or a vector of a run in the format of a state."""
    return torch.as_tensor(x, dtype=old.dtype, device=old.device).reshape(old.shape)
