"""Whether a kernel has done what the rules do."""

from __future__ import annotations

import torch
from torch import Tensor

from functional_optim.kernels.node import Unsuitable


def compare(x: Tensor, expected: Tensor, old: Tensor | None = None, *, bits: bool = False) -> None:
    """Raise Unsuitable unless a library has done what the rules do.

    old: the values before the step, which may be small compared with them. bits: integers are the
    last bits of weights, which a rounding elsewhere changes.
    """
    expected = expected.reshape(x.shape)
    if not x.dtype.is_floating_point or x.element_size() == 1:
        if bits:
            return
        codes = x.dtype.is_floating_point  # of 8 bits, for which there is no comparison
        pair = (x.view(torch.uint8), expected.view(torch.uint8)) if codes else (x, expected)
        few = max(1, 0.02 * x.numel()) if x.numel() > 1 else 0  # neighbours, by rounding
        same = int(pair[0].ne(pair[1]).sum()) <= few
    else:
        a, b = x.double(), expected.double()
        step = b if old is None else b - old.double()
        size = step.nan_to_num(0.0, 0.0, 0.0).abs().amax() if x.numel() else step.sum()
        rounding = 2 * torch.finfo(x.dtype).eps * b.abs()
        near = (a - b).abs() <= rounding + 1e-4 * step.abs() + 1e-5 * size
        near &= b.isfinite()
        same = bool((near | (a == b) | (a.isnan() & b.isnan())).all())
    if not same:
        raise Unsuitable("a kernel that does something else than the rule")
