"""Optimizer objects that estimate one scale of the learning rate for all parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import ParamsT

from functional_optim import numeric
from functional_optim.adapters.base import with_hooks
from functional_optim.adapters.ready_made import ReadyMade
from functional_optim.adapters.state.storage import Stored
from functional_optim.algorithms.adam import Betas
from functional_optim.engine.group import Compile


class OneRate(ReadyMade):
    """A `ReadyMade` whose groups have one learning rate, or 0."""

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient; see :meth:`Optimizer.step`.

        Raises:
            RuntimeError: if two parameter groups have different learning rates other than 0.
        """
        rates = [group["lr"] for group in self.param_groups]
        if len(rates) > 1:
            known = {float(lr) for lr in rates if not callable(lr)} - {0.0}
            if len(known) > 1:
                raise RuntimeError(
                    f"{type(self).__name__} estimates one scale for all parameters, but its "
                    f"parameter groups have the learning rates {sorted(known)}; give all of them "
                    "one rate, or 0 to those that shall rest."
                )
        return super()._step(closure)

    step = with_hooks(_step)


class Prodigy(OneRate):
    """`functional_optim.prodigy` as an optimizer object."""

    algorithm = "prodigy"

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 1.0,
        betas: Betas = (0.9, 0.999),
        beta3: numeric.Hyper | None = None,
        eps: numeric.Hyper = 1e-8,
        weight_decay: numeric.Hyper = 0.0,
        decouple: bool = True,
        use_bias_correction: bool = False,
        safeguard_warmup: bool = False,
        d0: numeric.Hyper = 1e-6,
        d_coef: numeric.Hyper = 1.0,
        growth_rate: numeric.Hyper = math.inf,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None:
        self._construct(locals())


class DAdaptAdam(OneRate):
    """`functional_optim.dadapt_adam` as an optimizer object."""

    algorithm = "dadapt_adam"

    def __init__(
        self,
        params: ParamsT,
        lr: numeric.Hyper = 1.0,
        betas: Betas = (0.9, 0.999),
        eps: numeric.Hyper = 1e-8,
        weight_decay: numeric.Hyper = 0.0,
        decouple: bool = False,
        use_bias_correction: bool = False,
        d0: numeric.Hyper = 1e-6,
        growth_rate: numeric.Hyper = math.inf,
        *,
        maximize: bool = False,
        compile: Compile = True,
        stored: Stored | None = None,
    ) -> None:
        self._construct(locals())
