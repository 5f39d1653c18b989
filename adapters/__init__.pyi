"""The names of the package, for type checkers, editors and imports on demand."""

from functional_optim.adapters import drop_ins as drop_ins
from functional_optim.adapters.averaging import AveragingOptimizer as AveragingOptimizer
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
from functional_optim.adapters.fault_tolerant.optimizer import (
    FaultTolerantOptimizer as FaultTolerantOptimizer,
)
from functional_optim.adapters.gradient_free.optimizer import GradientFree as GradientFree
from functional_optim.adapters.lbfgs import LBFGS as LBFGS
from functional_optim.adapters.least_squares import Dogleg as Dogleg
from functional_optim.adapters.least_squares import GaussNewton as GaussNewton
from functional_optim.adapters.least_squares import LevenbergMarquardt as LevenbergMarquardt
from functional_optim.adapters.muon_adamw import MuonAdamW as MuonAdamW
from functional_optim.adapters.optimizer import Optimizer as Optimizer

# begin: algorithms (make lists)
from functional_optim.adapters.ready_made import ADOPT as ADOPT
from functional_optim.adapters.ready_made import APOLLO as APOLLO
from functional_optim.adapters.ready_made import CAME as CAME
from functional_optim.adapters.ready_made import COCOB as COCOB
from functional_optim.adapters.ready_made import KLSOAP as KLSOAP
from functional_optim.adapters.ready_made import LAMB as LAMB
from functional_optim.adapters.ready_made import LARS as LARS
from functional_optim.adapters.ready_made import MADGRAD as MADGRAD
from functional_optim.adapters.ready_made import MARS as MARS
from functional_optim.adapters.ready_made import SM3 as SM3
from functional_optim.adapters.ready_made import SOAP as SOAP
from functional_optim.adapters.ready_made import AdaBelief as AdaBelief
from functional_optim.adapters.ready_made import AdamMini as AdamMini
from functional_optim.adapters.ready_made import AdaMuon as AdaMuon
from functional_optim.adapters.ready_made import Adan as Adan
from functional_optim.adapters.ready_made import AdEMAMix as AdEMAMix
from functional_optim.adapters.ready_made import DAdaptAdam as DAdaptAdam
from functional_optim.adapters.ready_made import Dion2 as Dion2
from functional_optim.adapters.ready_made import DoG as DoG
from functional_optim.adapters.ready_made import DoWG as DoWG
from functional_optim.adapters.ready_made import Fromage as Fromage
from functional_optim.adapters.ready_made import GaLore as GaLore
from functional_optim.adapters.ready_made import KLShampoo as KLShampoo
from functional_optim.adapters.ready_made import LaProp as LaProp
from functional_optim.adapters.ready_made import Lion as Lion
from functional_optim.adapters.ready_made import Momo as Momo
from functional_optim.adapters.ready_made import MomoAdam as MomoAdam
from functional_optim.adapters.ready_made import NoisySGD as NoisySGD
from functional_optim.adapters.ready_made import NorMuon as NorMuon
from functional_optim.adapters.ready_made import NovoGrad as NovoGrad
from functional_optim.adapters.ready_made import Prodigy as Prodigy
from functional_optim.adapters.ready_made import PSGDKron as PSGDKron
from functional_optim.adapters.ready_made import ScheduleFreeAdamW as ScheduleFreeAdamW
from functional_optim.adapters.ready_made import ScheduleFreeSGD as ScheduleFreeSGD
from functional_optim.adapters.ready_made import Scion as Scion
from functional_optim.adapters.ready_made import Shampoo as Shampoo
from functional_optim.adapters.ready_made import SignSGD as SignSGD
from functional_optim.adapters.ready_made import Signum as Signum
from functional_optim.adapters.ready_made import StableAdamW as StableAdamW
from functional_optim.adapters.ready_made import Yogi as Yogi

# end: algorithms
from functional_optim.adapters.self_scaled import SSBFGS as SSBFGS
from functional_optim.adapters.self_scaled import SSBroyden as SSBroyden
from functional_optim.adapters.sharpness import ASAM as ASAM
from functional_optim.adapters.sharpness import SAM as SAM
from functional_optim.adapters.sophia import SophiaG as SophiaG
from functional_optim.adapters.state.loading import decode_slots as decode_slots
from functional_optim.adapters.stub import OptimizerStub as OptimizerStub
from functional_optim.adapters.stub import zero_loss as zero_loss
