"""Fifty steps in float64 go where optax's go, for all that both libraries have.

`reference/make_optax.py` has written down where that is. A row here and one of the same name there
are one comparison.

Equal only with these arguments: Adagrad and RAdam with eps 0 (optax's stands inside the root, or in
the corrected average), RMSprop with `eps_in_sqrt=False`, Adafactor with eps₁ 0, factored from one
row and one column on, and a learning rate below 1/√t (optax's decay is not multiplied by it), NAdam
with a momentum_decay that ends the warming up of momentum at once, AdaBelief with optax's eps_root
equal to eps, Adan with β₂ = ½ and without eps_root, LAMB without a bound on the gradients' norm,
LARS without decay, Fromage with optax's min_norm at 0, Prodigy and D-Adapted Adam with their bias
correction, which optax always has. NOT_EQUAL says what cannot be equal, and why.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from helpers import run
from reference import waves

import functional_optim as fo

FOUND = json.loads(
    (Path(__file__).parents[1] / "support" / "reference" / "optax.json").read_text()
)["rows"]
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


def descend(*links):
    return fo.chain(*links, fo.scale_by_lr(LR))


def rows() -> dict[str, Any]:
    """name → the transformation; or it, and what to read from its last state."""
    cosine = fo.schedules.cosine(0.1, 40, alpha=0.1)
    linear = fo.schedules.linear(0.1, 0.01, 30, transition_begin=5)
    ramp = fo.schedules.linear(0.5, 4.0, 30)
    warm = fo.schedules.warmup_cosine(0.0, 0.1, 10, 45, end_value=0.01)
    rms: dict[str, Any] = {"alpha": 0.9, "eps": 1e-3}
    corrected: dict[str, Any] = {"betas": (0.8, 0.95), "d0": 0.01, "use_bias_correction": True}
    labelled = {"fast": fo.adam(LR), "slow": fo.sgd(LR, 0.9), "still": fo.freeze()}
    clipped = {
        "fast": descend(fo.clip_by_global_norm(0.5)),
        "slow": descend(fo.clip_by_global_norm(0.3)),
        "still": fo.sgd(LR),
    }
    return {
        # algorithms
        "sgd": fo.sgd(LR),
        "sgd-momentum": fo.sgd(LR, momentum=0.9),
        "sgd-nesterov": fo.sgd(LR, momentum=0.9, nesterov=True),
        "sgd-l2": fo.sgd(LR, momentum=0.9, weight_decay=0.1),
        "adam": fo.adam(LR, **ADAM),
        "adam-l2": fo.adam(LR, **ADAM, weight_decay=0.1),
        "adamw": fo.adamw(LR, **ADAM, weight_decay=0.1),
        "nadam": fo.nadam(LR, **ADAM, momentum_decay=AT_ONCE),
        "nadamw": fo.nadam(
            LR, **ADAM, momentum_decay=AT_ONCE, weight_decay=0.1, decoupled_weight_decay=True
        ),
        "adamax": fo.adamax(LR, **ADAM),
        "adamaxw": fo.adamaxw(LR, **ADAM, weight_decay=0.1),
        "radam": fo.radam(LR, (0.8, 0.95), eps=0.0),
        "rmsprop": fo.rmsprop(LR, **rms),
        "rmsprop-centered": fo.rmsprop(LR, **rms, centered=True),
        "rmsprop-momentum": fo.rmsprop(LR, **rms, momentum=0.5),
        "adagrad": fo.adagrad(LR, initial_accumulator_value=0.1, eps=0.0),
        "adadelta": fo.adadelta(0.5, rho=0.9, eps=1e-3),
        "adafactor": fo.adafactor(LR, eps=(0.0, 1e-3)),
        "adafactor-decay": fo.adafactor(LR, eps=(0.0, 1e-3), weight_decay=0.01 / LR),
        "lion": fo.lion(LR, (0.8, 0.95), 0.1),
        "signum": fo.signum(LR, 0.8),
        "sign_sgd": fo.sign_sgd(LR),
        "ademamix": fo.ademamix(LR, (0.8, 0.95, 0.99), ramp, eps=1e-3, weight_decay=0.1),
        "simplified_ademamix": fo.simplified_ademamix(
            0.1 * LR, (0.8, 0.95), 1.5, eps=1e-3, weight_decay=0.1
        ),
        "adopt": fo.adopt(LR, **ADAM),
        "adabelief": fo.adabelief(LR, **ADAM, rectify=False),
        "yogi": fo.yogi(LR, **ADAM),
        "adan": fo.adan(LR, (0.9, 0.5, 0.95), 1e-3),
        "madgrad": fo.madgrad(LR, 0.8, weight_decay=0.1, eps=1e-3),
        "optimistic_gradient_descent": fo.optimistic_gradient_descent(LR, 0.9, 0.7),
        "optimistic_adam_v2": fo.optimistic_adam_v2(LR, 0.9, 0.7, **ADAM),
        "lamb": fo.lamb(LR, **ADAM, weight_decay=0.1, max_grad_norm=None),
        "lars": fo.lars(LR, 0.8, trust_coefficient=0.1, eps=1e-3, always_adapt=True),
        "novograd": fo.novograd(LR, (0.8, 0.95), eps=1e-3, weight_decay=0.1),
        "fromage": fo.fromage(LR),
        "cocob": fo.cocob(alpha=20.0, weight_decay=0.1),
        "schedule_free": fo.schedule_free(fo.sgd(linear), linear, 0.8),
        "schedule_free_sgd": fo.schedule_free_sgd(LR, 0.8, weight_decay=0.1),
        "schedule_free_adamw": fo.schedule_free_adamw(LR, **ADAM, weight_decay=0.1),
        "prodigy": fo.prodigy(**corrected, weight_decay=0.1),
        "prodigy-safeguard": fo.prodigy(**corrected, safeguard_warmup=True),
        "dadapt_adamw": fo.dadapt_adam(**corrected, decouple=True, weight_decay=0.1),
        "dog": fo.dog(reps_rel=0.01, weight_decay=0.1),
        "dowg": fo.dowg(),
        # links
        "scale": fo.scale(-0.3),
        "trace": descend(fo.trace(0.8)),
        "trace-nesterov": descend(fo.trace(0.8, nesterov=True)),
        "clip_by_global_norm": descend(fo.clip_by_global_norm(1.5)),
        "clip": descend(fo.clip_by_value(0.7)),
        "add_decayed_weights": descend(fo.add_decayed_weights(0.1)),
        "add_decayed_weights-mask": descend(fo.masked(fo.add_decayed_weights(0.1), MATRIX)),
        "scale_by_adam": descend(fo.scale_by_adam(**ADAM)),
        "scale_by_rms": descend(fo.scale_by_rms(**rms)),
        "scale_by_schedule": descend(fo.scale_by_schedule(lambda count: 1 / (1 + count))),
        "sign": descend(fo.sign()),
        "ema": descend(fo.ema(0.8)),
        "ema-biased": descend(fo.ema(0.8, debias=False)),
        "centralize": descend(fo.centralize()),
        "normalize": descend(fo.normalize(0.7, eps=1e-3)),
        "clip_by_block_rms": descend(fo.clip_by_block_rms(0.6)),
        "zero_nans": descend(fo.zero_nans(), fo.clip_by_value(1.0)),
        "zero_nans-broken": descend(fo.zero_nans(), fo.clip_by_value(1.0)),
        "keep_params_nonnegative": fo.chain(fo.sgd(LR, 0.9), fo.keep_params_nonnegative()),
        "scale_by_trust_ratio": descend(
            fo.scale_by_trust_ratio(min_norm=0.1, trust_coefficient=0.5, eps=1e-3)
        ),
        "params_ema": (fo.chain(fo.sgd(LR), fo.params_ema(0.9)), reads("params_ema")),
        # combinators
        "chain": fo.chain(
            fo.clip_by_global_norm(1.0), fo.adamw(LR, **ADAM, weight_decay=1e-4), fo.trace(0.5)
        ),
        "named_chain": descend(fo.named_chain(("fast", fo.trace(0.5)), ("slow", fo.trace(0.9)))),
        "flatten": descend(fo.clip_by_global_norm(1.0), fo.scale_by_adam()),
        "partition": fo.partition(labelled, LABELS),
        "partition-norms": fo.partition(clipped, LABELS),
        "masked": descend(fo.masked(fo.scale_by_adam(), MATRIX)),
        "freeze": fo.chain(fo.adam(LR), fo.freeze(MATRIX)),
        "selective_transform": fo.selective_transform(fo.adam(LR), freeze_mask=MATRIX),
        "conditionally_transform": descend(
            fo.conditionally_transform(fo.scale_by_adam(), lambda step: step % 3 != 0)
        ),
        "conditionally_mask": fo.conditionally_mask(fo.adam(LR), lambda step: step >= 5),
        "apply_if_finite": fo.apply_if_finite(fo.adam(LR), 4),
        "apply_if_finite-gives-up": (
            fo.apply_if_finite(descend(fo.clip_by_value(1.0)), 2),
            reads_all("notfinite_count", "total_notfinite"),
        ),
        "skip_large_updates": fo.skip_large_updates(fo.adam(LR), 10.0),
        "accumulate": (fo.accumulate(fo.adam(LR), 4), reads("acc_grads")),
        "accumulate-sum": fo.accumulate(fo.sgd(LR, 0.9), 3, mean=False),
        "accumulate-growing": fo.accumulate(fo.adam(LR), lambda done: 1 + done // 4),
        "accumulate-schedule": fo.accumulate(fo.sgd(linear), 2),
        "accumulate-finite": fo.accumulate(fo.adam(LR), 4, skip_nonfinite=True),
        "clip-of-batches": fo.accumulate(
            fo.chain(fo.clip_by_global_norm(1.0), fo.adam(LR)), every=5
        ),
        # schedules and hyperparameters
        "constant": fo.sgd(fo.schedules.constant(LR), momentum=0.9),
        "linear": fo.sgd(linear, momentum=0.9),
        "cosine": fo.adam(cosine, **ADAM),
        "warmup_cosine": fo.adamw(warm, **ADAM, weight_decay=0.1),
        "inject_hyperparams": (
            fo.adam(cosine, (linear, 0.95), 1e-3),
            lambda state: {"lr": fo.get(state, "lr"), "b1": fo.get(state, "betas")[0]},
        ),
    }


def reads(name: str) -> Callable[[Any], Any]:
    return lambda state: fo.get(state, name)


def reads_all(*names: str) -> Callable[[Any], Any]:
    return lambda state: {name: fo.get(state, name) for name in names}


@pytest.fixture(autouse=True)
def doubles():
    """Numbers that recur are kept in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def tensors(tree: Any) -> Any:
    return optree.tree_map(torch.as_tensor, tree)


def assert_near(ours: Any, theirs: Any, tolerance: float) -> None:
    theirs = optree.tree_map(torch.tensor, theirs, is_leaf=lambda x: isinstance(x, list))
    assert optree.tree_structure(ours) == optree.tree_structure(theirs)
    for x, y in zip(optree.tree_leaves(ours), optree.tree_leaves(theirs), strict=True):
        torch.testing.assert_close(
            x, y, rtol=tolerance, atol=tolerance, equal_nan=True, check_dtype=False
        )


@pytest.mark.parametrize("name", rows())
def test_fifty_steps_are_those_of_optax(name):
    row, found = rows()[name], FOUND[name]
    tolerance = 1e-7 if name in SINGLE else 1e-12
    tx, kept = (row, None) if isinstance(row, fo.GradientTransformation) else row
    params, state = tensors(waves.params()), None
    done = 0
    for upto in waves.KEPT:
        steps = range(done + 1, upto + 1)
        grads = [tensors(waves.grads(step, found["kind"])) for step in steps]
        params, state = run(tx, params, grads, state)
        assert_near(params, found["params"][str(upto)], tolerance)
        done = upto
    if kept is not None:
        assert_near(kept(state), found["kept"], tolerance)


def test_every_row_of_optax_has_one_here():
    assert set(rows()) == set(FOUND)
    assert not set(rows()) & set(NOT_EQUAL)
