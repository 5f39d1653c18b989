"""What things are called elsewhere: for hints in errors, and for docs/from_optax.md.

Imported where somebody has used a name that is not here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

TABLE = """\
### Protocol

| optax | here | what differs |
| --- | --- | --- |
| `GradientTransformation`, `GradientTransformationExtraArgs` | `fo.GradientTransformation` | extra arguments are the keyword-only parameters of `update`, and are passed to the parts that declare them |
| `apply_updates` | `fo.apply_updates` | also takes `None`, which leaves the parameter unchanged |
| `EmptyState`, `identity` | `fo.EmptyState`, `fo.identity` | |
| `stateless`, `stateless_with_tree_map` | `fo.leafwise` | `leafwise(None, lambda u, slots, p: (f(u), slots))` |
| `global_norm`, `tree.norm` | `fo.tree.global_norm` | float64 |
| `tree_utils.tree_get` | `fo.get` | finds hyperparameters, slots, and one leaf's slot by path |
| `incremental_update` | `fo.params_ema` | a transform, part of the state |

### Optimizers

The numbers are the same as in optax unless the last column says otherwise.

| optax | here | what differs |
| --- | --- | --- |
| `sgd` | `fo.sgd` | also `dampening`, `weight_decay` |
| `adam` | `fo.adam` | ε outside the root, as in optax; no `eps_root`; for `mu_dtype` see `fo.slot_dtypes`; `weight_decay` here is L2; for `nesterov` a chain with `fo.scale_by_adam(nesterov=True)` |
| `adamw` | `fo.adamw` | decay 1e-2; for `mask` see the chain below |
| `amsgrad` | `fo.adam` | `amsgrad=True`; the maximum is taken before the bias correction, as in torch, so the numbers differ |
| `adamax`, `adamaxw` | `fo.adamax`, `fo.adamaxw` | |
| `nadam`, `nadamw` | `fo.nadam` | torch's: momentum itself follows a schedule, so the numbers differ; `decoupled_weight_decay=True` for the latter |
| `radam` | `fo.radam` | ε is added before the bias correction: same numbers at ε = 0 |
| `rmsprop` | `fo.rmsprop` | `alpha` 0.99, not 0.9; ε outside the root (`eps_in_sqrt=False`); no `initial_scale`, `bias_correction` |
| `adagrad` | `fo.adagrad` | sums start at 0, not 0.1; ε = 1e-10 outside the root; `lr_decay` |
| `adadelta` | `fo.adadelta` | `lr` 1 |
| `rprop` | `fo.rprop` | `etas`, `step_sizes`; optax returns each update one step late |
| `adafactor` | `fo.adafactor` | torch's: matrices of every size are factored, `lr` bounds a relative step that falls as 1/√t, no momentum |
| `contrib.muon` | `fo.muon` | matrices only: `fo.partition` with `fo.adamw` for the rest; torch's scale of the step |
| `contrib.schedule_free_sgd`, `contrib.schedule_free_adamw` | `fo.schedule_free_sgd`, `fo.schedule_free_adamw` | `fo.eval_params(state, params)` is `schedule_free_eval_params` |
| `contrib.prodigy`, `contrib.dadapt_adamw` | `fo.prodigy`, `fo.dadapt_adam` | optax always corrects the bias: `use_bias_correction=True`, and `decouple=True` |
| `contrib.dog`, `contrib.dowg` | `fo.dog`, `fo.dowg` | `init_step=("heuristic", x)` is `reps_rel=x` |
| `contrib.momo`, `contrib.momo_adam` | `fo.momo`, `fo.momo_adam` | the decay divides by 1 + lr · decay, as in the authors' code |
| `lbfgs` | `fo.lbfgs` | one update is up to `max_iter` iterations; `value` and `value_and_grad` are extra arguments; no zoom search: `line_search_fn="strong_wolfe"` or None |
| `polyak_sgd` | `fo.polyak_sgd` | `scaling` multiplies the step; in optax it multiplies the gradient, before it is measured |
| `noisy_sgd` | `fo.noisy_sgd` | the seed is an int; the noise begins at t = 1 |
| `sign_sgd`, `signum` | `fo.sign_sgd`, `fo.signum` | also `weight_decay`; `momentum` for `beta` |
| `lion` | `fo.lion` | decay 0, not 1e-3 |
| `adabelief` | `fo.adabelief` | the authors': `rectify=False` is optax's; `eps` is also `eps_root` |
| `adan` | `fo.adan` | the authors': the change of the gradient weighs β₂, not 1 − β₂; no `eps_root`; proximal decay unless `no_prox=True` |
| `yogi` | `fo.yogi` | also `weight_decay` |
| `optimistic_gradient_descent`, `optimistic_adam_v2` | `fo.optimistic_gradient_descent`, `fo.optimistic_adam_v2` | |
| `contrib.acprop` | `fo.acprop` | the authors': the difference is that from the newest average; rectified unless `rectify=False` |
| `contrib.ademamix`, `contrib.simplified_ademamix` | `fo.ademamix`, `fo.simplified_ademamix` | `alpha` 2, not 5; warm-ups are arguments |
| `contrib.adopt` | `fo.adopt` | also `weight_decay`; `clip_exponent` for `clip_value_fn`; no `nesterov` |
| `contrib.madgrad` | `fo.madgrad` | |
| `lamb` | `fo.lamb` | timm's: the gradients' norm is bounded by 1 unless `max_grad_norm=None`; without decay there is no trust ratio unless `always_adapt=True` |
| `lars` | `fo.lars` | timm's and the paper's: the ratio divides by ‖g‖ + λ‖p‖, optax's by ‖g + λp‖ |
| `novograd`, `fromage` | `fo.novograd`, `fo.fromage` | no `min_norm` |
| `sm3` | `fo.sm3` | also takes parameters without dimensions |
| `contrib.cocob` | `fo.cocob` | |
| `contrib.sophia` | `fo.sophia` | the authors': no bias correction; the estimate is given to it with `fo.estimators.observe_hessian` |
| `contrib.dpsgd` | `fo.dpsgd` | the seed is an int; an example with an infinite norm counts as zero |

Also here: `fo.asgd`, `fo.laprop`, `fo.mars`, `fo.sparse_adam`, `fo.stable_adamw`.

### Transforms

| optax | here | what differs |
| --- | --- | --- |
| `scale`, `scale_by_schedule` | `fo.scale`, `fo.scale_by_schedule` | `scale` takes a schedule, too |
| `scale_by_learning_rate` | `fo.scale_by_lr` | |
| `scale_by_sign` | `fo.sign` | |
| `trace`, `ema` | `fo.trace`, `fo.ema` | `momentum` for `decay` of `trace`, which also has `dampening` |
| `scale_by_adam`, `scale_by_amsgrad`, `scale_by_adamax`, `scale_by_radam` | `fo.scale_by_adam`, `fo.scale_by_adamax`, `fo.scale_by_radam` | as above |
| `scale_by_lion`, `scale_by_belief`, `scale_by_yogi`, `scale_by_adan`, `scale_by_optimistic_gradient` | `fo.scale_by_lion`, `fo.scale_by_belief`, `fo.scale_by_yogi`, `fo.scale_by_adan`, `fo.scale_by_optimistic_gradient` | as above |
| `scale_by_rms`, `scale_by_stddev` | `fo.scale_by_rms` | `centered=True` for the latter |
| `scale_by_rss`, `scale_by_adadelta`, `scale_by_rprop`, `scale_by_factored_rms` | `fo.scale_by_adagrad`, `fo.scale_by_adadelta`, `fo.scale_by_rprop`, `fo.scale_by_adafactor` | as above |
| `contrib.scale_by_muon`, `scale_by_lbfgs` | `fo.scale_by_muon`, `fo.scale_by_lbfgs` | |
| `add_decayed_weights` | `fo.add_decayed_weights` | `mask` by pattern, too; `independent=True` after the learning rate |
| `clip` | `fo.clip_by_value` | |
| `clip_by_global_norm` | `fo.clip_by_global_norm` | `eps=0` as in optax; torch's `clip_grad_norm_` adds 1e-6 |
| `clip_by_block_rms` | `fo.clip_by_block_rms` | |
| `adaptive_grad_clip`, `centralize` | `fo.adaptive_grad_clip`, `fo.centralize` | units follow torch's layouts: (out, in), (out, in, height, width) |
| `normalize_by_update_norm` | `fo.normalize` | |
| `add_noise` | `fo.add_noise` | the seed is an int, not a key |
| `contrib.differentially_private_aggregate` | `fo.differentially_private_aggregate` | the seed is an int; an example with an infinite norm counts as zero |
| `zero_nans` | `fo.zero_nans` | counts the NaNs of the whole tree |
| `keep_params_nonnegative` | `fo.keep_params_nonnegative` | |
| `projections` | `fo.projections` | the same functions, without `projection_`; `fo.keep_params_in` makes a transform of one |
| `scale_by_trust_ratio`, `scale_by_polyak` | `fo.scale_by_trust_ratio`, `fo.scale_by_polyak` | |
| `scale_by_backtracking_linesearch` | `fo.scale_by_backtracking_linesearch` | `value`, `grad`, `value_fn` as in optax |
| `monitor`, `snapshot` | `fo.monitor`, `fo.snapshot` | |

Also here: `fo.params_ema`, `fo.polyak_average`, `fo.cautious`, `fo.orthogonalize`, `fo.variance_reduction`, `fo.proximal_step`,
`fo.decay_after_step`, `fo.cautious_weight_decay`, `fo.clip_by_trust_ratio`, `fo.hyperball`, `fo.keep_norms_within`, and
`fo.scale_by_path` with factors from `fo.layerwise_decay` or `fo.mup`.

### Combinators and wrappers

| optax | here | what differs |
| --- | --- | --- |
| `chain`, `named_chain` | `fo.chain`, `fo.named_chain` | nested chains are flattened and fused; two transforms with the same slot name need `named_chain` |
| `partition`, `multi_transform` | `fo.partition` | labels by path pattern; a norm measured in a part spans that part |
| `masked` | `fo.masked` | as in optax, leaves that are not selected pass through: raw gradients |
| `set_to_zero` | `fo.set_to_zero` | also replaces NaN by zero |
| `freeze` | `fo.freeze` | frozen leaves have no state, are not measured anywhere in the chain, and get `None` |
| `selective_transform` | `fo.selective_transform` | |
| `MultiSteps`, `apply_every` | `fo.accumulate` | is itself a transformation; `mean=False` for `use_grad_mean=False`, `skip_nonfinite=True` for `skip_not_finite`; `accumulate(identity(), k, mean=False)` is `apply_every(k)` |
| `apply_if_finite` | `fo.apply_if_finite` | |
| `skip_large_updates` | `fo.skip_large_updates` | a wrapper; the norm, not its square |
| `conditionally_transform`, `conditionally_mask` | `fo.conditionally_transform`, `fo.conditionally_mask` | |
| `lookahead` | `fo.lookahead` | takes and returns plain parameters; the slow parameters are the slot `slow_params`; no `reset_state` |
| `contrib.schedule_free` | `fo.schedule_free` | |
| `contrib.mechanize` | `fo.mechanize` | the authors', from which optax's differs throughout |
| `contrib.sam` | `fo.sam`, `fo.asam` | `update` takes `grad_fn` and makes both parts of a step |
| `mu_dtype=`, `accumulator_dtype=` | `fo.slot_dtypes` | a wrapper: `fo.slot_dtypes(fo.adam(1e-3), exp_avg=torch.bfloat16)`; in fewer bits, or rounded by chance: `fo.stored` |
| `flatten` | `fo.flatten` | not needed for speed: kernels step all tensors in one call |
| `inject_hyperparams` | `fo.with_schedule` | for recipes that compute with their arguments; elsewhere a schedule may replace any number. To change a number, call the factory again: the state stays valid |
| `contrib.reduce_on_plateau` | `fo.reduce_on_plateau` | torch's `ReduceLROnPlateau` also works on optimizer objects |

### Schedules

Schedules are functions of the number of finished steps, as in optax: 0 at the first step. Each works on numbers and on tensors,
and is plotted in [schedules.md](schedules.md).

| optax | here |
| --- | --- |
| `constant_schedule`, `linear_schedule`, `polynomial_schedule` | `fo.schedules.constant`, `fo.schedules.linear`, `fo.schedules.polynomial` |
| `cosine_decay_schedule`, `exponential_decay` | `fo.schedules.cosine_decay`, `fo.schedules.exponential_decay` |
| `schedules.warmup_constant_schedule` | `fo.schedules.warmup_constant` |
| `warmup_cosine_decay_schedule` | `fo.schedules.warmup_cosine_decay` |
| `warmup_exponential_decay_schedule` | `fo.schedules.warmup_exponential_decay` |
| `piecewise_constant_schedule` | `fo.schedules.piecewise_constant` |
| `piecewise_interpolate_schedule` | `fo.schedules.piecewise_interpolate` |
| `linear_onecycle_schedule`, `cosine_onecycle_schedule` | `fo.schedules.linear_onecycle`, `fo.schedules.cosine_onecycle` |
| `sgdr_schedule`, `join_schedules` | `fo.schedules.sgdr`, `fo.schedules.join` |

Also here: `fo.schedules.warmup` (before any schedule), `fo.schedules.warmup_stable_decay`,
`fo.schedules.inverse_square_root`, and `fo.schedules.from_torch` for a torch LR scheduler.

### Not here

| optax | in its place |
| --- | --- |
| `losses` | `torch.nn.functional` |
| `tree_utils` | `fo.tree`, and optree for the rest |
| `contrib` | `functional_optim` itself, where these names are |
| `with_extra_args_support` | nothing: `fo.chain` passes extra arguments to the parts that take them |
| `safe_increment`, `safe_int32_increment` | nothing: counts are float64 |
| `skip_not_finite` | `fo.apply_if_finite` |
| `measure_with_ema` | `fo.monitor` |
| `microbatch` | `fo.compile_train_step` with `accumulate=` |
| `periodic_update` | nothing: an `if` in the loop, or `fo.lookahead` |
| `init_empty_state` | nothing: `fo.leafwise(None, update)` keeps no state |
| `matrix_inverse_pth_root`, `multi_normal`, `nnls`, `power_iteration`, `safe_norm`, `safe_root_mean_squares`, `scale_gradient` | nothing: see `torch.linalg` and `torch.distributions` |
| `scale_by_zoom_linesearch`, `value_and_grad_from_state` | `fo.lbfgs`, which has a line search of its own |
| `scale_by_param_block_norm`, `scale_by_param_block_rms` | `fo.leafwise(None, lambda u, slots, p: (u * p.norm(), slots))` |
| `per_example_global_norm_clip`, `per_example_layer_norm_clip` | `fo.differentially_private_aggregate` |

### Arguments

| there | here |
| --- | --- |
| `learning_rate` | `lr`: a number, a 0-dim tensor or a schedule |
| `b1`, `b2`, `b3`, `beta1`, `beta2`, `beta3` | `betas=(b1, b2)`, one tuple |
| `epsilon` | `eps` |
| `wd`, `weightdecay`, `decay_rate` | `weight_decay` |
| `mask`, `weight_decay_mask` | `fo.masked`, around the transformation: `fo.masked(fo.add_decayed_weights(0.1), "*.weight")` |
| `mu_dtype`, `accumulator_dtype`, `state_dtype`, `nu_dtype` | `fo.slot_dtypes`, around the transformation |
| `warmup`, `warmup_steps`, `num_warmup_steps` | a schedule as the rate: `lr=fo.schedules.warmup(...)` |
| `lr_schedule`, `schedule` | the schedule itself as the rate: `lr=fo.schedules.cosine_decay(...)` |
| `clip`, `clip_norm`, `max_norm`, `grad_clip`, `max_grad_norm`, `clipnorm` | a chain: `fo.chain(fo.clip_by_global_norm(1.0), ...)` |
| `ema`, `ema_decay`, `use_ema` | a chain: `fo.chain(..., fo.params_ema(0.999))` |
| `accumulate`, `accumulation_steps`, `gradient_accumulation_steps` | a wrapper: `fo.accumulate(tx, 4)` |
| `every_k_schedule`, `every_k` | `every` |
| `T_max`, `total_steps`, `num_training_steps` | `decay_steps`, `transition_steps` or `steps`, as the schedule calls it |
| `fused`, `foreach`, `differentiable`, `capturable` | nothing: `fo.compile(tx)` steps all tensors by kernels, and takes `capturable=` |
| `params` | nothing: parameters go to `init` and `update`, or to an optimizer object |
"""
"""The tables of names in the documentation: first the names elsewhere, then those here."""

ROW = re.compile(r"^\| (`[^|]*?) \| ([^|]*)", re.MULTILINE)


def hint_for(name: str) -> str:
    """What stands here in the place of a name of optax, as the end of a sentence; "" if unknown."""
    names, _, _ = TABLE.partition("### Arguments")
    for theirs, ours in _rows(names):
        if name in [x.rpartition(".")[2] for x in theirs]:
            here = _in_marks(ours)
            if len(theirs) == len(here) > 1:
                pairs = zip(theirs, here, strict=True)
                ours = next(y for x, y in pairs if x.rpartition(".")[2] == name)
            return _full(ours.strip())
    return ""


def hint_for_argument(name: str) -> str:
    """What stands here in the place of an argument, as the end of a sentence; "" if unknown."""
    _, _, arguments = TABLE.partition("### Arguments")
    return next((_full(ours.strip()) for theirs, ours in _rows(arguments) if name in theirs), "")


def _rows(text: str) -> Iterator[tuple[list[str], str]]:
    for theirs, ours in ROW.findall(text):
        yield _in_marks(theirs), ours


def _in_marks(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def _full(text: str) -> str:
    return re.sub(r"\bfo\.", "functional_optim.", text.replace("`", ""))
