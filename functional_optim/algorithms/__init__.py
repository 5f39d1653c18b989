"""Algorithms, one file per family: the update rule for one tensor, and the ready-made optimizer."""

from functional_optim.algorithms.adadelta import adadelta as adadelta
from functional_optim.algorithms.adadelta import scale_by_adadelta as scale_by_adadelta
from functional_optim.algorithms.adafactor import adafactor as adafactor
from functional_optim.algorithms.adafactor import scale_by_adafactor as scale_by_adafactor
from functional_optim.algorithms.adagrad import adagrad as adagrad
from functional_optim.algorithms.adagrad import scale_by_adagrad as scale_by_adagrad
from functional_optim.algorithms.adam import adam as adam
from functional_optim.algorithms.adam import adamw as adamw
from functional_optim.algorithms.adam import scale_by_adam as scale_by_adam
from functional_optim.algorithms.adamax import adamax as adamax
from functional_optim.algorithms.adamax import scale_by_adamax as scale_by_adamax
from functional_optim.algorithms.asgd import asgd as asgd
from functional_optim.algorithms.asgd import polyak_average as polyak_average
from functional_optim.algorithms.asgd import scale_by_asgd as scale_by_asgd
from functional_optim.algorithms.muon import muon as muon
from functional_optim.algorithms.muon import scale_by_muon as scale_by_muon
from functional_optim.algorithms.nadam import nadam as nadam
from functional_optim.algorithms.nadam import scale_by_nadam as scale_by_nadam
from functional_optim.algorithms.radam import radam as radam
from functional_optim.algorithms.radam import scale_by_radam as scale_by_radam
from functional_optim.algorithms.rmsprop import rmsprop as rmsprop
from functional_optim.algorithms.rmsprop import scale_by_rms as scale_by_rms
from functional_optim.algorithms.rprop import rprop as rprop
from functional_optim.algorithms.rprop import scale_by_rprop as scale_by_rprop
from functional_optim.algorithms.sgd import sgd as sgd
from functional_optim.algorithms.sparse_adam import sparse_adam as sparse_adam
