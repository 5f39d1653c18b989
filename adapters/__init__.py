"""Optimizer objects: torch.optim's contract over functional recipes."""

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
    from functional_optim.adapters.state.decoding import decode_slots as decode_slots

__getattr__, __dir__, __all__ = _on_demand(
    __name__,
    names={
        "functional_optim.adapters.averaging": ("AveragingOptimizer",),
        "functional_optim.adapters.fault_tolerant.optimizer": ("FaultTolerantOptimizer",),
        "functional_optim.adapters.gradient_free.optimizer": ("GradientFree",),
        # begin: algorithms (make lists)
        "functional_optim.adapters.lbfgs": ("LBFGS",),
        "functional_optim.adapters.muon_adamw": ("MuonAdamW",),
        "functional_optim.adapters.one_rate": ("DAdaptAdam", "Prodigy"),
        "functional_optim.adapters.ready_made": (
            "ADOPT",
            "APOLLO",
            "CAME",
            "COCOB",
            "KLSOAP",
            "LAMB",
            "LARS",
            "MADGRAD",
            "MARS",
            "SM3",
            "SOAP",
            "AdaBelief",
            "AdamMini",
            "AdaMuon",
            "Adan",
            "AdEMAMix",
            "Dion2",
            "DoG",
            "DoWG",
            "Fromage",
            "GaLore",
            "KLShampoo",
            "LaProp",
            "Lion",
            "Momo",
            "MomoAdam",
            "NoisySGD",
            "NorMuon",
            "NovoGrad",
            "PSGDKron",
            "Scion",
            "Shampoo",
            "SignSGD",
            "Signum",
            "StableAdamW",
            "Yogi",
        ),
        "functional_optim.adapters.schedule_free": ("ScheduleFreeAdamW", "ScheduleFreeSGD"),
        "functional_optim.adapters.sophia": ("SophiaG",),
        # end: algorithms
        "functional_optim.adapters.sharpness": ("ASAM", "SAM"),
        "functional_optim.adapters.stub": ("OptimizerStub", "zero_loss"),
    },
)
