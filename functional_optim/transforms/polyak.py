"""Polyak's step size."""

from __future__ import annotations

from functional_optim import numeric
from functional_optim.core.calls import check_choice
from functional_optim.core.factory import factory
from functional_optim.core.leafwise import Leafwise, leafwise
from functional_optim.core.rule import squares, times


@factory
def scale_by_polyak(
    f_min: numeric.Hyper = 0.0,
    max_learning_rate: numeric.Hyper = 1.0,
    eps: numeric.Hyper = 0.0,
    variant: str = "sps",
) -> Leafwise:
    """Multiply a gradient by (f − f_min) / ‖g‖², the step to the minimum of a model of f.

    The norm covers all parameters. `update` takes the value f(params) as an extra argument::

        updates, state = tx.update(grads, state, params, value=value)

    Args:
        f_min: the minimum of f, or a lower bound of it. 0 for a model that fits all of its data.
        max_learning_rate: the largest factor, > 0.
        eps: added to ‖g‖², ≥ 0.
        variant: "sps"; "sps+" does not move if f is below f_min, instead of ascending.

        Hyperparameters may also be 0-dim tensors or schedules. The defaults are optax's. In an
            optimizer object, call `step(closure)`, which passes the value.

    Raises:
        ValueError: for hyperparameters out of range, and for an unknown variant.
        TypeError: from update, without `value`.

    Papers: Loizou, Vaswani, Laradji, Lacoste-Julien, "Stochastic Polyak Step-size for SGD",
    https://arxiv.org/abs/2002.10542; for "sps+" Garrigos, Gower, Schaipp, "Function Value
    Learning", https://arxiv.org/abs/2307.14528.

    Example::

        >>> import torch, functional_optim as fo
        >>> tx = fo.chain(fo.scale_by_polyak(), fo.scale(-1))
        >>> w = torch.tensor([2.0])  # f(w) = w²
        >>> tx.update(2 * w, tx.init(w), w, value=w @ w)[0]
        tensor([-1.])
    """
    numeric.check_range("scale_by_polyak", "positive", max_learning_rate=max_learning_rate)
    numeric.check_range("scale_by_polyak", "of 0 or more", eps=eps)
    check_choice("scale_by_polyak", ("sps", "sps+"), variant=variant)

    def scalars(t, total, *, f_min, max_learning_rate, eps, value):
        gap = numeric.float64(value) - f_min
        if variant == "sps+":
            gap = numeric.maximum(gap, 0.0)
        square = total[0] + eps
        null = square == 0
        step = gap / numeric.where(null, 1.0, square)
        return (numeric.where(null, 0.0, numeric.minimum(step, max_learning_rate)),)

    hyper = {"f_min": f_min, "max_learning_rate": max_learning_rate, "eps": eps}
    return leafwise(None, times, scalars, reduce=squares, hyper=hyper, name="scale_by_polyak")
