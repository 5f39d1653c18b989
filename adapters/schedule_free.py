"""Schedule-Free SGD and AdamW as optimizer objects."""

from __future__ import annotations

from torch.optim.optimizer import ParamsT

import functional_optim as fo
from functional_optim import numeric
from functional_optim.adapters.averaging import AveragingOptimizer
from functional_optim.adapters.state.storage import Stored
from functional_optim.algorithms.adam import Betas
from functional_optim.engine.group import Compile


class ScheduleFreeSGD(AveragingOptimizer):
    """`functional_optim.schedule_free_sgd` as an optimizer object with two modes.

    Args:
        params: parameters, named parameters, or dicts of parameter groups, as torch takes them.
        compile, stored: as for :class:`AveragingOptimizer`, which describes `train()` and `eval()`.

        The other arguments are those of :func:`functional_optim.schedule_free_sgd`.

    State of each parameter: `step`, and the slots of :func:`functional_optim.schedule_free_sgd`.

    Raises:
        TypeError, ValueError: for arguments and gradients that cannot be used.
        RuntimeError: from a step in evaluation mode.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import ScheduleFreeSGD
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = ScheduleFreeSGD([w], lr=0.1, compile=False)
        >>> for _ in range(3):
        ...     opt.zero_grad()
        ...     w.square().sum().backward()
        ...     opt.step()
        >>> opt.eval()
        >>> bool(w.square().sum() < 2)
        True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 1.0,
        momentum: numeric.Hyper = 0.9,
        weight_decay: numeric.Hyper = 0.0,
        warmup_steps: int = 0,
        r: numeric.Hyper = 0.0,
        weight_lr_power: numeric.Hyper = 2.0,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None:
        super().__init__(
            params,
            fo.schedule_free_sgd,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            r=r,
            weight_lr_power=weight_lr_power,
            maximize=maximize,
            compile=compile,
            stored=stored,
        )


class ScheduleFreeAdamW(AveragingOptimizer):
    """`functional_optim.schedule_free_adamw` as an optimizer object with two modes.

    Args:
        params: parameters, named parameters, or dicts of parameter groups, as torch takes them.
        compile, stored: as for :class:`AveragingOptimizer`, which describes `train()` and `eval()`.

        The other arguments are those of :func:`functional_optim.schedule_free_adamw`.

    State of each parameter: `step`, and the slots of :func:`functional_optim.schedule_free_adamw`.

    Raises:
        TypeError, ValueError: for arguments and gradients that cannot be used.
        RuntimeError: from a step in evaluation mode.

    Example::

        >>> import torch
        >>> from functional_optim.adapters import ScheduleFreeAdamW
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = ScheduleFreeAdamW([w], lr=0.1, compile=False)
        >>> for _ in range(3):
        ...     opt.zero_grad()
        ...     w.square().sum().backward()
        ...     opt.step()
        >>> opt.eval()
        >>> bool(w.square().sum() < 2)
        True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 0.0025,
        betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-8,
        weight_decay: numeric.Hyper = 0.0,
        warmup_steps: int = 0,
        r: numeric.Hyper = 0.0,
        weight_lr_power: numeric.Hyper = 2.0,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None:
        super().__init__(
            params,
            fo.schedule_free_adamw,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            r=r,
            weight_lr_power=weight_lr_power,
            maximize=maximize,
            compile=compile,
            stored=stored,
        )
