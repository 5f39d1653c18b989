"""Optimizer objects: torch.optim's contract over functional recipes."""

from functional_optim.core.importing import on_demand as _on_demand
from functional_optim.core.importing import uncollected as _uncollected

with _uncollected():
    from functional_optim.adapters import drop_ins as drop_ins
    from functional_optim.adapters.ready_made import CLASSES as _CLASSES

__getattr__, __dir__, __all__ = _on_demand(
    __name__,
    names={
        "functional_optim.adapters.averaging": ("AveragingOptimizer",),
        "functional_optim.adapters.drop_ins": (
            "ASGD", "SGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "Muon",
            "NAdam", "RAdam", "RMSprop", "Rprop", "SparseAdam",
        ),
        "functional_optim.adapters.fault_tolerant.optimizer": ("FaultTolerantOptimizer",),
        "functional_optim.adapters.gradient_free.optimizer": ("GradientFree",),
        "functional_optim.adapters.lbfgs": ("LBFGS",),
        "functional_optim.adapters.muon_adamw": ("MuonAdamW",),
        "functional_optim.adapters.optimizer": ("Optimizer",),
        "functional_optim.adapters.ready_made": _CLASSES,
        "functional_optim.adapters.sharpness": ("ASAM", "SAM"),
        "functional_optim.adapters.sophia": ("SophiaG",),
        "functional_optim.adapters.state.loading": ("decode_slots",),
        "functional_optim.adapters.stub": ("OptimizerStub", "zero_loss"),
    },
)  # fmt: skip
