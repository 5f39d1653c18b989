"""Optimizers for PyTorch as pure functions: write the update rule for one tensor."""

from functional_optim.core.importing import as_installed as _as_installed
from functional_optim.core.importing import on_demand as _on_demand
from functional_optim.core.importing import uncollected as _uncollected
from functional_optim.core.importing import unknown as _unknown

__version__ = "0.3.0"

_as_installed(__name__)

with _uncollected():
    from functional_optim import algorithms as algorithms
    from functional_optim import linalg as linalg
    from functional_optim import measures as measures
    from functional_optim import numeric as numeric
    from functional_optim import projections as projections
    from functional_optim import tree as tree
    from functional_optim.checkpoint.state_dict import load_state_dict as load_state_dict
    from functional_optim.checkpoint.state_dict import state_dict as state_dict
    from functional_optim.engine.compile import compile as compile
    from functional_optim.engine.train_step import compile_train_step as compile_train_step

tree.__dict__["__getattr__"] = _unknown(tree.__name__)  # the tree itself is below core
__getattr__, __dir__, __all__ = _on_demand(__name__)
