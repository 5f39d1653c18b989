"""Links: small one-tensor rules to compose optimizers from."""

from functional_optim.transforms.averaging import params_ema as params_ema
from functional_optim.transforms.backtracking import (
    scale_by_backtracking_linesearch as scale_by_backtracking_linesearch,
)
from functional_optim.transforms.clipping import clip_by_global_norm as clip_by_global_norm
from functional_optim.transforms.clipping import clip_by_value as clip_by_value
from functional_optim.transforms.momentum import trace as trace
from functional_optim.transforms.plateau import reduce_on_plateau as reduce_on_plateau
from functional_optim.transforms.scaling import scale as scale
from functional_optim.transforms.scaling import scale_by_lr as scale_by_lr
from functional_optim.transforms.scaling import scale_by_schedule as scale_by_schedule
from functional_optim.transforms.weight_decay import add_decayed_weights as add_decayed_weights
