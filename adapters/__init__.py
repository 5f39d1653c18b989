"""Optimizer objects: torch.optim's contract over functional recipes."""

from typing import TYPE_CHECKING

from functional_optim.core.importing import on_demand as _on_demand
from functional_optim.core.importing import uncollected as _uncollected

with _uncollected():
    from functional_optim.adapters.drop_ins import ASGD as ASGD
    from functional_optim.adapters.drop_ins import SGD as SGD
    from functional_optim.adapters.drop_ins import Adadelta as Adadelta
    from functional_optim.adapters.drop_ins import Adafactor as Adafactor
    from functional_optim.adapters.drop_ins import Adagrad as Adagrad
    from functional_optim.adapters.drop_ins import Adam as Adam
    from functional_optim.adapters.drop_ins import Adamax as Adamax
    from functional_optim.adapters.drop_ins import AdamW as AdamW
    from functional_optim.adapters.drop_ins import Muon as Muon
    from functional_optim.adapters.drop_ins import NAdam as NAdam
    from functional_optim.adapters.drop_ins import RAdam as RAdam
    from functional_optim.adapters.drop_ins import RMSprop as RMSprop
    from functional_optim.adapters.drop_ins import Rprop as Rprop
    from functional_optim.adapters.drop_ins import SparseAdam as SparseAdam
    from functional_optim.adapters.optimizer import Optimizer as Optimizer

if TYPE_CHECKING:
    # begin: algorithms (make lists)
    from functional_optim.adapters.lbfgs import LBFGS as LBFGS
    from functional_optim.adapters.one_rate import DAdaptAdam as DAdaptAdam
    from functional_optim.adapters.one_rate import Prodigy as Prodigy
    from functional_optim.adapters.ready_made import DoG as DoG
    from functional_optim.adapters.ready_made import DoWG as DoWG
    from functional_optim.adapters.ready_made import Momo as Momo
    from functional_optim.adapters.ready_made import MomoAdam as MomoAdam
    from functional_optim.adapters.schedule_free import ScheduleFreeAdamW as ScheduleFreeAdamW
    from functional_optim.adapters.schedule_free import ScheduleFreeSGD as ScheduleFreeSGD
    # end: algorithms

if TYPE_CHECKING:
    from functional_optim.adapters.averaging import AveragingOptimizer as AveragingOptimizer
    from functional_optim.adapters.fault_tolerant.optimizer import (
        FaultTolerantOptimizer as FaultTolerantOptimizer,
    )
    from functional_optim.adapters.gradient_free.optimizer import GradientFree as GradientFree
    from functional_optim.adapters.sharpness import ASAM as ASAM
    from functional_optim.adapters.sharpness import SAM as SAM
    from functional_optim.adapters.stub import OptimizerStub as OptimizerStub
    from functional_optim.adapters.stub import zero_loss as zero_loss
else:
    __getattr__, __dir__, __all__ = _on_demand(
        __name__,
        names={
            "functional_optim.adapters.averaging": ("AveragingOptimizer",),
            "functional_optim.adapters.fault_tolerant.optimizer": ("FaultTolerantOptimizer",),
            "functional_optim.adapters.gradient_free.optimizer": ("GradientFree",),
            # begin: algorithms (make lists)
            "functional_optim.adapters.lbfgs": ("LBFGS",),
            "functional_optim.adapters.one_rate": ("DAdaptAdam", "Prodigy"),
            "functional_optim.adapters.ready_made": ("DoG", "DoWG", "Momo", "MomoAdam"),
            "functional_optim.adapters.schedule_free": ("ScheduleFreeAdamW", "ScheduleFreeSGD"),
            # end: algorithms
            "functional_optim.adapters.sharpness": ("ASAM", "SAM"),
            "functional_optim.adapters.stub": ("OptimizerStub", "zero_loss"),
        },
    )
