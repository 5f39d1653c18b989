"""Fine-tuning with the memory of inference."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from functional_optim import numeric, tree
from functional_optim.core import base, draws, memory
from functional_optim.core.base import Tree
from functional_optim.core.calls import check_numbers
from functional_optim.core.factory import factory
from functional_optim.estimators.pairs import differences, pairs
from functional_optim.estimators.protocol import (
    Estimator,
    EstimatorState,
    Rays,
    check_normal,
    check_some,
)
from functional_optim.kernels.interrupts import held

NORMAL = Rays(1, False, False)


@factory
def mezo(eps: numeric.Hyper = 1e-3, samples: int = 1) -> Estimator:
    """Estimate a gradient from two forward passes, in the memory of one: (f⁺ − f⁻) / (2 ε) · z.

    z is never stored. It is regenerated from seed and count when needed, and each parameter is
    perturbed only while an operation reads it, from the unchanged weights: adding ε z, −2 ε z and ε
    z in place, as in the paper's Algorithm 1, accumulates rounding errors in half types. An
    estimate is determined by one number (`state.weights`), so a log of the states is enough to
    replay the run: see `replay`.

    Args:
        eps: size of the perturbation, > 0: a number, a 0-dim tensor, or a schedule. Default 1e-3,
            the paper's.
        samples: estimates to average, one after the other, ≥ 1. Default 1, the paper's.

    `measure(loss_fn)(state, params)` makes only the two forward passes, and `mezo_step_` updates
    the parameters leaf by leaf: together they never store the noise of more than one leaf.
    `value_and_grad(loss_fn)` builds the whole gradient, for any transformation.

    Inside torch.compile and torch.vmap all perturbed parameters are computed first.

    Raises:
        ValueError: for hyperparameters out of range.

    Paper: Malladi et al., "Fine-Tuning Language Models with Just Forward Passes",
    https://arxiv.org/abs/2305.17333.

    Example::

        >>> import torch, functional_optim as fo
        >>> model = torch.nn.Linear(3, 1)
        >>> params = dict(model.named_parameters())
        >>> x, y = torch.randn(20, 3), torch.ones(20, 1)
        >>> def loss_fn(params):
        ...     return (torch.func.functional_call(model, params, (x,)) - y).square().mean()
        >>> est = fo.estimators.mezo()
        >>> state, log = est.init(params, seed=0), []
        >>> for _ in range(300):
        ...     value, state = est.measure(loss_fn)(state, params)
        ...     fo.estimators.mezo_step_(params, state, lr=0.02)
        ...     log.append(state)
        >>> bool(value < 0.05)
        True
    """
    numeric.check_range("mezo", "positive", eps=eps)
    numeric.check_count("mezo", 1, samples=samples)
    return pairs("mezo", NORMAL._replace(number=samples), eps, differences)


@torch.no_grad()
def mezo_step_(params: Tree, state: EstimatorState, lr: float | Tensor) -> None:
    """Descend along mezo's estimate, **in place** and leaf by leaf: p ← p − lr · Σ wᵢ zᵢ.

    Equal to `fo.sgd(lr)` on the whole gradient, without storing it.

    Args:
        params: the parameters that were passed to `measure`.
        state: the state after mezo's `measure`, or one of a log.
        lr: learning rate, a number or a 0-dim tensor.

    Ctrl-C takes effect after the step.

    Raises:
        TypeError, ValueError: for parameters or a learning rate that cannot be used, such as
            integers, or a parameter with several elements in one place of memory, and for a state
            of `spsa`; nothing is written then.

    Example::

        >>> import torch, functional_optim as fo
        >>> est, w = fo.estimators.mezo(), torch.ones(2)
        >>> _, state = est.measure(lambda w: w @ w)(est.init(w, seed=0), w)
        >>> functional = w - 0.1 * est.gradient(state, w)
        >>> fo.estimators.mezo_step_(w, state, lr=0.1)
        >>> torch.allclose(w, functional)
        True
    """
    check_normal("mezo_step_", state)
    check_some("mezo_step_", params)
    items = list(tree.items(params))
    if not torch.compiler.is_compiling():
        check_numbers(mezo_step_, (), (), {"lr": lr})
        for path, p in items:
            memory.check_apart([p], lambda _, path=path: f"parameter {path!r}")
    held(_descend, items, state, lr)  # half of a step could be neither repeated nor undone


def _descend(
    items: Iterable[tuple[str, Tensor]], state: EstimatorState, lr: float | Tensor
) -> None:
    rays = NORMAL._replace(number=state.weights.shape[0])
    key = draws.stream(state.seed, state.step)
    for path, p in items:
        p.copy_(base.add(p, -lr * rays.sum(key, state.weights, path, p)))
