"""Optimizer objects: torch.optim's contract over functional recipes."""

from functional_optim.adapters.fault_tolerant import (
    FaultTolerantOptimizer as FaultTolerantOptimizer,
)
from functional_optim.adapters.gradient_free import GradientFree as GradientFree
from functional_optim.adapters.lbfgs import LBFGS as LBFGS
from functional_optim.adapters.optimizer import Optimizer as Optimizer
from functional_optim.adapters.stub import OptimizerStub as OptimizerStub
from functional_optim.adapters.stub import zero_loss as zero_loss
from functional_optim.adapters.torch_optim import ASGD as ASGD
from functional_optim.adapters.torch_optim import SGD as SGD
from functional_optim.adapters.torch_optim import Adadelta as Adadelta
from functional_optim.adapters.torch_optim import Adafactor as Adafactor
from functional_optim.adapters.torch_optim import Adagrad as Adagrad
from functional_optim.adapters.torch_optim import Adam as Adam
from functional_optim.adapters.torch_optim import Adamax as Adamax
from functional_optim.adapters.torch_optim import AdamW as AdamW
from functional_optim.adapters.torch_optim import Muon as Muon
from functional_optim.adapters.torch_optim import NAdam as NAdam
from functional_optim.adapters.torch_optim import RAdam as RAdam
from functional_optim.adapters.torch_optim import RMSprop as RMSprop
from functional_optim.adapters.torch_optim import Rprop as Rprop
from functional_optim.adapters.torch_optim import SparseAdam as SparseAdam
