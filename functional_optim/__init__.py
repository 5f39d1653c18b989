"""Optimizers for PyTorch as pure functions: write the rule for one tensor, get everything else."""

from functional_optim import linalg as linalg
from functional_optim import numeric as numeric
from functional_optim import schedules as schedules
from functional_optim import tree as tree
from functional_optim.algorithms import adadelta as adadelta
from functional_optim.algorithms import adafactor as adafactor
from functional_optim.algorithms import adagrad as adagrad
from functional_optim.algorithms import adam as adam
from functional_optim.algorithms import adamax as adamax
from functional_optim.algorithms import adamw as adamw
from functional_optim.algorithms import asgd as asgd
from functional_optim.algorithms import lbfgs as lbfgs
from functional_optim.algorithms import muon as muon
from functional_optim.algorithms import nadam as nadam
from functional_optim.algorithms import polyak_average as polyak_average
from functional_optim.algorithms import radam as radam
from functional_optim.algorithms import rmsprop as rmsprop
from functional_optim.algorithms import rprop as rprop
from functional_optim.algorithms import scale_by_adadelta as scale_by_adadelta
from functional_optim.algorithms import scale_by_adafactor as scale_by_adafactor
from functional_optim.algorithms import scale_by_adagrad as scale_by_adagrad
from functional_optim.algorithms import scale_by_adam as scale_by_adam
from functional_optim.algorithms import scale_by_adamax as scale_by_adamax
from functional_optim.algorithms import scale_by_asgd as scale_by_asgd
from functional_optim.algorithms import scale_by_lbfgs as scale_by_lbfgs
from functional_optim.algorithms import scale_by_muon as scale_by_muon
from functional_optim.algorithms import scale_by_nadam as scale_by_nadam
from functional_optim.algorithms import scale_by_radam as scale_by_radam
from functional_optim.algorithms import scale_by_rms as scale_by_rms
from functional_optim.algorithms import scale_by_rprop as scale_by_rprop
from functional_optim.algorithms import sgd as sgd
from functional_optim.algorithms import sparse_adam as sparse_adam
from functional_optim.base import EmptyState as EmptyState
from functional_optim.base import GradientTransformation as GradientTransformation
from functional_optim.base import apply_updates as apply_updates
from functional_optim.combine import chain as chain
from functional_optim.combine import named_chain as named_chain
from functional_optim.compiled import compile as compile
from functional_optim.leafwise import State as State
from functional_optim.leafwise import identity as identity
from functional_optim.leafwise import leafwise as leafwise
from functional_optim.transforms import add_decayed_weights as add_decayed_weights
from functional_optim.transforms import clip_by_global_norm as clip_by_global_norm
from functional_optim.transforms import clip_by_value as clip_by_value
from functional_optim.transforms import params_ema as params_ema
from functional_optim.transforms import scale as scale
from functional_optim.transforms import (
    scale_by_backtracking_linesearch as scale_by_backtracking_linesearch,
)
from functional_optim.transforms import scale_by_lr as scale_by_lr
from functional_optim.transforms import scale_by_schedule as scale_by_schedule
from functional_optim.transforms import trace as trace
