"""Gradients from directional derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from functional_optim import numeric, tree
from functional_optim.core.base import Tree
from functional_optim.core.calls import check_choice
from functional_optim.core.factory import factory
from functional_optim.estimators.protocol import (
    Estimator,
    EstimatorState,
    Rays,
    key_ahead,
    number,
    shared,
)
from functional_optim.search.shaping import seen


@factory
def forward_gradient(
    directions: int = 1, *, distribution: str = "normal", batched: bool = True
) -> Estimator:
    """Estimate a gradient by its products with random directions: the mean of (∇f · z) z.

    The products come from forward-mode differentiation (torch.func.jvp), exact and without a
    backward pass: no activations are stored. The estimate is unbiased. The variance of an element
    is ‖g‖² + gᵢ² for normal numbers, and ‖g‖² − gᵢ² for signs, divided by the number of directions,
    so the noise increases with the number of parameters.

    Args:
        directions: number of directions to average, ≥ 1. Default 1, the paper's.
        distribution: "normal" (the paper's) or "rademacher", random signs.
        batched: all directions at once, under torch.vmap. False: one after the other.

    It does not support `ask` and `tell`: it must differentiate the loss function, whose operations
    all need forward-mode derivatives.

    Raises:
        ValueError: for hyperparameters out of range or an unknown distribution; for a loss without
            a derivative, such as a Python number.
        TypeError: from ask and tell.

    Papers: Baydin, Pearlmutter, Syme, Wood, Torr, "Gradients without Backpropagation",
    https://arxiv.org/abs/2202.08587.

    Example::

        >>> import torch, functional_optim as fo
        >>> est = fo.estimators.forward_gradient(directions=5000)
        >>> w = torch.tensor([1.0, -2.0, 3.0])
        >>> (value, grads), state = est.value_and_grad(lambda w: w @ w)(est.init(w, seed=0), w)
        >>> value.item(), bool((grads - 2 * w).abs().max() < 0.5)
        (14.0, True)
    """
    numeric.check_count("forward_gradient", 1, directions=directions)
    check_choice("forward_gradient", ("normal", "rademacher"), distribution=distribution)
    name, rays = "forward_gradient", Rays(directions, distribution == "rademacher", batched)

    def measure(loss_fn: Callable[..., Any]) -> Callable[..., tuple[Tensor, EstimatorState]]:
        def measured(
            state: EstimatorState, params: Tree, *args: Any
        ) -> tuple[Tensor, EstimatorState]:
            key, _ = key_ahead(state)
            named = list(tree.items(params))

            def along(i: Any) -> Any:
                def loss(*leaves: Tensor) -> Tensor:
                    moved = tree.with_leaves(params, list(leaves))
                    return differentiated(number(name, loss_fn(moved, *args)))

                z = [rays.one(key, i, path, p).to(p.dtype) for path, p in named]
                return torch.func.jvp(loss, tuple([p.detach() for _, p in named]), tuple(z))

            with torch.no_grad():
                if batched:
                    every = torch.arange(directions, dtype=torch.int64, device=key.device)
                    values, slopes = torch.vmap(along, randomness="different")(every)
                else:
                    found = [along(i) for i in range(directions)]
                    values, slopes = [torch.stack(x) for x in zip(*found, strict=True)]
            weights = shared(slopes.to(state.weights))
            return seen(values.to(weights)), rays.state(state.step + 1, state.seed, weights)

        return measured

    return Estimator(rays.start(name), measure, rays.gradient, refuse, refuse, name)


def differentiated(value: Tensor) -> Tensor:
    """The loss inside jvp; raises ValueError if it has no derivative, whose estimate would be 0."""
    if forward_ad.unpack_dual(value).tangent is None:
        raise ValueError(
            "forward_gradient needs a loss that depends on the parameters by differentiable "
            "operations of torch; leave out detach, item and no_grad, or use spsa or es_gradient, "
            "which need only its value."
        )
    return value


def refuse(*args: Any) -> Any:
    """`ask` and `tell` of an estimator that needs the function."""
    raise TypeError(
        "forward_gradient differentiates the loss function and cannot use its values; call "
        "value_and_grad(loss_fn)(state, params)."
    )
