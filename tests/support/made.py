"""An example of every public factory, defined at the top level so that all can be pickled."""

import inspect
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import functional_optim as fo
from functional_optim import estimators, projections, replicas, schedules, search

KINDS = {"Leafwise", "GradientTransformation", "Schedule", "Search", "Estimator", "Synced"}
KINDS |= {"CommitIf"}
"""Annotations of what can be copied and pickled."""


def public_factories() -> dict[str, Any]:
    """Public functions that return such things, by name."""
    found = {}
    for module in (fo, schedules, search, estimators, replicas):
        for name in dir(module):
            thing = getattr(module, name)
            if isinstance(thing, FunctionType) and not name.startswith("_"):
                kind = str(inspect.signature(thing).return_annotation).split(".")[-1]
                if kind in KINDS and thing is not schedules.from_torch:  # tested apart
                    found[thing.__name__] = thing
    return found


class SignSlots(NamedTuple):
    exp_avg: Tensor


def init(p: Tensor) -> SignSlots:
    return SignSlots(torch.zeros_like(p))


def numbers(t: Any) -> Any:
    return (0.1,)


def signum(g: Tensor, slots: SignSlots, p: Tensor, a: Any) -> Any:
    m = slots.exp_avg + a * (g - slots.exp_avg)
    return m.sign(), SignSlots(m)


def slowing(count: Any) -> Any:
    return 1 / (1 + count)


def two_or_one(batch: Any) -> Any:
    return 2 - (batch > 1)


def odd(step: Any) -> Any:
    return step % 2 == 1


def matrices(path: str, p: Tensor) -> bool:
    return p.ndim > 1


def by_dim(path: str, p: Tensor) -> str:
    return "matrix" if p.ndim > 1 else "rest"


def scaled(lr: Any) -> Any:
    return fo.chain(fo.add_decayed_weights(0.1 * lr), fo.scale_by_lr(lr))


def cube(x: Tensor) -> Tensor:
    return (x * x * x).sum()


def propose(params: Any, noise: Any) -> Any:
    return fo.tree.map(torch.add, params, noise)


def leaves_of(params):
    """Residuals: the parameters themselves."""
    return list(params.values())


def doubled(params: Any) -> Any:
    return fo.tree.map(lambda p: 2 * p, params)


DOWN = schedules.linear(0.2, 0.1, 10)
TX = fo.chain(fo.trace(0.9), fo.scale_by_lr(DOWN))
WHOLE = fo.flatten(fo.adam(0.1))
CYCLE = {"init_value": 0.1, "peak_value": 1.0, "warmup_steps": 1, "decay_steps": 5}
BEHIND = fo.chain(fo.freeze("b"), WHOLE, fo.trace(0.9))
WATCHED = fo.monitor(fo.measures.diagnostics, around=TX, per_tensor=True)
WIDE = ("split16", "split8", "kahan", "stochastic")
PACKED = ("int8", "int4", "bfloat16", "float8_e4m3fn")
PARTS = {"matrix": fo.muon(0.1), "rest": fo.adam(DOWN)}

MADE: dict[str, list[Any]] = {
    "accumulate": [fo.accumulate(TX, 2), fo.accumulate(WHOLE, every=two_or_one)],
    "adafactor": [fo.adafactor()],
    "adaptive_grad_clip": [fo.adaptive_grad_clip(0.1)],
    "add_decayed_weights": [fo.add_decayed_weights(0.1, mask=matrices)],
    "add_noise": [fo.add_noise(0.1, 0.55, seed=torch.tensor(3))],
    "asam": [fo.asam(TX, 0.1)],
    "annealing": [search.annealing(4, 0.1, DOWN)],
    "apply_delta": [fo.apply_delta(0.3)],
    "apply_if_finite": [fo.apply_if_finite(TX, 3)],
    "asgd": [fo.asgd()],
    "cautious": [fo.cautious(fo.scale_by_adam()), fo.cautious(fo.flatten(fo.scale_by_adam()))],
    "cautious_weight_decay": [fo.cautious_weight_decay(0.1, mask=matrices)],
    "cem": [search.cem(8, 0.1)],
    "centralize": [fo.centralize()],
    "chain": [TX, fo.chain(fo.clip_by_global_norm(0.5), WHOLE), BEHIND, fo.chain()],
    "clip_by_block_rms": [fo.clip_by_block_rms(0.5)],
    "clip_by_global_norm": [fo.clip_by_global_norm(torch.tensor(0.5))],
    "clip_by_value": [fo.clip_by_value(0.5)],
    "cma_es": [search.cma_es(8, 0.1)],
    "commit_if": [fo.commit_if(TX), fo.commit_if(WHOLE)],
    "conditionally_mask": [fo.conditionally_mask(TX, odd)],
    "conditionally_transform": [fo.conditionally_transform(TX, odd)],
    "constant": [schedules.constant(torch.tensor(0.1))],
    "cosine_decay": [schedules.cosine_decay(0.1, 10)],
    "cosine_onecycle": [schedules.cosine_onecycle(10, 0.1)],
    "differential_evolution": [search.differential_evolution(8, 0.1)],
    "differentially_private_aggregate": [fo.differentially_private_aggregate(1.0, 0.5, seed=0)],
    "decay_after_step": [fo.decay_after_step(0.1)],
    "diloco": [fo.diloco(TX, fo.sgd(0.7, momentum=0.9), every=2)],
    "dynamic_loss_scale": [fo.dynamic_loss_scale(TX, 64.0)],
    "ema": [fo.ema(0.9)],
    "es_gradient": [fo.es_gradient(4, 0.1)],
    "exponential_decay": [schedules.exponential_decay(0.1, 10, 0.5)],
    "flatten": [WHOLE],
    "forward_gradient": [fo.forward_gradient(2)],
    "freeze": [fo.freeze(["b"])],
    "gpa": [fo.gpa(TX), fo.gpa(WHOLE, 0.5, 0.9)],
    "hyperball": [fo.hyperball(DOWN)],
    "identity": [fo.identity()],
    "in_basis": [fo.in_basis(fo.shampoo_basis(0.9, 1), fo.scale_by_adam())],
    "inverse_square_root": [schedules.inverse_square_root(0.1, 4)],
    "join": [schedules.join(iter([DOWN, slowing]), iter([5]))],
    "keep_norms_within": [fo.keep_norms_within(1.1)],
    "keep_params_in": [fo.keep_params_in(projections.l2_ball, scale=0.5)],
    "keep_params_nonnegative": [fo.keep_params_nonnegative()],
    "keep_snapshots": [fo.keep_snapshots(TX, last=2)],
    "lbfgs": [fo.lbfgs(0.5, max_iter=2)],
    "leafwise": [fo.leafwise(init, signum, numbers, name="signum")],
    "linear": [DOWN],
    "linear_onecycle": [schedules.linear_onecycle(10, 0.1)],
    "local_sgd": [fo.local_sgd(TX, every=2)],
    "lookahead": [fo.lookahead(TX), fo.lookahead(WHOLE, 2)],
    "as_matrix": [fo.as_matrix(fo.masked(fo.orthogonalize(), matrices), heads=1)],
    "masked": [fo.masked(TX, {"a": True, "b": False}), fo.masked(WHOLE, "a")],
    "matrix_owners": [fo.matrix_owners(fo.masked(fo.orthogonalize(), matrices), "each")],
    "mechanize": [fo.mechanize(TX, s_decay=DOWN)],
    "metropolis": [fo.metropolis(propose, DOWN)],
    "mezo": [fo.mezo(1e-2)],
    "monitor": [fo.monitor({"cube": fo.measures.Measure(cube)}), WATCHED],
    "muon": [fo.muon(0.1, momentum=0.9)],
    "muon_adamw": [fo.muon_adamw(0.1, muon=matrices)],
    "named_chain": [fo.named_chain(("fast", fo.trace(0.5)), ("slow", fo.trace(0.9)))],
    "normalize": [fo.normalize(0.5)],
    "one_plus_one": [search.one_plus_one(0.1)],
    "openai_es": [search.openai_es(8, DOWN, fo.adam(DOWN))],
    "orthogonalize": [fo.orthogonalize()],
    "params_ema": [fo.params_ema(0.9)],
    "partition": [fo.partition(PARTS, by_dim), fo.partition(PARTS, {"a": "matrix", "*": "rest"})],
    "pgpe": [search.pgpe(8, 0.1, fo.adam(0.1))],
    "piecewise_constant": [schedules.piecewise_constant(0.1, {3: 0.5})],
    "piecewise_interpolate": [schedules.piecewise_interpolate("linear", 0.1, {3: 0.5})],
    "polyak_average": [fo.polyak_average(2.0)],
    "polynomial": [schedules.polynomial(0.1, 0.0, 2.0, 10)],
    "proximal_step": [fo.proximal_step(DOWN, 0.1)],
    "random_search": [search.random_search(4, 0.1)],
    "reduce_on_plateau": [fo.reduce_on_plateau(patience=1)],
    "sam": [fo.sam(TX, DOWN), fo.sam(WHOLE)],
    "scale": [fo.scale(0.5)],
    "scale_by_backtracking_linesearch": [fo.scale_by_backtracking_linesearch(4)],
    "scale_by_lbfgs": [fo.scale_by_lbfgs(3)],
    "scale_by_lr": [fo.scale_by_lr(torch.tensor(0.1))],
    "scale_by_path": [fo.scale_by_path({"a": DOWN, "*": 0.5})],
    "scale_by_schedule": [fo.scale_by_schedule(slowing)],
    "schedule_free": [fo.schedule_free(TX, DOWN), fo.schedule_free(WHOLE)],
    "selective_transform": [fo.selective_transform(TX, freeze_mask=matrices)],
    "sep_cma_es": [search.sep_cma_es(8, 0.1)],
    "set_to_zero": [fo.set_to_zero()],
    "sgdr": [schedules.sgdr([CYCLE])],
    "sharded_over": [],
    "sign": [fo.sign()],
    "skip_large_updates": [fo.skip_large_updates(TX, 1.5)],
    "master_weights": [fo.master_weights(fo.adam(0.1), kind) for kind in WIDE],
    "offload": [fo.offload(fo.adam(0.1), "cpu")],
    "slot_dtypes": [fo.slot_dtypes(fo.adam(0.1), exp_avg=torch.bfloat16)],
    "ssbfgs": [fo.ssbfgs(max_iter=2)],
    "ssbroyden": [fo.ssbroyden(max_iter=2)],
    "stored": [fo.stored(fo.adam(0.1), x, block_size=16, min_size=0) for x in PACKED],
    "snapshot": [fo.snapshot("size", fo.measures.global_norm, of="params")],
    "snes": [search.snes(8, 0.1)],
    "spsa": [fo.spsa(estimators.spsa_gain(0.1))],
    "spsa_gain": [estimators.spsa_gain(0.1)],
    "trace": [fo.trace(0.9)],
    "step_then_decay": [fo.step_then_decay(DOWN, 0.1)],
    "warmup": [schedules.warmup(DOWN, 3)],
    "warmup_constant": [schedules.warmup_constant(0.0, 0.1, 3)],
    "warmup_cosine_decay": [schedules.warmup_cosine_decay(0.0, 0.1, 3, 10)],
    "warmup_exponential_decay": [schedules.warmup_exponential_decay(0.0, 0.1, 3, 10, 0.5)],
    "warmup_stable_decay": [schedules.warmup_stable_decay(0.0, 0.1, 2, 3, 4)],
    "with_schedule": [fo.with_schedule(scaled, lr=DOWN)],
    "zero_nans": [fo.zero_nans()],
}
"""What each factory makes; those that are missing take no argument that they need."""

EXTRA: dict[str, dict[str, Any]] = {
    "asam": {"grad_fn": doubled},
    "commit_if": {"commit": True},
    "dogleg": {"residual_fn": leaves_of},
    "gauss_newton": {"residual_fn": leaves_of},
    "levenberg_marquardt": {"residual_fn": leaves_of},
    "metropolis": {"value": 1.0},
    "momo": {"value": 1.0},
    "momo_adam": {"value": 1.0},
    "reduce_on_plateau": {"value": 1.0},
    "sam": {"grad_fn": doubled},
    "scale_by_gauss_newton": {"residual_fn": leaves_of},
    "scale_by_polyak": {"value": 1.0},
    "polyak_sgd": {"value": 1.0},
}
"""The extra arguments of their steps."""


def examples() -> dict[str, Any]:
    """Examples of all factories, the others called without arguments, by name and number."""
    found = {}
    for name, make in sorted(public_factories().items()):
        for i, made in enumerate(MADE.get(name) or ([make()] if name not in MADE else [])):
            found[f"{name}-{i}"] = made
    return found
