"""Optimizer objects that estimate one scale of the learning rate for all parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from functional_optim.adapters.base import with_hooks
from functional_optim.adapters.ready_made import ReadyMade


class OneRate(ReadyMade):
    """A `ReadyMade` whose groups have one learning rate, or 0."""

    how = ("compile", "stored")

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
