"""Simultaneous perturbation stochastic approximation."""

from __future__ import annotations

from typing import Any

from functional_optim import numeric
from functional_optim.core.factory import factory
from functional_optim.estimators.pairs import differences, pairs
from functional_optim.estimators.protocol import Estimator, Rays
from functional_optim.schedules.formula import of_step


@factory
def spsa(
    c: numeric.Hyper = 0.01, gamma: numeric.Hyper = 0.101, samples: int = 1, *, batched: bool = True
) -> Estimator:
    """Estimate a gradient from two values of the loss: (f(p + cₜ Δ) − f(p − cₜ Δ)) / (2 cₜ) · Δ.

    Δ has random signs. With a noisy loss, noise dominates the differences if c is small, and
    curvature biases them if it is large; cₜ = c / tᵞ decreases slowly enough for convergence.

    Args:
        c: size of the perturbation, > 0: a number, a 0-dim tensor, or a schedule. Spall recommends
            the standard deviation of the noise in the loss, and a small number without noise.
            Default 0.01.
        gamma: its rate of decrease, ≥ 0; also a number, tensor or schedule. Default 0.101,
            Spall's; 0 for a constant c.
        samples: pairs of evaluations per estimate, ≥ 1; their estimates are averaged.
        batched: evaluate all at once, under torch.vmap. False: one after the other, each leaf
            perturbed when it is read, for losses that cannot be vmapped and to save memory.

    With `spsa_gain` as the learning rate of gradient descent this is Spall's algorithm, but you can
    use any transformation. The bias is O(c²), and 0 for quadratics; the variance of an element is
    then ‖g‖² − gᵢ², divided by `samples`.

    Raises:
        ValueError: for hyperparameters out of range.

    Papers: Spall, "Multivariate stochastic approximation using a simultaneous perturbation gradient
    approximation", https://doi.org/10.1109/9.119632; advice on gains: "Implementation of the
    simultaneous perturbation algorithm for stochastic optimization",
    https://doi.org/10.1109/7.705889.

    Example::

        >>> import torch, functional_optim as fo
        >>> est = fo.estimators.spsa(c=0.1)
        >>> w = torch.tensor([1.0])  # in one dimension, a sign says nothing
        >>> (value, grads), state = est.value_and_grad(lambda w: (w * w).sum())(est.init(w), w)
        >>> grads.round(decimals=4)
        tensor([2.])
    """
    numeric.check_range("spsa", "positive", c=c)
    numeric.check_range("spsa", "of 0 or more", gamma=gamma)
    numeric.check_count("spsa", 1, samples=samples)

    def reach(count: Any) -> Any:
        t = count + 1
        return numeric.at(c, t) / numeric.power(t, numeric.at(gamma, t))

    return pairs("spsa", Rays(samples, True, batched), reach, differences)


@factory
def spsa_gain(
    a: numeric.Number, stability: numeric.Number = 0.0, alpha: numeric.Number = 0.602
) -> numeric.Schedule:
    """Spall's gain sequence as a learning rate: a / (A + t)ᵅ at step t = 1, 2, …

    Args:
        a: the scale, > 0.
        stability: A, ≥ 0. Spall recommends a tenth of the number of steps, or less. Default 0.
        alpha: its rate of decrease, > 0. Default 0.602, Spall's, the smallest value with a
            convergence proof; 1 is asymptotically optimal.

    Raises:
        ValueError: for hyperparameters out of range.

    Paper: Spall, "Implementation of the simultaneous perturbation algorithm for stochastic
    optimization", https://doi.org/10.1109/7.705889.

    Example::

        >>> import functional_optim as fo
        >>> lr = fo.estimators.spsa_gain(a=2.0, stability=3.0, alpha=0.5)
        >>> lr(0), fo.sgd(lr) is not None
        (1.0, True)
    """
    numeric.check_range("spsa_gain", "positive", a=a)
    numeric.check_range("spsa_gain", "of 0 or more", stability=stability)
    numeric.check_range("spsa_gain", "positive", alpha=alpha)

    def formula(n, a, stability, alpha):
        return a / numeric.power(stability + n + 1, alpha)

    return of_step(formula, a, stability, alpha)
