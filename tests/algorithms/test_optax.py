"""Fifty steps in float64 go where optax's go, for all that both libraries have.

A row is one comparison; `reference/make_optax.py` has written down where optax goes.

Equal only with these arguments: Adagrad and RAdam with eps 0 (optax's stands inside the root, or in
the corrected average), RMSprop with `eps_in_sqrt=False`, Adafactor with eps₁ 0, factored from one
row and one column on, and a learning rate below 1/√t (optax's decay is not multiplied by it), NAdam
with a momentum_decay that ends the warming up of momentum at once, AdaBelief with optax's eps_root
equal to eps, Adan with β₂ = ½ and without eps_root, LAMB without a bound on the gradients' norm,
LARS without decay, Fromage with optax's min_norm at 0, Prodigy and D-Adapted Adam with their bias
correction, which optax always has. NOT_EQUAL says what cannot be equal, and why.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch
from helpers import run
from reference import waves

import functional_optim as fo

FILE = Path(__file__).parents[1] / "support" / "reference" / "optax.json"
FOUND = json.loads(FILE.read_text())["rows"]
LR = 0.05
ADAM: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-3}
MATRIX = "body.w"
LABELS = {"body.w": "fast", "body.b": "slow", "head": "still"}
AT_ONCE = 1e6

SINGLE = {"adafactor", "adafactor-decay"}
"""Rows in which optax computes a number in float32, a decay rate."""

NOT_EQUAL = {
    "amsgrad": "optax keeps the largest corrected average; we, as torch.optim, the largest raw one",
    "sgd-dampening": "torch's first step has none; optax's ema damps it, too",
    "rprop": "optax 0.2.8 takes each step one call late",
    "lars with weight_decay": "optax measures |g + decay p|; the paper |g| + decay |p|, as we do",
    "sm3": "optax takes no parameter without dimensions",
    "sophia": "optax corrects the average gradient for bias",
    "noisy_sgd": "the two draw other random numbers",
    "muon": "the iteration runs in bfloat16 here, as in torch.optim",
    "adaptive_grad_clip": "a unit is a row here, as torch stores weights; a column in jax",
    "momo with weight_decay": "optax adds the decay, the authors divide by 1 + lr · decay",
    "sam": "optax's takes its step uphill with another optimizer, in a step of its own",
    "lbfgs": "another line search: optax zooms, torch.optim brackets by cubics",
    "acprop": "optax takes the difference from the average before, and does not rectify",
    "adan with another β₂ than ½": "optax weighs the gradient's change by 1 − β₂ instead of β₂",
    "adan with weight_decay": "optax's is decoupled, the authors' is proximal",
    "adadelta with weight_decay": "optax's is decoupled, torch.optim's is L2",
}

Make = Callable[[Any], Any]


class Row(NamedTuple):
    """A comparison.

    ours: from `functional_optim` to a transformation. theirs: from optax under our names. kind: of
    gradients. kept: what to read from the last states, ours and theirs.
    """

    ours: Make
    theirs: Make
    kind: str = "calm"
    kept: tuple[Make, Make] | None = None


def row(make: Make, theirs: Make | None = None, **more: Any) -> Row:
    return Row(make, theirs or make, **more)


def descend(o: Any, *links: Any) -> Any:
    return o.chain(*links, o.scale_by_lr(LR))


def link(make: Make, theirs: Make | None = None, **more: Any) -> Row:
    """A link, and a descent behind it."""
    return row(lambda o: descend(o, make(o)), lambda o: descend(o, (theirs or make)(o)), **more)


def linear(o: Any) -> Any:
    return o.schedules.linear(0.1, 0.01, 30, transition_begin=5)


def cosine(o: Any) -> Any:
    return o.schedules.cosine(0.1, 40, alpha=0.1)


def labelled(o: Any) -> dict[str, Any]:
    return {"fast": o.adam(LR), "slow": o.sgd(LR, 0.9), "still": o.freeze()}


def clipped(o: Any) -> dict[str, Any]:
    fast, slow = (descend(o, o.clip_by_global_norm(most)) for most in (0.5, 0.3))
    return {"fast": fast, "slow": slow, "still": o.sgd(LR)}


COUNTS = ("notfinite_count", "total_notfinite")
RMS: dict[str, Any] = {"alpha": 0.9, "eps": 1e-3}
DECAY: dict[str, Any] = {"decay": 0.9, "eps": 1e-3, "eps_in_sqrt": False}
SLOW: dict[str, Any] = {**ADAM, "betas": (0.8, 0.95, 0.99)}
HALF: dict[str, Any] = {**ADAM, "betas": (0.9, 0.5, 0.95)}
LARS: dict[str, Any] = {"momentum": 0.8, "trust_coefficient": 0.1, "eps": 1e-3}
DECOUPLED: dict[str, Any] = {"weight_decay": 0.1, "decoupled_weight_decay": True}
FACTORED: dict[str, Any] = {"min_dim_size_to_factor": 1, "eps": 0.0}
FREE: dict[str, Any] = {"betas": (0.8, 0.95), "d0": 0.01, "use_bias_correction": True}
ESTIMATED: dict[str, Any] = {"betas": (0.8, 0.95), "estim_lr0": 0.01}

ROWS = {
    # algorithms
    "sgd": row(lambda o: o.sgd(LR)),
    "sgd-momentum": row(lambda o: o.sgd(LR, momentum=0.9)),
    "sgd-nesterov": row(lambda o: o.sgd(LR, momentum=0.9, nesterov=True)),
    "sgd-l2": row(
        lambda o: o.sgd(LR, momentum=0.9, weight_decay=0.1),
        lambda o: o.chain(o.add_decayed_weights(0.1), o.sgd(LR, momentum=0.9)),
    ),
    "adam": row(lambda o: o.adam(LR, **ADAM)),
    "adam-l2": row(
        lambda o: o.adam(LR, **ADAM, weight_decay=0.1),
        lambda o: o.chain(o.add_decayed_weights(0.1), o.adam(LR, **ADAM)),
    ),
    "adamw": row(lambda o: o.adamw(LR, **ADAM, weight_decay=0.1)),
    "nadam": row(
        lambda o: o.nadam(LR, **ADAM, momentum_decay=AT_ONCE), lambda o: o.nadam(LR, **ADAM)
    ),
    "nadamw": row(
        lambda o: o.nadam(LR, **ADAM, momentum_decay=AT_ONCE, **DECOUPLED),
        lambda o: o.nadamw(LR, **ADAM, weight_decay=0.1),
    ),
    "adamax": row(lambda o: o.adamax(LR, **ADAM)),
    "adamaxw": row(lambda o: o.adamaxw(LR, **ADAM, weight_decay=0.1)),
    "radam": row(lambda o: o.radam(LR, betas=(0.8, 0.95), eps=0.0)),
    "rmsprop": row(lambda o: o.rmsprop(LR, **RMS), lambda o: o.rmsprop(LR, **DECAY)),
    "rmsprop-centered": row(
        lambda o: o.rmsprop(LR, **RMS, centered=True),
        lambda o: o.rmsprop(LR, **DECAY, centered=True),
    ),
    "rmsprop-momentum": row(
        lambda o: o.rmsprop(LR, **RMS, momentum=0.5), lambda o: o.rmsprop(LR, **DECAY, momentum=0.5)
    ),
    "adagrad": row(lambda o: o.adagrad(LR, initial_accumulator_value=0.1, eps=0.0)),
    "adadelta": row(lambda o: o.adadelta(0.5, rho=0.9, eps=1e-3)),
    "adafactor": row(
        lambda o: o.adafactor(LR, eps=(0.0, 1e-3)), lambda o: o.adafactor(LR, **FACTORED)
    ),
    "adafactor-decay": row(
        lambda o: o.adafactor(LR, eps=(0.0, 1e-3), weight_decay=0.01 / LR),
        lambda o: o.adafactor(LR, **FACTORED, weight_decay_rate=0.01),
    ),
    "lion": row(lambda o: o.lion(LR, betas=(0.8, 0.95), weight_decay=0.1)),
    "signum": row(lambda o: o.signum(LR, 0.8)),
    "sign_sgd": row(lambda o: o.sign_sgd(LR)),
    "ademamix": row(
        lambda o: o.ademamix(LR, **SLOW, alpha=o.schedules.linear(0.5, 4.0, 30), weight_decay=0.1)
    ),
    "simplified_ademamix": row(
        lambda o: o.simplified_ademamix(0.1 * LR, **ADAM, alpha=1.5, weight_decay=0.1)
    ),
    "adopt": row(lambda o: o.adopt(LR, **ADAM)),
    "adabelief": row(
        lambda o: o.adabelief(LR, **ADAM, rectify=False),
        lambda o: o.adabelief(LR, **ADAM, eps_root=1e-3),
    ),
    "yogi": row(lambda o: o.yogi(LR, **ADAM)),
    "adan": row(lambda o: o.adan(LR, **HALF), lambda o: o.adan(LR, **HALF, eps_root=0.0)),
    "madgrad": row(lambda o: o.madgrad(LR, 0.8, weight_decay=0.1, eps=1e-3)),
    "optimistic_gradient_descent": row(
        lambda o: o.optimistic_gradient_descent(LR, alpha=0.9, beta=0.7)
    ),
    "optimistic_adam_v2": row(lambda o: o.optimistic_adam_v2(LR, alpha=0.9, beta=0.7, **ADAM)),
    "lamb": row(
        lambda o: o.lamb(LR, **ADAM, weight_decay=0.1, max_grad_norm=None),
        lambda o: o.lamb(LR, **ADAM, weight_decay=0.1),
    ),
    "lars": row(lambda o: o.lars(LR, **LARS, always_adapt=True), lambda o: o.lars(LR, **LARS)),
    "novograd": row(lambda o: o.novograd(LR, **ADAM, weight_decay=0.1)),
    "fromage": row(lambda o: o.fromage(LR), lambda o: o.fromage(LR, min_norm=0.0)),
    "cocob": row(lambda o: o.cocob(alpha=20.0, weight_decay=0.1)),
    "schedule_free": row(lambda o: o.schedule_free(o.sgd(linear(o)), linear(o), 0.8)),
    "schedule_free_sgd": row(
        lambda o: o.schedule_free_sgd(LR, 0.8, weight_decay=0.1),
        lambda o: o.schedule_free_sgd(LR, b1=0.8, weight_decay=0.1),
    ),
    "schedule_free_adamw": row(lambda o: o.schedule_free_adamw(LR, **ADAM, weight_decay=0.1)),
    "prodigy": row(
        lambda o: o.prodigy(**FREE, weight_decay=0.1),
        lambda o: o.prodigy(**ESTIMATED, weight_decay=0.1),
    ),
    "prodigy-safeguard": row(
        lambda o: o.prodigy(**FREE, safeguard_warmup=True),
        lambda o: o.prodigy(**ESTIMATED, safeguard_warmup=True),
    ),
    "dadapt_adamw": row(
        lambda o: o.dadapt_adam(**FREE, decouple=True, weight_decay=0.1),
        lambda o: o.dadapt_adamw(**ESTIMATED, weight_decay=0.1),
    ),
    "dog": row(
        lambda o: o.dog(reps_rel=0.01, weight_decay=0.1),
        lambda o: o.dog(init_step=("heuristic", 0.01), weight_decay=0.1),
    ),
    "dowg": row(lambda o: o.dowg()),
    # links
    "scale": row(lambda o: o.scale(-0.3)),
    "trace": link(lambda o: o.trace(0.8)),
    "trace-nesterov": link(lambda o: o.trace(0.8, nesterov=True)),
    "clip_by_global_norm": link(lambda o: o.clip_by_global_norm(1.5), kind="uneven"),
    "clip": link(lambda o: o.clip_by_value(0.7), kind="uneven"),
    "add_decayed_weights": link(lambda o: o.add_decayed_weights(0.1)),
    "add_decayed_weights-mask": link(lambda o: o.add_decayed_weights(0.1, mask=MATRIX)),
    "scale_by_adam": link(lambda o: o.scale_by_adam(**ADAM)),
    "scale_by_rms": link(lambda o: o.scale_by_rms(**RMS), lambda o: o.scale_by_rms(**DECAY)),
    "scale_by_schedule": link(lambda o: o.scale_by_schedule(lambda count: 1 / (1 + count))),
    "sign": link(lambda o: o.sign()),
    "ema": link(lambda o: o.ema(0.8)),
    "ema-biased": link(lambda o: o.ema(0.8, debias=False)),
    "centralize": link(lambda o: o.centralize()),
    "normalize": link(lambda o: o.normalize(0.7, eps=1e-3)),
    "clip_by_block_rms": link(lambda o: o.clip_by_block_rms(0.6), kind="uneven"),
    "zero_nans": link(lambda o: o.chain(o.zero_nans(), o.clip_by_value(1.0))),
    "zero_nans-broken": link(lambda o: o.chain(o.zero_nans(), o.clip_by_value(1.0)), kind="broken"),
    "keep_params_nonnegative": row(lambda o: o.chain(o.sgd(LR, 0.9), o.keep_params_nonnegative())),
    "scale_by_trust_ratio": link(
        lambda o: o.scale_by_trust_ratio(min_norm=0.1, trust_coefficient=0.5, eps=1e-3)
    ),
    "params_ema": row(
        lambda o: o.chain(o.sgd(LR), o.params_ema(0.9)),
        kept=(lambda s: fo.get(s, "params_ema"), lambda s: s[1]),
    ),
    # combinators
    "chain": row(
        lambda o: o.chain(
            o.clip_by_global_norm(1.0), o.adamw(LR, **ADAM, weight_decay=1e-4), o.trace(0.5)
        ),
        kind="uneven",
    ),
    "named_chain": link(lambda o: o.named_chain(("fast", o.trace(0.5)), ("slow", o.trace(0.9)))),
    "flatten": row(
        lambda o: descend(o, o.clip_by_global_norm(1.0), o.scale_by_adam()),
        lambda o: o.flatten(descend(o, o.clip_by_global_norm(1.0), o.scale_by_adam())),
    ),
    "partition": row(lambda o: o.partition(labelled(o), LABELS)),
    "partition-norms": row(lambda o: o.partition(clipped(o), LABELS), kind="uneven"),
    "masked": link(lambda o: o.masked(o.scale_by_adam(), MATRIX)),
    "freeze": row(lambda o: o.chain(o.adam(LR), o.freeze(MATRIX))),
    "selective_transform": row(lambda o: o.selective_transform(o.adam(LR), freeze_mask=MATRIX)),
    "conditionally_transform": link(
        lambda o: o.conditionally_transform(o.scale_by_adam(), lambda step: step % 3 != 0)
    ),
    "conditionally_mask": row(lambda o: o.conditionally_mask(o.adam(LR), lambda step: step >= 5)),
    "apply_if_finite": row(lambda o: o.apply_if_finite(o.adam(LR), 4), kind="broken"),
    "apply_if_finite-gives-up": row(
        lambda o: o.apply_if_finite(descend(o, o.clip_by_value(1.0)), 2),
        kind="broken",
        kept=(
            lambda s: {name: fo.get(s, name) for name in COUNTS},
            lambda s: {name: getattr(s, name) for name in COUNTS},
        ),
    ),
    "skip_large_updates": row(lambda o: o.skip_large_updates(o.adam(LR), 10.0), kind="uneven"),
    "accumulate": row(
        lambda o: o.accumulate(o.adam(LR), 4),
        kept=(lambda s: fo.get(s, "acc_grads"), lambda s: s.acc_grads),
    ),
    "accumulate-sum": row(lambda o: o.accumulate(o.sgd(LR, 0.9), 3, mean=False)),
    "accumulate-growing": row(lambda o: o.accumulate(o.adam(LR), lambda done: 1 + done // 4)),
    "accumulate-schedule": row(lambda o: o.accumulate(o.sgd(linear(o)), 2)),
    "accumulate-finite": row(
        lambda o: o.accumulate(o.adam(LR), 4, skip_nonfinite=True), kind="broken"
    ),
    "clip-of-batches": row(
        lambda o: o.accumulate(o.chain(o.clip_by_global_norm(1.0), o.adam(LR)), 5), kind="uneven"
    ),
    # schedules and hyperparameters
    "constant": row(lambda o: o.sgd(o.schedules.constant(LR), momentum=0.9)),
    "linear": row(lambda o: o.sgd(linear(o), momentum=0.9)),
    "cosine": row(lambda o: o.adam(cosine(o), **ADAM)),
    "warmup_cosine": row(
        lambda o: o.adamw(
            o.schedules.warmup_cosine(0.0, 0.1, 10, 45, end_value=0.01), **ADAM, weight_decay=0.1
        )
    ),
    "inject_hyperparams": row(
        lambda o: o.adam(cosine(o), (linear(o), 0.95), 1e-3),
        lambda o: o.inject_hyperparams(o.adam)(cosine(o), b1=linear(o), b2=0.95, eps=1e-3),
        kept=(
            lambda s: {"lr": fo.get(s, "lr"), "b1": fo.get(s, "betas")[0]},
            lambda s: {"lr": s.hyperparams["learning_rate"], "b1": s.hyperparams["b1"]},
        ),
    ),
}


def tensors(tree: Any) -> Any:
    return optree.tree_map(torch.as_tensor, tree)


def assert_near(ours: Any, theirs: Any, tolerance: float) -> None:
    theirs = optree.tree_map(torch.tensor, theirs, is_leaf=lambda x: isinstance(x, list))
    assert optree.tree_structure(ours) == optree.tree_structure(theirs)
    for x, y in zip(optree.tree_leaves(ours), optree.tree_leaves(theirs), strict=True):
        torch.testing.assert_close(
            x, y, rtol=tolerance, atol=tolerance, equal_nan=True, check_dtype=False
        )


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("name", ROWS)
def test_fifty_steps_are_those_of_optax(name):
    row, found = ROWS[name], FOUND[name]
    tolerance = 1e-7 if name in SINGLE else 1e-12
    tx, params, state, done = row.ours(fo), tensors(waves.params()), None, 0
    for upto in waves.KEPT:
        steps = range(done + 1, upto + 1)
        grads = [tensors(waves.grads(step, row.kind)) for step in steps]
        params, state = run(tx, params, grads, state)
        assert_near(params, found["params"][str(upto)], tolerance)
        done = upto
    if row.kept is not None:
        assert_near(row.kept[0](state), found["kept"], tolerance)


def test_every_row_is_written_down():
    assert ROWS.keys() == FOUND.keys()
    assert not ROWS.keys() & NOT_EQUAL.keys()
