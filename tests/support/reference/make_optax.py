"""Writes optax.json: where optax goes in the rows of test_optax.py, which needs no jax itself.

    pip install -e '.[test,peers]' && python tests/support/reference/make_optax.py

Where a row has one description, it is of both libraries: optax stands there under our names.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

sys.path += [str(Path(__file__).parents[k] / name) for k, name in ((1, ""), (2, "algorithms"))]
from test_optax import LABELS, MATRIX, ROWS

from reference import waves, write

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_platforms", "cpu")

FILE = Path(__file__).with_name("optax.json")
TREES = {
    MATRIX: {"body": {"b": False, "w": True}, "head": False},
    "labels": {"body": {"b": "slow", "w": "fast"}, "head": "still"},
}
NAMES = {
    "clip_by_value": "clip",
    "normalize": "normalize_by_update_norm",
    "scale_by_lr": "scale_by_learning_rate",
    "sign": "scale_by_sign",
    "constant": "constant_schedule",
    "cosine": "cosine_decay_schedule",
    "linear": "linear_schedule",
    "warmup_cosine": "warmup_cosine_decay_schedule",
}
"""What optax calls what we call otherwise."""


def place(x):
    """A path or labels as the tree that optax takes."""
    return TREES["labels"] if x is LABELS else TREES[x] if x == MATRIX else x


class Optax:
    """optax under our names: `betas` are b1, b2, …, but for those that have betas themselves."""

    def __getattr__(self, name):
        name = NAMES.get(name, name)
        make = getattr(optax, name, None) or getattr(optax.contrib, name)

        @functools.wraps(make)
        def call(*given, **hyper):
            if "betas" in hyper and name not in ("prodigy", "dadapt_adamw"):
                hyper |= {f"b{i}": x for i, x in enumerate(hyper.pop("betas"), start=1)}
            return make(*map(place, given), **{key: place(x) for key, x in hyper.items()})

        return call

    @property
    def schedules(self):
        return self

    def freeze(self, mask=None):
        return optax.set_to_zero() if mask is None else optax.freeze(place(mask))

    def params_ema(self, decay):
        """The average of the parameters after each update."""

        def update(updates, average, params):
            new = optax.apply_updates(params, updates)
            return updates, optax.incremental_update(new, average, 1 - decay)

        return optax.GradientTransformation(lambda params: params, update)

    def accumulate(self, tx, every, mean=True, skip_nonfinite=False, skip=None):
        skip = optax.skip_not_finite if skip_nonfinite else skip
        how = {"use_grad_mean": mean, "should_skip_update_fn": skip}
        return optax.MultiSteps(tx, every, accumulator_dtype=jnp.float64, **how)

    def skip_large_updates(self, tx, most):
        skip = functools.partial(optax.skip_large_updates, max_squared_norm=most**2)
        return self.accumulate(tx, 1, skip=skip)


def trajectory(row):
    """The parameters after some steps, and what is kept of the last state."""
    tx, params = row.theirs(Optax()), jax.tree.map(jnp.asarray, waves.params())
    state = jax.tree.map(exact, tx.init(params))
    update = jax.jit(tx.update)
    found = {}
    for step in range(1, waves.STEPS + 1):
        grads = jax.tree.map(jnp.asarray, waves.grads(step, row.kind))
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if step in waves.KEPT:
            found[str(step)] = numbers(params)
    return {"params": found, "kept": numbers(row.kept[1](state)) if row.kept else None}


def exact(x):
    """A count as int64: what divides an int32 is float32 in jax, even where doubles are allowed."""
    return x.astype(jnp.int64) if x.dtype == jnp.int32 else x


def numbers(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64).tolist(), tree)


if __name__ == "__main__":
    versions = {"optax": optax.__version__, "jax": jax.__version__, "numpy": np.__version__}
    write(FILE, {"versions": versions}, rows={name: trajectory(x) for name, x in ROWS.items()})
