"""The names of the package, for type checkers, editors and imports on demand."""

from functional_optim import algorithms as algorithms
from functional_optim import estimators as estimators
from functional_optim import linalg as linalg
from functional_optim import measures as measures
from functional_optim import numeric as numeric
from functional_optim import projections as projections
from functional_optim import replicas as replicas
from functional_optim import schedules as schedules
from functional_optim import search as search
from functional_optim import tree as tree

# begin: algorithms (make lists)
from functional_optim.algorithms.adabelief import acprop as acprop
from functional_optim.algorithms.adabelief import adabelief as adabelief
from functional_optim.algorithms.adabelief import scale_by_acprop as scale_by_acprop
from functional_optim.algorithms.adabelief import scale_by_belief as scale_by_belief
from functional_optim.algorithms.adadelta import adadelta as adadelta
from functional_optim.algorithms.adadelta import scale_by_adadelta as scale_by_adadelta
from functional_optim.algorithms.adafactor import adafactor as adafactor
from functional_optim.algorithms.adafactor import scale_by_adafactor as scale_by_adafactor
from functional_optim.algorithms.adagrad import adagrad as adagrad
from functional_optim.algorithms.adagrad import scale_by_adagrad as scale_by_adagrad
from functional_optim.algorithms.adam import adam as adam
from functional_optim.algorithms.adam import adamw as adamw
from functional_optim.algorithms.adam import scale_by_adam as scale_by_adam
from functional_optim.algorithms.adam_mini import adam_mini as adam_mini
from functional_optim.algorithms.adam_mini import scale_by_adam_mini as scale_by_adam_mini
from functional_optim.algorithms.adamax import adamax as adamax
from functional_optim.algorithms.adamax import adamaxw as adamaxw
from functional_optim.algorithms.adamax import scale_by_adamax as scale_by_adamax
from functional_optim.algorithms.adamuon import adamuon as adamuon
from functional_optim.algorithms.adamuon import scale_by_adamuon as scale_by_adamuon
from functional_optim.algorithms.adan import adan as adan
from functional_optim.algorithms.adan import scale_by_adan as scale_by_adan
from functional_optim.algorithms.ademamix import ademamix as ademamix
from functional_optim.algorithms.ademamix import scale_by_ademamix as scale_by_ademamix
from functional_optim.algorithms.ademamix import (
    scale_by_simplified_ademamix as scale_by_simplified_ademamix,
)
from functional_optim.algorithms.ademamix import simplified_ademamix as simplified_ademamix
from functional_optim.algorithms.adopt import adopt as adopt
from functional_optim.algorithms.adopt import scale_by_adopt as scale_by_adopt
from functional_optim.algorithms.apollo import apollo as apollo
from functional_optim.algorithms.apollo import scale_by_apollo as scale_by_apollo
from functional_optim.algorithms.asgd import asgd as asgd
from functional_optim.algorithms.asgd import polyak_average as polyak_average
from functional_optim.algorithms.asgd import scale_by_asgd as scale_by_asgd
from functional_optim.algorithms.came import came as came
from functional_optim.algorithms.came import scale_by_came as scale_by_came
from functional_optim.algorithms.cocob import cocob as cocob
from functional_optim.algorithms.cocob import scale_by_cocob as scale_by_cocob
from functional_optim.algorithms.dadapt_adam import dadapt_adam as dadapt_adam
from functional_optim.algorithms.dadapt_adam import scale_by_dadapt_adam as scale_by_dadapt_adam
from functional_optim.algorithms.dion2 import dion2 as dion2
from functional_optim.algorithms.dion2 import scale_by_dion2 as scale_by_dion2
from functional_optim.algorithms.dog import dog as dog
from functional_optim.algorithms.dog import dowg as dowg
from functional_optim.algorithms.dog import scale_by_dog as scale_by_dog
from functional_optim.algorithms.dog import scale_by_dowg as scale_by_dowg
from functional_optim.algorithms.dogleg import dogleg as dogleg
from functional_optim.algorithms.fromage import fromage as fromage
from functional_optim.algorithms.fromage import scale_by_fromage as scale_by_fromage
from functional_optim.algorithms.galore import galore as galore
from functional_optim.algorithms.galore import scale_by_galore as scale_by_galore
from functional_optim.algorithms.gauss_newton import gauss_newton as gauss_newton
from functional_optim.algorithms.gauss_newton import scale_by_gauss_newton as scale_by_gauss_newton
from functional_optim.algorithms.kl_shampoo import kl_shampoo as kl_shampoo
from functional_optim.algorithms.kl_shampoo import kl_soap as kl_soap
from functional_optim.algorithms.lamb import lamb as lamb
from functional_optim.algorithms.lamb import lars as lars
from functional_optim.algorithms.lamb import scale_by_lars as scale_by_lars
from functional_optim.algorithms.laprop import laprop as laprop
from functional_optim.algorithms.laprop import scale_by_laprop as scale_by_laprop
from functional_optim.algorithms.lbfgs.backtracking import (
    scale_by_backtracking_linesearch as scale_by_backtracking_linesearch,
)
from functional_optim.algorithms.lbfgs.transform import lbfgs as lbfgs
from functional_optim.algorithms.lbfgs.transform import scale_by_lbfgs as scale_by_lbfgs
from functional_optim.algorithms.levenberg_marquardt import (
    levenberg_marquardt as levenberg_marquardt,
)
from functional_optim.algorithms.madgrad import madgrad as madgrad
from functional_optim.algorithms.madgrad import scale_by_madgrad as scale_by_madgrad
from functional_optim.algorithms.mars import mars as mars
from functional_optim.algorithms.momo import momo as momo
from functional_optim.algorithms.momo import momo_adam as momo_adam
from functional_optim.algorithms.muon import muon as muon
from functional_optim.algorithms.muon import scale_by_muon as scale_by_muon
from functional_optim.algorithms.muon_adamw import muon_adamw as muon_adamw
from functional_optim.algorithms.nadam import nadam as nadam
from functional_optim.algorithms.nadam import scale_by_nadam as scale_by_nadam
from functional_optim.algorithms.noisy_sgd import dpsgd as dpsgd
from functional_optim.algorithms.noisy_sgd import noisy_sgd as noisy_sgd
from functional_optim.algorithms.normuon import normuon as normuon
from functional_optim.algorithms.normuon import scale_by_normuon as scale_by_normuon
from functional_optim.algorithms.novograd import novograd as novograd
from functional_optim.algorithms.novograd import scale_by_novograd as scale_by_novograd
from functional_optim.algorithms.optimistic import optimistic_adam_v2 as optimistic_adam_v2
from functional_optim.algorithms.optimistic import (
    optimistic_gradient_descent as optimistic_gradient_descent,
)
from functional_optim.algorithms.optimistic import (
    scale_by_optimistic_gradient as scale_by_optimistic_gradient,
)
from functional_optim.algorithms.polyak_sgd import polyak_sgd as polyak_sgd
from functional_optim.algorithms.prodigy import prodigy as prodigy
from functional_optim.algorithms.prodigy import scale_by_prodigy as scale_by_prodigy
from functional_optim.algorithms.psgd import psgd_kron as psgd_kron
from functional_optim.algorithms.psgd import scale_by_psgd_kron as scale_by_psgd_kron
from functional_optim.algorithms.radam import radam as radam
from functional_optim.algorithms.radam import scale_by_radam as scale_by_radam
from functional_optim.algorithms.rmsprop import rmsprop as rmsprop
from functional_optim.algorithms.rmsprop import scale_by_rms as scale_by_rms
from functional_optim.algorithms.rprop import rprop as rprop
from functional_optim.algorithms.rprop import scale_by_rprop as scale_by_rprop
from functional_optim.algorithms.schedule_free import (
    scale_by_second_moment as scale_by_second_moment,
)
from functional_optim.algorithms.schedule_free import schedule_free_adamw as schedule_free_adamw
from functional_optim.algorithms.schedule_free import schedule_free_sgd as schedule_free_sgd
from functional_optim.algorithms.scion import scale_by_scion as scale_by_scion
from functional_optim.algorithms.scion import scion as scion
from functional_optim.algorithms.self_scaled import ssbfgs as ssbfgs
from functional_optim.algorithms.self_scaled import ssbroyden as ssbroyden
from functional_optim.algorithms.sgd import sgd as sgd
from functional_optim.algorithms.shampoo import scale_by_shampoo as scale_by_shampoo
from functional_optim.algorithms.shampoo import shampoo as shampoo
from functional_optim.algorithms.sign import lion as lion
from functional_optim.algorithms.sign import scale_by_lion as scale_by_lion
from functional_optim.algorithms.sign import sign_sgd as sign_sgd
from functional_optim.algorithms.sign import signum as signum
from functional_optim.algorithms.sm3 import scale_by_sm3 as scale_by_sm3
from functional_optim.algorithms.sm3 import sm3 as sm3
from functional_optim.algorithms.soap import scale_by_soap as scale_by_soap
from functional_optim.algorithms.soap import soap as soap
from functional_optim.algorithms.sophia import scale_by_sophia as scale_by_sophia
from functional_optim.algorithms.sophia import sophia as sophia
from functional_optim.algorithms.sparse_adam import sparse_adam as sparse_adam
from functional_optim.algorithms.stable_adamw import scale_by_stable_adam as scale_by_stable_adam
from functional_optim.algorithms.stable_adamw import stable_adamw as stable_adamw
from functional_optim.algorithms.yogi import scale_by_yogi as scale_by_yogi
from functional_optim.algorithms.yogi import yogi as yogi

# end: algorithms
from functional_optim.checkpoint.lookup import get as get
from functional_optim.checkpoint.lookup import numbers as numbers
from functional_optim.checkpoint.state_dict import decoded as decoded
from functional_optim.checkpoint.state_dict import encoded as encoded
from functional_optim.checkpoint.state_dict import load_state_dict as load_state_dict
from functional_optim.checkpoint.state_dict import state_dict as state_dict
from functional_optim.combinators.as_matrix import as_matrix as as_matrix
from functional_optim.combinators.as_matrix import matrix_views as matrix_views
from functional_optim.combinators.averaging import eval_params as eval_params
from functional_optim.combinators.averaging import gpa as gpa
from functional_optim.combinators.averaging import schedule_free as schedule_free
from functional_optim.combinators.cautious import cautious as cautious
from functional_optim.combinators.commit import commit_if as commit_if
from functional_optim.combinators.commit import keep_snapshots as keep_snapshots
from functional_optim.combinators.commit import rollback as rollback
from functional_optim.combinators.gates import accumulate as accumulate
from functional_optim.combinators.gates import apply_if_finite as apply_if_finite
from functional_optim.combinators.gates import conditionally_mask as conditionally_mask
from functional_optim.combinators.gates import conditionally_transform as conditionally_transform
from functional_optim.combinators.gates import dynamic_loss_scale as dynamic_loss_scale
from functional_optim.combinators.gates import skip_large_updates as skip_large_updates
from functional_optim.combinators.master_weights import full_weights as full_weights
from functional_optim.combinators.master_weights import master_weights as master_weights
from functional_optim.combinators.matrix_owners import matrix_owners as matrix_owners
from functional_optim.combinators.mechanize import mechanize as mechanize
from functional_optim.combinators.offload import offload as offload
from functional_optim.combinators.partition import freeze as freeze
from functional_optim.combinators.partition import masked as masked
from functional_optim.combinators.partition import partition as partition
from functional_optim.combinators.partition import selective_transform as selective_transform
from functional_optim.combinators.sharpness import asam as asam
from functional_optim.combinators.sharpness import sam as sam
from functional_optim.combinators.stored import slot_dtypes as slot_dtypes
from functional_optim.combinators.stored import stored as stored
from functional_optim.combinators.wrappers import flatten as flatten
from functional_optim.combinators.wrappers import lookahead as lookahead
from functional_optim.combinators.wrappers import sharded_over as sharded_over
from functional_optim.combinators.wrappers import with_schedule as with_schedule
from functional_optim.core.base import EmptyState as EmptyState
from functional_optim.core.base import GradientTransformation as GradientTransformation
from functional_optim.core.base import apply_updates as apply_updates
from functional_optim.core.chain import chain as chain
from functional_optim.core.chain import named_chain as named_chain
from functional_optim.core.factory import factory as factory
from functional_optim.core.leafwise import identity as identity
from functional_optim.core.leafwise import leafwise as leafwise
from functional_optim.core.lift import State as State
from functional_optim.core.rule import Runs as Runs
from functional_optim.core.storage import Storage as Storage
from functional_optim.engine.compile import compile as compile
from functional_optim.engine.train_step import compile_train_step as compile_train_step
from functional_optim.estimators import es_gradient as es_gradient
from functional_optim.estimators import forward_gradient as forward_gradient
from functional_optim.estimators import mezo as mezo
from functional_optim.estimators import spsa as spsa
from functional_optim.replicas.sync.diloco import diloco as diloco
from functional_optim.replicas.sync.local_sgd import local_sgd as local_sgd
from functional_optim.solvers.least_squares import least_squares as least_squares
from functional_optim.solvers.minimize import minimize as minimize
from functional_optim.solvers.residuals import per_sample as per_sample
from functional_optim.solvers.residuals import stack_residuals as stack_residuals
from functional_optim.solvers.root import root as root
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
from functional_optim.tuning.find_lr import find_lr as find_lr
from functional_optim.tuning.lr_sweep import LRSweep as LRSweep
from functional_optim.tuning.report import report as report
from functional_optim.tuning.summary import summary as summary

__version__: str
