"""Optimizers for PyTorch as pure functions: write the rule for one tensor, get everything else."""

from functional_optim.core.importing import as_installed as _as_installed
from functional_optim.core.importing import on_demand as _on_demand
from functional_optim.core.importing import uncollected as _uncollected

__version__ = "0.2.0"

_as_installed(__name__)

with _uncollected():
    from functional_optim import algorithms as algorithms
    from functional_optim import linalg as linalg
    from functional_optim import measures as measures
    from functional_optim import numeric as numeric
    from functional_optim import projections as projections
    from functional_optim import tree as tree
    from functional_optim.checkpoint.state_dict import load_state_dict as load_state_dict
    from functional_optim.checkpoint.state_dict import state_dict as state_dict
    from functional_optim.engine.compile import compile as compile
    from functional_optim.engine.train_step import compile_train_step as compile_train_step

__getattr__, __dir__, __all__ = _on_demand(
    __name__,
    modules=("estimators", "replicas", "schedules", "search"),
    names={
        # begin: algorithms (make lists)
        "functional_optim.algorithms.adabelief": (
            "acprop", "adabelief", "scale_by_acprop", "scale_by_belief",
        ),
        "functional_optim.algorithms.adadelta": ("adadelta", "scale_by_adadelta"),
        "functional_optim.algorithms.adafactor": ("adafactor", "scale_by_adafactor"),
        "functional_optim.algorithms.adagrad": ("adagrad", "scale_by_adagrad"),
        "functional_optim.algorithms.adam": ("adam", "adamw", "scale_by_adam"),
        "functional_optim.algorithms.adam_mini": ("adam_mini", "scale_by_adam_mini"),
        "functional_optim.algorithms.adamax": ("adamax", "adamaxw", "scale_by_adamax"),
        "functional_optim.algorithms.adamuon": ("adamuon", "scale_by_adamuon"),
        "functional_optim.algorithms.adan": ("adan", "scale_by_adan"),
        "functional_optim.algorithms.ademamix": (
            "ademamix", "scale_by_ademamix", "scale_by_simplified_ademamix", "simplified_ademamix",
        ),
        "functional_optim.algorithms.adopt": ("adopt", "scale_by_adopt"),
        "functional_optim.algorithms.apollo": ("apollo", "scale_by_apollo"),
        "functional_optim.algorithms.asgd": ("asgd", "polyak_average", "scale_by_asgd"),
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
        "functional_optim.algorithms.muon": ("muon", "scale_by_muon"),
        "functional_optim.algorithms.muon_adamw": ("muon_adamw",),
        "functional_optim.algorithms.nadam": ("nadam", "scale_by_nadam"),
        "functional_optim.algorithms.noisy_sgd": ("dpsgd", "noisy_sgd"),
        "functional_optim.algorithms.normuon": ("normuon", "scale_by_normuon"),
        "functional_optim.algorithms.novograd": ("novograd", "scale_by_novograd"),
        "functional_optim.algorithms.optimistic": (
            "optimistic_adam_v2", "optimistic_gradient_descent", "scale_by_optimistic_gradient",
        ),
        "functional_optim.algorithms.polyak_sgd": ("polyak_sgd",),
        "functional_optim.algorithms.prodigy": ("prodigy", "scale_by_prodigy"),
        "functional_optim.algorithms.psgd": ("psgd_kron", "scale_by_psgd_kron"),
        "functional_optim.algorithms.radam": ("radam", "scale_by_radam"),
        "functional_optim.algorithms.rmsprop": ("rmsprop", "scale_by_rms"),
        "functional_optim.algorithms.rprop": ("rprop", "scale_by_rprop"),
        "functional_optim.algorithms.schedule_free": (
            "scale_by_second_moment", "schedule_free_adamw", "schedule_free_sgd",
        ),
        "functional_optim.algorithms.scion": ("scale_by_scion", "scion"),
        "functional_optim.algorithms.sgd": ("sgd",),
        "functional_optim.algorithms.shampoo": ("scale_by_shampoo", "shampoo"),
        "functional_optim.algorithms.sign": ("lion", "scale_by_lion", "sign_sgd", "signum"),
        "functional_optim.algorithms.sm3": ("scale_by_sm3", "sm3"),
        "functional_optim.algorithms.soap": ("scale_by_soap", "soap"),
        "functional_optim.algorithms.sophia": ("scale_by_sophia", "sophia"),
        "functional_optim.algorithms.sparse_adam": ("sparse_adam",),
        "functional_optim.algorithms.stable_adamw": ("scale_by_stable_adam", "stable_adamw"),
        "functional_optim.algorithms.yogi": ("scale_by_yogi", "yogi"),
        # end: algorithms
        "functional_optim.checkpoint.decoded": ("decoded", "encoded"),
        "functional_optim.checkpoint.lookup": ("get", "numbers"),
        "functional_optim.combinators.as_matrix": ("as_matrix", "matrix_views"),
        "functional_optim.combinators.averaging": ("eval_params", "gpa", "schedule_free"),
        "functional_optim.combinators.cautious": ("cautious",),
        "functional_optim.combinators.commit": ("commit_if", "keep_snapshots", "rollback"),
        "functional_optim.combinators.gates": (
            "accumulate", "apply_if_finite", "conditionally_mask", "conditionally_transform",
            "dynamic_loss_scale", "skip_large_updates",
        ),
        "functional_optim.combinators.master_weights": ("full_weights", "master_weights"),
        "functional_optim.combinators.matrix_owners": ("matrix_owners",),
        "functional_optim.combinators.mechanize": ("mechanize",),
        "functional_optim.combinators.offload": ("offload",),
        "functional_optim.combinators.partition": (
            "freeze", "masked", "partition", "selective_transform",
        ),
        "functional_optim.combinators.sharpness": ("asam", "sam"),
        "functional_optim.combinators.stored": ("slot_dtypes", "stored"),
        "functional_optim.combinators.wrappers": (
            "flatten", "lookahead", "sharded_over", "with_schedule",
        ),
        "functional_optim.core.base": ("EmptyState", "GradientTransformation", "apply_updates"),
        "functional_optim.core.chain": ("chain", "named_chain"),
        "functional_optim.core.factory": ("factory",),
        "functional_optim.core.leafwise": ("identity", "leafwise"),
        "functional_optim.core.lift": ("State",),
        "functional_optim.core.rule": ("Runs",),
        "functional_optim.core.storage": ("Storage",),
        "functional_optim.estimators": ("es_gradient", "forward_gradient", "mezo", "spsa"),
        "functional_optim.replicas.sync.diloco": ("diloco",),
        "functional_optim.replicas.sync.local_sgd": ("local_sgd",),
        "functional_optim.transforms": (
            "Basis", "adaptive_grad_clip", "add_decayed_weights", "add_noise", "apply_delta",
            "cautious_weight_decay", "centralize", "clip_by_block_rms", "clip_by_global_norm",
            "clip_by_trust_ratio", "clip_by_value", "decay_after_step",
            "differentially_private_aggregate", "ema", "hyperball", "in_basis", "keep_norms_within",
            "keep_params_in", "keep_params_nonnegative", "kl_basis", "layerwise_decay",
            "metropolis", "monitor", "mup", "normalize", "orthogonalize", "params_ema",
            "proximal_step", "qk_clip", "qk_clip_", "reduce_on_plateau", "scale", "scale_by_lr",
            "scale_by_path", "scale_by_polyak", "scale_by_schedule", "scale_by_trust_ratio",
            "set_to_zero", "shampoo_basis", "sign", "snapshot", "step_then_decay", "trace",
            "variance_reduction", "zero_nans",
        ),
        "functional_optim.tuning.find_lr": ("find_lr",),
        "functional_optim.tuning.lr_sweep": ("LRSweep",),
        "functional_optim.tuning.report": ("report",),
        "functional_optim.tuning.summary": ("summary",),
    },
)  # fmt: skip
