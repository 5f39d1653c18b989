"""Gradient descent with Polyak's step size.

Loizou, Vaswani, Laradji, Lacoste-Julien, "Stochastic Polyak Step-size for SGD",
https://arxiv.org/abs/2002.10542.
"""

from __future__ import annotations

from functional_optim import numeric
from functional_optim.core.base import GradientTransformation
from functional_optim.core.factory import factory
from functional_optim.transforms.descent import descent
from functional_optim.transforms.polyak import scale_by_polyak


@factory
def polyak_sgd(
    max_learning_rate: numeric.Hyper = 1.0,
    scaling: numeric.Hyper = 1.0,
    f_min: numeric.Hyper = 0.0,
    eps: numeric.Hyper = 0.0,
    variant: str = "sps",
) -> GradientTransformation:
    """p ← p − scaling · min((f − f_min) / (‖g‖² + eps), max_learning_rate) · g.

    `update` takes the value f(params) as an extra argument, as for `scale_by_polyak`. With a wrong
    `f_min` it may stop too early, or diverge.

    Args:
        max_learning_rate: the largest step length, > 0.
        scaling: a factor on every step, ≥ 0. (optax scales the gradient before its norm is
            computed, so that a larger factor gives shorter steps.) f_min: the minimum of f, or a
            lower bound of it.
        eps: added to ‖g‖², ≥ 0.
        variant: "sps", or "sps+", as for `scale_by_polyak`.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are optax's.

    Raises:
        ValueError: for hyperparameters out of range, and for an unknown variant.
        TypeError: from update, without `value`.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.polyak_sgd()
        >>> w = torch.tensor([3.0, 4.0])
        >>> state = tx.init(w)
        >>> for _ in range(10):  # f(w) = w · w
        ...     updates, state = tx.update(2 * w, state, w, value=w @ w)
        ...     w = fo.apply_updates(w, updates)
        >>> float(w @ w) < 1e-4
        True
    """
    return descent(scale_by_polyak(f_min, max_learning_rate, eps, variant), scaling)
