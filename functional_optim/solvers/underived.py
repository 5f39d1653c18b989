"""Parameters on which a value depends by operations that autograd does not record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from functional_optim import tree
from functional_optim.core import modes
from functional_optim.core.ravel import Ravel
from functional_optim.kernels.callers import warn
from functional_optim.solvers.box import Box
from functional_optim.solvers.given import mask_tree
from functional_optim.solvers.residuals import searched

LEAST = 1e-2
"""The smallest slope that counts: the relative change of the value, over a parameter's size."""


def warn_of_underived(
    name: str,
    fun: Callable[[Tensor], Tensor],
    flat: Ravel,
    box: Box,
    ends: tuple[Tensor, Tensor],
    g: Tensor,
) -> None:
    """Warn of parameters with derivative 0 that stayed where they were, but change the value.

    name: of the solver. fun: the value of one problem at (n,). ends: the first and the last point,
    each (1, n). g: the gradient at the last one, (1, n). The function is called only if there are
    parameters that stayed.
    """
    first, last = ends
    still = (first == last) & (g == 0)
    if modes.transformed() or not bool(still.any()):
        return
    eps = max(torch.finfo(p.dtype).eps for p in flat.leaves)
    far = eps ** (1 / 3) * last.abs().clamp(min=1)

    def value(point: Tensor) -> float:
        try:
            with torch.enable_grad():  # fun may compute derivatives
                return float(fun(searched(flat.snap(box.inside(point)[0]))).detach())
        except Exception:  # of points that the search did not see: the result must not be lost
            return math.nan

    here = value(last)

    def depends(part: Tensor) -> bool:
        """Whether the value is a slope on both sides, not an extremum, a corner or rounding."""
        step = torch.where(part, far, 0.0)
        above, below = value(last + step) - here, here - value(last - step)
        least = LEAST * float(far[part].min()) * abs(here)
        if min(abs(above), abs(below)) <= least:
            return False
        near = value(last + step / 2) - here  # an eighth of it in a cubic
        return 1 / 3 < above / below < 3 and 1 / 3 < near / above < 2 / 3

    if not depends(still):
        return
    names = [_name(path, mask) for path, mask, part in _parts(flat, still) if depends(part)]
    warn(
        f"functional_optim: the value changes with {' and '.join(names) or 'x'}, but has "
        f"derivative 0 there, so {name} took it for a constant. Leave out detach, item, float, "
        "numpy and torch.tensor in the function, or leave out of x0 what is constant."
    )


def _parts(flat: Ravel, still: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Of each leaf with such parameters: its path, which of its elements, and which of all."""
    masks = list(tree.items(mask_tree(flat, still, batched=False)))
    for i, (path, mask) in enumerate(masks):
        if bool(mask.any()):
            only = [m.reshape(-1) & (i == k) for k, (_, m) in enumerate(masks)]
            yield path, mask, torch.cat(only).unsqueeze(0)


def _name(path: str, mask: Tensor) -> str:
    name = f"x at {path!r}" if path else "x"
    if bool(mask.all()):
        return name
    index = mask.nonzero()[0].tolist()
    return f"element {index} of {name}"
