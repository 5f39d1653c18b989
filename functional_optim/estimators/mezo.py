"""Fine-tuning in the memory of inference."""

from __future__ import annotations

import torch

from functional_optim import numeric, tree
from functional_optim.core import base, draws
from functional_optim.core.base import Tree
from functional_optim.core.factory import factory
from functional_optim.estimators.pairs import differences, pairs
from functional_optim.estimators.protocol import Estimator, EstimatorState, Rays, check_count

NORMAL = Rays(1, False, False)


@factory
def mezo(eps: numeric.Hyper = 1e-3, samples: int = 1) -> Estimator:
    """Estimate a gradient from two forward passes, in the memory of one: (f⁺ − f⁻) / (2 ε) · z.

    z is never stored. It is drawn again from seed and count wherever it is needed, and each
    parameter is moved only while an operation reads it, from the untouched weights: adding ε z,
    −2 ε z and ε z in place, as the paper's Algorithm 1 does, lets half types drift without any
    learning. What is left of an estimate is one number (`state.weights`), so a log of the states
    is enough to make the run again: see `replay`.

    Args:
        eps: how far to go, > 0: a number, a 0-dim tensor, or a schedule. Default 1e-3, the
            paper's.
        samples: estimates to average, one after the other, ≥ 1. Default 1, the paper's.

    `measure(loss_fn)(state, params)` is the two forward passes alone, and `mezo_step_` adds to the
    parameters leaf by leaf: both together never hold more than a leaf's noise.
    `value_and_grad(loss_fn)` builds the whole gradient, for any transformation.

    Inside torch.compile and torch.vmap all moved parameters are made first.

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
    check_count("mezo", "samples", samples)
    return pairs("mezo", NORMAL._replace(number=samples), eps, differences, lazy=True)


@torch.no_grad()
def mezo_step_(params: Tree, state: EstimatorState, lr: float) -> None:
    """Descend along mezo's estimate, **in place** and leaf by leaf: p ← p − lr · Σ wᵢ zᵢ.

    The same as `fo.sgd(lr)` on the whole gradient, which is never there.

    Args:
        params: the parameters that were measured.
        state: the state after `measure`, or one of a log.
        lr: learning rate.

    Example::

        >>> import torch, functional_optim as fo
        >>> est, w = fo.estimators.mezo(), torch.ones(2)
        >>> _, state = est.measure(lambda w: w @ w)(est.init(w, seed=0), w)
        >>> functional = w - 0.1 * est.gradient(state, w)
        >>> fo.estimators.mezo_step_(w, state, lr=0.1)
        >>> torch.allclose(w, functional)
        True
    """
    rays = NORMAL._replace(number=state.weights.shape[0])
    key = draws.stream(state.seed, state.step)
    for path, p in tree.items(params):
        p.copy_(base.add(p, -lr * rays.sum(key, state.weights, path, p)))
