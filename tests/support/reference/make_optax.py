"""Writes optax.json: where optax's optimizers go. test_optax.py reads it, and needs no jax.

    pip install -e '.[test,peers]' && python tests/support/reference/make_optax.py

A row here and a row of the same name there are one comparison. Arguments that are not the two
libraries' common defaults stand in both, and what makes two definitions equal is said beside it.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

sys.path.insert(0, str(Path(__file__).parent.parent))
from reference import waves, write

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_platforms", "cpu")

FILE = Path(__file__).with_name("optax.json")
LR = 0.05
BODY = {"body": {"b": False, "w": True}, "head": False}
LABELS = {"body": {"b": "slow", "w": "fast"}, "head": "still"}
multi = functools.partial(optax.MultiSteps, accumulator_dtype=jnp.float64)
large = functools.partial(optax.skip_large_updates, max_squared_norm=100.0)


def descend(*links):
    return optax.chain(*links, optax.scale_by_learning_rate(LR))


def averaged(decay):
    """The average of the parameters after each update."""

    def update(updates, average, params):
        new = optax.apply_updates(params, updates)
        return updates, optax.incremental_update(new, average, 1 - decay)

    return optax.GradientTransformation(lambda params: params, update)


def rows():
    """name → the transformation; or it, the kind of gradients, and what to keep of its state."""
    adam = {"b1": 0.8, "b2": 0.95, "eps": 1e-3}
    cosine = optax.cosine_decay_schedule(0.1, 40, alpha=0.1)
    linear = optax.linear_schedule(0.1, 0.01, 30, transition_begin=5)
    ramp = optax.linear_schedule(0.5, 4.0, 30)
    warm = optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 45, end_value=0.01)
    labelled = {"fast": optax.adam(LR), "slow": optax.sgd(LR, 0.9), "still": optax.set_to_zero()}
    clipped = {
        "fast": descend(optax.clip_by_global_norm(0.5)),
        "slow": descend(optax.clip_by_global_norm(0.3)),
        "still": optax.sgd(LR),
    }
    return {
        # algorithms
        "sgd": optax.sgd(LR),
        "sgd-momentum": optax.sgd(LR, momentum=0.9),
        "sgd-nesterov": optax.sgd(LR, momentum=0.9, nesterov=True),
        "sgd-l2": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(LR, momentum=0.9)),
        "adam": optax.adam(LR, **adam),
        "adam-l2": optax.chain(optax.add_decayed_weights(0.1), optax.adam(LR, **adam)),
        "adamw": optax.adamw(LR, **adam, weight_decay=0.1),
        "nadam": optax.nadam(LR, **adam),
        "nadamw": optax.nadamw(LR, **adam, weight_decay=0.1),
        "adamax": optax.adamax(LR, **adam),
        "adamaxw": optax.adamaxw(LR, **adam, weight_decay=0.1),
        "radam": optax.radam(LR, 0.8, 0.95, eps=0.0),
        "rmsprop": optax.rmsprop(LR, decay=0.9, eps=1e-3, eps_in_sqrt=False),
        "rmsprop-centered": optax.rmsprop(
            LR, decay=0.9, eps=1e-3, eps_in_sqrt=False, centered=True
        ),
        "rmsprop-momentum": optax.rmsprop(LR, decay=0.9, eps=1e-3, eps_in_sqrt=False, momentum=0.5),
        "adagrad": optax.adagrad(LR, initial_accumulator_value=0.1, eps=0.0),
        "adadelta": optax.adadelta(0.5, rho=0.9, eps=1e-3),
        "adafactor": optax.adafactor(LR, min_dim_size_to_factor=1, eps=0.0),
        "adafactor-decay": optax.adafactor(
            LR, min_dim_size_to_factor=1, eps=0.0, weight_decay_rate=0.01
        ),
        "lion": optax.lion(LR, 0.8, 0.95, weight_decay=0.1),
        "signum": optax.signum(LR, 0.8),
        "sign_sgd": optax.sign_sgd(LR),
        "ademamix": optax.contrib.ademamix(
            LR, 0.8, 0.95, 0.99, alpha=ramp, eps=1e-3, weight_decay=0.1
        ),
        "simplified_ademamix": optax.contrib.simplified_ademamix(
            0.1 * LR, 0.8, 0.95, alpha=1.5, eps=1e-3, weight_decay=0.1
        ),
        "adopt": optax.contrib.adopt(LR, 0.8, 0.95, eps=1e-3),
        "adabelief": optax.adabelief(LR, 0.8, 0.95, eps=1e-3, eps_root=1e-3),
        "yogi": optax.yogi(LR, **adam),
        "adan": optax.adan(LR, 0.9, 0.5, 0.95, eps=1e-3, eps_root=0.0),
        "madgrad": optax.contrib.madgrad(LR, 0.8, weight_decay=0.1, eps=1e-3),
        "optimistic_gradient_descent": optax.optimistic_gradient_descent(LR, alpha=0.9, beta=0.7),
        "optimistic_adam_v2": optax.optimistic_adam_v2(LR, alpha=0.9, beta=0.7, **adam),
        "lamb": optax.lamb(LR, **adam, weight_decay=0.1),
        "lars": optax.lars(LR, trust_coefficient=0.1, eps=1e-3, momentum=0.8),
        "novograd": optax.novograd(LR, 0.8, 0.95, eps=1e-3, weight_decay=0.1),
        "fromage": optax.fromage(LR, min_norm=0.0),
        "cocob": optax.contrib.cocob(alpha=20.0, weight_decay=0.1),
        "schedule_free": optax.contrib.schedule_free(optax.sgd(linear), linear, b1=0.8),
        "schedule_free_sgd": optax.contrib.schedule_free_sgd(LR, b1=0.8, weight_decay=0.1),
        "schedule_free_adamw": optax.contrib.schedule_free_adamw(LR, **adam, weight_decay=0.1),
        "prodigy": optax.contrib.prodigy(betas=(0.8, 0.95), estim_lr0=0.01, weight_decay=0.1),
        "prodigy-safeguard": optax.contrib.prodigy(
            betas=(0.8, 0.95), estim_lr0=0.01, safeguard_warmup=True
        ),
        "dadapt_adamw": optax.contrib.dadapt_adamw(
            betas=(0.8, 0.95), estim_lr0=0.01, weight_decay=0.1
        ),
        "dog": optax.contrib.dog(init_step=("heuristic", 0.01), weight_decay=0.1),
        "dowg": optax.contrib.dowg(),
        # links
        "scale": optax.scale(-0.3),
        "trace": descend(optax.trace(0.8)),
        "trace-nesterov": descend(optax.trace(0.8, nesterov=True)),
        "clip_by_global_norm": (descend(optax.clip_by_global_norm(1.5)), "uneven"),
        "clip": (descend(optax.clip(0.7)), "uneven"),
        "add_decayed_weights": descend(optax.add_decayed_weights(0.1)),
        "add_decayed_weights-mask": descend(optax.add_decayed_weights(0.1, mask=BODY)),
        "scale_by_adam": descend(optax.scale_by_adam(**adam)),
        "scale_by_rms": descend(optax.scale_by_rms(0.9, 1e-3, eps_in_sqrt=False)),
        "scale_by_schedule": descend(optax.scale_by_schedule(lambda count: 1 / (1 + count))),
        "sign": descend(optax.scale_by_sign()),
        "ema": descend(optax.ema(0.8)),
        "ema-biased": descend(optax.ema(0.8, debias=False)),
        "centralize": descend(optax.centralize()),
        "normalize": descend(optax.normalize_by_update_norm(0.7, eps=1e-3)),
        "clip_by_block_rms": (descend(optax.clip_by_block_rms(0.6)), "uneven"),
        "zero_nans": descend(optax.zero_nans(), optax.clip(1.0)),
        "zero_nans-broken": (descend(optax.zero_nans(), optax.clip(1.0)), "broken"),
        "keep_params_nonnegative": optax.chain(optax.sgd(LR, 0.9), optax.keep_params_nonnegative()),
        "scale_by_trust_ratio": descend(
            optax.scale_by_trust_ratio(min_norm=0.1, trust_coefficient=0.5, eps=1e-3)
        ),
        "params_ema": (optax.chain(optax.sgd(LR), averaged(0.9)), "calm", lambda s: s[1]),
        # combinators
        "chain": (
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LR, **adam), optax.trace(0.5)),
            "uneven",
        ),
        "named_chain": descend(
            optax.named_chain(("fast", optax.trace(0.5)), ("slow", optax.trace(0.9)))
        ),
        "flatten": optax.flatten(descend(optax.clip_by_global_norm(1.0), optax.scale_by_adam())),
        "partition": optax.partition(labelled, LABELS),
        "partition-norms": (optax.partition(clipped, LABELS), "uneven"),
        "masked": descend(optax.masked(optax.scale_by_adam(), BODY)),
        "freeze": optax.chain(optax.adam(LR), optax.freeze(BODY)),
        "selective_transform": optax.selective_transform(optax.adam(LR), freeze_mask=BODY),
        "conditionally_transform": descend(
            optax.conditionally_transform(optax.scale_by_adam(), lambda step: step % 3 != 0)
        ),
        "conditionally_mask": optax.conditionally_mask(optax.adam(LR), lambda step: step >= 5),
        "apply_if_finite": (optax.apply_if_finite(optax.adam(LR), 4), "broken"),
        "apply_if_finite-gives-up": (
            optax.apply_if_finite(descend(optax.clip(1.0)), 2),
            "broken",
            lambda s: {"notfinite_count": s.notfinite_count, "total_notfinite": s.total_notfinite},
        ),
        "skip_large_updates": (
            multi(optax.adam(LR), 1, should_skip_update_fn=large),
            "uneven",
        ),
        "accumulate": (
            multi(optax.adam(LR), 4),
            "calm",
            lambda s: s.acc_grads,
        ),
        "accumulate-sum": multi(optax.sgd(LR, 0.9), 3, use_grad_mean=False),
        "accumulate-growing": multi(optax.adam(LR), lambda done: 1 + done // 4),
        "accumulate-schedule": multi(optax.sgd(linear), 2),
        "accumulate-finite": (
            multi(optax.adam(LR), 4, should_skip_update_fn=optax.skip_not_finite),
            "broken",
        ),
        "clip-of-batches": (
            multi(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LR)), 5),
            "uneven",
        ),
        # schedules and hyperparameters
        "constant": optax.sgd(optax.constant_schedule(LR), momentum=0.9),
        "linear": optax.sgd(linear, momentum=0.9),
        "cosine": optax.adam(cosine, **adam),
        "warmup_cosine": optax.adamw(warm, **adam, weight_decay=0.1),
        "inject_hyperparams": (
            optax.inject_hyperparams(optax.adam)(cosine, b1=linear, b2=0.95, eps=1e-3),
            "calm",
            lambda s: {"lr": s.hyperparams["learning_rate"], "b1": s.hyperparams["b1"]},
        ),
    }


def trajectory(tx, kind="calm", kept=None):
    """The parameters after some steps, and what is kept of the last state."""
    params = jax.tree.map(jnp.asarray, waves.params())
    state = jax.tree.map(exact, tx.init(params))
    update = jax.jit(tx.update)
    found = {}
    for step in range(1, waves.STEPS + 1):
        grads = jax.tree.map(jnp.asarray, waves.grads(step, kind))
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if step in waves.KEPT:
            found[str(step)] = numbers(params)
    return {"kind": kind, "params": found, "kept": numbers(kept(state)) if kept else None}


def exact(x):
    """A count as int64: what divides an int32 is float32 in jax, even where doubles are allowed."""
    return x.astype(jnp.int64) if x.dtype == jnp.int32 else x


def numbers(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64).tolist(), tree)


def main():
    found = {}
    for name, row in rows().items():
        found[name] = trajectory(*_as_row(row))
    versions = {"optax": optax.__version__, "jax": jax.__version__, "numpy": np.__version__}
    write(FILE, {"versions": versions}, rows=found)


def _as_row(row):
    single = isinstance(row, optax.GradientTransformation) or hasattr(row, "init")
    return (row,) if single else row


if __name__ == "__main__":
    main()
