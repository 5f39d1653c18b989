"""Optimizers for PyTorch as pure functions: write the rule for one tensor, get everything else."""

from functional_optim.core.importing import as_installed as _as_installed
from functional_optim.core.importing import on_demand as _on_demand
from functional_optim.core.importing import uncollected as _uncollected

__version__ = "0.2.0"

_as_installed(__name__)

with _uncollected():
    from functional_optim import linalg as linalg
    from functional_optim import measures as measures
    from functional_optim import numeric as numeric
    from functional_optim import projections as projections
    from functional_optim import tree as tree
    from functional_optim.algorithms import adadelta as adadelta
    from functional_optim.algorithms import adafactor as adafactor
    from functional_optim.algorithms import adagrad as adagrad
    from functional_optim.algorithms import adam as adam
    from functional_optim.algorithms import adamax as adamax
    from functional_optim.algorithms import adamw as adamw
    from functional_optim.algorithms import asgd as asgd
    from functional_optim.algorithms import muon as muon
    from functional_optim.algorithms import nadam as nadam
    from functional_optim.algorithms import polyak_average as polyak_average
    from functional_optim.algorithms import polyak_sgd as polyak_sgd
    from functional_optim.algorithms import radam as radam
    from functional_optim.algorithms import rmsprop as rmsprop
    from functional_optim.algorithms import rprop as rprop
    from functional_optim.algorithms import scale_by_adadelta as scale_by_adadelta
    from functional_optim.algorithms import scale_by_adafactor as scale_by_adafactor
    from functional_optim.algorithms import scale_by_adagrad as scale_by_adagrad
    from functional_optim.algorithms import scale_by_adam as scale_by_adam
    from functional_optim.algorithms import scale_by_adamax as scale_by_adamax
    from functional_optim.algorithms import scale_by_asgd as scale_by_asgd
    from functional_optim.algorithms import scale_by_muon as scale_by_muon
    from functional_optim.algorithms import scale_by_nadam as scale_by_nadam
    from functional_optim.algorithms import scale_by_radam as scale_by_radam
    from functional_optim.algorithms import scale_by_rms as scale_by_rms
    from functional_optim.algorithms import scale_by_rprop as scale_by_rprop
    from functional_optim.algorithms import sgd as sgd
    from functional_optim.algorithms import sparse_adam as sparse_adam
    from functional_optim.checkpoint.decoded import decoded as decoded
    from functional_optim.checkpoint.decoded import encoded as encoded
    from functional_optim.checkpoint.lookup import get as get
    from functional_optim.checkpoint.lookup import numbers as numbers
    from functional_optim.checkpoint.state_dict import load_state_dict as load_state_dict
    from functional_optim.checkpoint.state_dict import state_dict as state_dict
    from functional_optim.combinators.as_matrix import as_matrix as as_matrix
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
    from functional_optim.combinators.gates import (
        conditionally_transform as conditionally_transform,
    )
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
    from functional_optim.transforms import Basis as Basis
    from functional_optim.transforms import adaptive_grad_clip as adaptive_grad_clip
    from functional_optim.transforms import add_decayed_weights as add_decayed_weights
    from functional_optim.transforms import add_noise as add_noise
    from functional_optim.transforms import apply_delta as apply_delta
    from functional_optim.transforms import cautious_weight_decay as cautious_weight_decay
    from functional_optim.transforms import centralize as centralize
    from functional_optim.transforms import clip_by_block_rms as clip_by_block_rms
    from functional_optim.transforms import clip_by_global_norm as clip_by_global_norm
    from functional_optim.transforms import clip_by_trust_ratio as clip_by_trust_ratio
    from functional_optim.transforms import clip_by_value as clip_by_value
    from functional_optim.transforms import decay_after_step as decay_after_step
    from functional_optim.transforms import (
        differentially_private_aggregate as differentially_private_aggregate,
    )
    from functional_optim.transforms import ema as ema
    from functional_optim.transforms import hyperball as hyperball
    from functional_optim.transforms import in_basis as in_basis
    from functional_optim.transforms import keep_norms_within as keep_norms_within
    from functional_optim.transforms import keep_params_in as keep_params_in
    from functional_optim.transforms import keep_params_nonnegative as keep_params_nonnegative
    from functional_optim.transforms import kl_basis as kl_basis
    from functional_optim.transforms import layerwise_decay as layerwise_decay
    from functional_optim.transforms import metropolis as metropolis
    from functional_optim.transforms import monitor as monitor
    from functional_optim.transforms import mup as mup
    from functional_optim.transforms import normalize as normalize
    from functional_optim.transforms import orthogonalize as orthogonalize
    from functional_optim.transforms import params_ema as params_ema
    from functional_optim.transforms import proximal_step as proximal_step
    from functional_optim.transforms import qk_clip as qk_clip
    from functional_optim.transforms import qk_clip_ as qk_clip_
    from functional_optim.transforms import reduce_on_plateau as reduce_on_plateau
    from functional_optim.transforms import scale as scale
    from functional_optim.transforms import scale_by_lr as scale_by_lr
    from functional_optim.transforms import scale_by_path as scale_by_path
    from functional_optim.transforms import scale_by_polyak as scale_by_polyak
    from functional_optim.transforms import scale_by_schedule as scale_by_schedule
    from functional_optim.transforms import scale_by_trust_ratio as scale_by_trust_ratio
    from functional_optim.transforms import set_to_zero as set_to_zero
    from functional_optim.transforms import shampoo_basis as shampoo_basis
    from functional_optim.transforms import sign as sign
    from functional_optim.transforms import snapshot as snapshot
    from functional_optim.transforms import step_then_decay as step_then_decay
    from functional_optim.transforms import trace as trace
    from functional_optim.transforms import variance_reduction as variance_reduction
    from functional_optim.transforms import zero_nans as zero_nans

__getattr__, __dir__, __all__ = _on_demand(
    __name__,
    modules=("estimators", "replicas", "schedules", "search"),
    names={
        # begin: algorithms (make lists)
        "functional_optim.algorithms.adabelief": (
            "acprop",
            "adabelief",
            "scale_by_acprop",
            "scale_by_belief",
        ),
        "functional_optim.algorithms.adam_mini": ("adam_mini", "scale_by_adam_mini"),
        "functional_optim.algorithms.adamax": ("adamaxw",),
        "functional_optim.algorithms.adamuon": ("adamuon", "scale_by_adamuon"),
        "functional_optim.algorithms.adan": ("adan", "scale_by_adan"),
        "functional_optim.algorithms.ademamix": (
            "ademamix",
            "scale_by_ademamix",
            "scale_by_simplified_ademamix",
            "simplified_ademamix",
        ),
        "functional_optim.algorithms.adopt": ("adopt", "scale_by_adopt"),
        "functional_optim.algorithms.apollo": ("apollo", "scale_by_apollo"),
        "functional_optim.algorithms.came": ("came", "scale_by_came"),
        "functional_optim.algorithms.cocob": ("cocob", "scale_by_cocob"),
        "functional_optim.algorithms.dadapt_adam": ("dadapt_adam", "scale_by_dadapt_adam"),
        "functional_optim.algorithms.dion2": ("dion2", "scale_by_dion2"),
        "functional_optim.algorithms.dog": ("dog", "dowg", "scale_by_dog", "scale_by_dowg"),
        "functional_optim.algorithms.fromage": ("fromage", "scale_by_fromage"),
        "functional_optim.algorithms.galore": ("galore", "scale_by_galore"),
        "functional_optim.algorithms.kl_shampoo": ("kl_shampoo", "kl_soap"),
        "functional_optim.algorithms.lamb": ("lamb", "lars", "scale_by_lars"),
        "functional_optim.algorithms.laprop": ("laprop", "scale_by_laprop"),
        "functional_optim.algorithms.lbfgs.backtracking": ("scale_by_backtracking_linesearch",),
        "functional_optim.algorithms.lbfgs.transform": ("lbfgs", "scale_by_lbfgs"),
        "functional_optim.algorithms.madgrad": ("madgrad", "scale_by_madgrad"),
        "functional_optim.algorithms.mars": ("mars",),
        "functional_optim.algorithms.momo": ("momo", "momo_adam"),
        "functional_optim.algorithms.muon_adamw": ("muon_adamw",),
        "functional_optim.algorithms.noisy_sgd": ("dpsgd", "noisy_sgd"),
        "functional_optim.algorithms.normuon": ("normuon", "scale_by_normuon"),
        "functional_optim.algorithms.novograd": ("novograd", "scale_by_novograd"),
        "functional_optim.algorithms.optimistic": (
            "optimistic_adam_v2",
            "optimistic_gradient_descent",
            "scale_by_optimistic_gradient",
        ),
        "functional_optim.algorithms.prodigy": ("prodigy", "scale_by_prodigy"),
        "functional_optim.algorithms.psgd": ("psgd_kron", "scale_by_psgd_kron"),
        "functional_optim.algorithms.schedule_free": (
            "scale_by_second_moment",
            "schedule_free_adamw",
            "schedule_free_sgd",
        ),
        "functional_optim.algorithms.scion": ("scale_by_scion", "scion"),
        "functional_optim.algorithms.shampoo": ("scale_by_shampoo", "shampoo"),
        "functional_optim.algorithms.sign": ("lion", "scale_by_lion", "sign_sgd", "signum"),
        "functional_optim.algorithms.sm3": ("scale_by_sm3", "sm3"),
        "functional_optim.algorithms.soap": ("scale_by_soap", "soap"),
        "functional_optim.algorithms.sophia": ("scale_by_sophia", "sophia"),
        "functional_optim.algorithms.stable_adamw": ("scale_by_stable_adam", "stable_adamw"),
        "functional_optim.algorithms.yogi": ("scale_by_yogi", "yogi"),
        # end: algorithms
        "functional_optim.tuning.summary": ("summary",),
        "functional_optim.estimators": ("es_gradient", "forward_gradient", "mezo", "spsa"),
        "functional_optim.replicas.sync.diloco": ("diloco",),
        "functional_optim.replicas.sync.local_sgd": ("local_sgd",),
        "functional_optim.tuning.report": ("report",),
        "functional_optim.tuning.find_lr": ("find_lr",),
        "functional_optim.tuning.lr_sweep": ("LRSweep",),
    },
)
