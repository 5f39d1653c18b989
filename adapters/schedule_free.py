"""Schedule-Free SGD and AdamW as optimizer objects."""

from __future__ import annotations

from functional_optim.adapters.averaging import AveragingOptimizer
from functional_optim.adapters.ready_made import ReadyMade

DOC = """`functional_optim.{name}` as an optimizer object with two modes.

Args:
    params: parameters, named parameters, or dicts of parameter groups, as torch takes them.
    compile, stored: as for :class:`AveragingOptimizer`, which describes `train()` and `eval()`.

    The other arguments are those of :func:`functional_optim.{name}`.

State of each parameter: `step`, and the slots of :func:`functional_optim.{name}`.

Raises:
    TypeError, ValueError: for arguments and gradients that cannot be used.
    RuntimeError: from a step in evaluation mode.

Example::

    >>> import torch
    >>> from functional_optim.adapters import {optimizer}
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> opt = {optimizer}([w], lr=0.1, compile=False)
    >>> for _ in range(3):
    ...     opt.zero_grad()
    ...     w.square().sum().backward()
    ...     opt.step()
    >>> opt.eval()
    >>> bool(w.square().sum() < 2)
    True
"""
"""What the docstring of each becomes."""


class ScheduleFree(AveragingOptimizer, ReadyMade):
    """A `ReadyMade` with two modes."""

    doc = DOC
    how = ("compile", "stored")
