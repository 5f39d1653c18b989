"""Algorithms, one file per family: the update rule for one tensor, and the ready-made optimizer."""

from functional_optim.algorithms.adam import adam as adam
from functional_optim.algorithms.adam import adamw as adamw
from functional_optim.algorithms.adam import scale_by_adam as scale_by_adam
from functional_optim.algorithms.sgd import sgd as sgd
