"""Schedules: pure functions from the number of finished steps to a number.

For a Python number a schedule returns a Python float, for a 0-dim tensor a 0-dim tensor: so you can
call it from a training loop, inside a compiled step, or under vmap. Values are computed in float64.
Pass a schedule for any hyperparameter.

The arguments of a schedule may be 0-dim tensors, too: to differentiate with respect to a value, or
to vmap over values and lengths.

Example::

    >>> import torch, functional_optim as fo
    >>> lr = fo.schedules.warmup_cosine(0.0, 1e-3, warmup_steps=100, decay_steps=1000)
    >>> lr(0), lr(100), lr(1000)
    (0.0, 0.001, 0.0)
    >>> beta = fo.schedules.linear(0.85, 0.95, 1000)
    >>> tx = fo.adamw(lr, betas=(beta, 0.99))
    >>> updates, state = tx.update(torch.ones(2), tx.init(torch.zeros(2)), torch.zeros(2))
    >>> float(fo.get(state, "betas.0"))
    0.85
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from functional_optim.core.importing import unknown as _unknown
from functional_optim.schedules.basic import constant as constant
from functional_optim.schedules.basic import cosine_decay as cosine_decay
from functional_optim.schedules.basic import exponential_decay as exponential_decay
from functional_optim.schedules.basic import linear as linear
from functional_optim.schedules.basic import polynomial as polynomial
from functional_optim.schedules.conversion import from_torch as from_torch
from functional_optim.schedules.cycles import cosine_onecycle as cosine_onecycle
from functional_optim.schedules.cycles import linear_onecycle as linear_onecycle
from functional_optim.schedules.cycles import sgdr as sgdr
from functional_optim.schedules.pieces import join as join
from functional_optim.schedules.pieces import piecewise_constant as piecewise_constant
from functional_optim.schedules.pieces import piecewise_interpolate as piecewise_interpolate
from functional_optim.schedules.warm import inverse_square_root as inverse_square_root
from functional_optim.schedules.warm import warmup as warmup
from functional_optim.schedules.warm import warmup_constant as warmup_constant
from functional_optim.schedules.warm import warmup_cosine_decay as warmup_cosine_decay
from functional_optim.schedules.warm import warmup_exponential_decay as warmup_exponential_decay
from functional_optim.schedules.warm import warmup_stable_decay as warmup_stable_decay

if not _TYPE_CHECKING:  # with it type checkers would accept all names
    __getattr__ = _unknown(__name__)

cosine = cosine_decay
warmup_cosine = warmup_cosine_decay
