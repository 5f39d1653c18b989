"""The problem on which optax and this library are compared: parameters and gradients of waves.

In numpy and float64, so that both sides compute the same. Ten numbers in three leaves.
"""

import numpy as np

SHAPES = {"body": {"b": (3,), "w": (2, 3)}, "head": ()}
STEPS = 50
KEPT = (1, 2, 10, 50)
"""After how many steps the parameters are written down."""
BROKEN = {3: np.nan, 4: np.nan, 17: np.inf, 30: np.nan, 31: np.nan, 32: -np.inf, 33: np.nan}
"""The steps of which "broken" gradients have a bad entry in one leaf."""
LARGE = (1, 8, 9, 40)
"""The steps in which "uneven" gradients are fifty times as large."""


def params():
    """Entries between −2 and 2, none of them 0."""
    return _tree(lambda leaf, i: 2 * np.cos(1.3 * i + leaf + 0.2))


def grads(step, kind="calm"):
    """The gradients of a step, 1 at the first. kind: calm, broken, uneven."""
    found = _tree(lambda leaf, i: np.sin(1.7 * i + 0.9 * step + 0.3 * leaf) + 0.1 * (leaf + 1))
    if kind == "broken" and step in BROKEN:
        found["body"]["w"][1, 2] = BROKEN[step]
    if kind == "uneven" and step in LARGE:
        body = {name: 50 * g for name, g in found["body"].items()}
        return {"body": body, "head": 50 * found["head"]}
    return found


def _tree(fn):
    def leaf(number, shape):
        return fn(number, np.arange(np.prod(shape, dtype=int), dtype=np.float64)).reshape(shape)

    body = SHAPES["body"]
    bodies = {name: leaf(k, shape) for k, (name, shape) in enumerate(body.items())}
    return {"body": bodies, "head": leaf(len(body), SHAPES["head"])}


def downhill(step, now):
    """A loss and its gradients at a list of parameters: a valley with noise that is waves."""
    wide = [np.asarray(1.0 + 0.5 * np.arange(p.size).reshape(p.shape)) for p in now]
    noise = leaves(grads(step))
    slopes = [w * (p - 0.5) for w, p in zip(wide, now, strict=True)]
    value = 0.1 + sum(float((s * (p - 0.5)).sum()) / 2 for s, p in zip(slopes, now, strict=True))
    return value, [s + 0.2 * x for s, x in zip(slopes, noise, strict=True)]


def leaves(tree):
    """The leaves of a tree in order."""
    return [*tree["body"].values(), tree["head"]]
