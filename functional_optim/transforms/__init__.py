"""Transforms: small one-tensor rules from which optimizers are composed."""

from functional_optim.transforms.averaging import ema as ema
from functional_optim.transforms.averaging import params_ema as params_ema
from functional_optim.transforms.bases import Basis as Basis
from functional_optim.transforms.bases import kl_basis as kl_basis
from functional_optim.transforms.bases import shampoo_basis as shampoo_basis
from functional_optim.transforms.by_path import layerwise_decay as layerwise_decay
from functional_optim.transforms.by_path import mup as mup
from functional_optim.transforms.by_path import scale_by_path as scale_by_path
from functional_optim.transforms.clipping import adaptive_grad_clip as adaptive_grad_clip
from functional_optim.transforms.clipping import clip_by_block_rms as clip_by_block_rms
from functional_optim.transforms.clipping import clip_by_global_norm as clip_by_global_norm
from functional_optim.transforms.clipping import clip_by_value as clip_by_value
from functional_optim.transforms.constraining import keep_params_in as keep_params_in
from functional_optim.transforms.constraining import (
    keep_params_nonnegative as keep_params_nonnegative,
)
from functional_optim.transforms.constraining import zero_nans as zero_nans
from functional_optim.transforms.in_basis import in_basis as in_basis
from functional_optim.transforms.momentum import trace as trace
from functional_optim.transforms.monitoring import monitor as monitor
from functional_optim.transforms.monitoring import snapshot as snapshot
from functional_optim.transforms.noise import add_noise as add_noise
from functional_optim.transforms.normalizing import centralize as centralize
from functional_optim.transforms.normalizing import clip_by_trust_ratio as clip_by_trust_ratio
from functional_optim.transforms.normalizing import normalize as normalize
from functional_optim.transforms.normalizing import scale_by_trust_ratio as scale_by_trust_ratio
from functional_optim.transforms.normalizing import sign as sign
from functional_optim.transforms.norms import hyperball as hyperball
from functional_optim.transforms.norms import keep_norms_within as keep_norms_within
from functional_optim.transforms.orthogonal import orthogonalize as orthogonalize
from functional_optim.transforms.plateau import reduce_on_plateau as reduce_on_plateau
from functional_optim.transforms.polyak import scale_by_polyak as scale_by_polyak
from functional_optim.transforms.privacy import (
    differentially_private_aggregate as differentially_private_aggregate,
)
from functional_optim.transforms.qk_clip import qk_clip as qk_clip
from functional_optim.transforms.qk_clip import qk_clip_ as qk_clip_
from functional_optim.transforms.sampling import metropolis as metropolis
from functional_optim.transforms.scaling import apply_delta as apply_delta
from functional_optim.transforms.scaling import scale as scale
from functional_optim.transforms.scaling import scale_by_lr as scale_by_lr
from functional_optim.transforms.scaling import scale_by_schedule as scale_by_schedule
from functional_optim.transforms.scaling import set_to_zero as set_to_zero
from functional_optim.transforms.variance_reduction import variance_reduction as variance_reduction
from functional_optim.transforms.weight_decay import add_decayed_weights as add_decayed_weights
from functional_optim.transforms.weight_decay import cautious_weight_decay as cautious_weight_decay
from functional_optim.transforms.weight_decay import decay_after_step as decay_after_step
from functional_optim.transforms.weight_decay import proximal_step as proximal_step
from functional_optim.transforms.weight_decay import step_then_decay as step_then_decay
