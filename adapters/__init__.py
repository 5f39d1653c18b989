"""Optimizer objects: torch.optim's contract over functional recipes."""

from functional_optim.core.importing import on_demand as _on_demand
from functional_optim.core.importing import uncollected as _uncollected

with _uncollected():
    from functional_optim.adapters import drop_ins as drop_ins

__getattr__, __dir__, __all__ = _on_demand(__name__)
